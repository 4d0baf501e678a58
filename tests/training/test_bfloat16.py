"""
A frozen base model in bfloat16: trained, saved, resumed and read in every way that one in float32 is.

What has to be equal in float32 to 1e-4 is so here to `NEAR` in probabilities, since rows of a batch are added up in
another order and each sum is rounded to 8 bits; and the answers are the same wherever they are clearer than that.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from tiny import build_classifier, make_rows, make_texts
from training_runs import config, steps, weights, write_head_recipe

from dappr_llm import AdapterEnsemble, DAPPrTrainer, UserError, load_checkpoint
from dappr_llm.commands.main import main
from dappr_llm.evaluation.prediction_table import PredictionTable

NEAR = 0.005
pytestmark = pytest.mark.usefixtures("in_bfloat16")


@pytest.fixture
def strong_folder(tmp_path, tokenizer, make_model):
    """A tiny model whose answers depend on the question: larger weights than random ones start with."""
    model = make_model()
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.dim() > 1 else 1.0)
    folder = tmp_path / "strong"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trainer_of(folder, base, lora=None, rows=None, **changes):
    return DAPPrTrainer(
        str(base),
        config(folder, **{"num_train_epochs": 4, **changes}),
        train_dataset=make_rows(32) if rows is None else rows,
        peft_config=lora,
        method="ce",
    )


def same_answers(one, other):
    """Probabilities are near each other, and the answers are equal away from ties; most rows have to be."""
    one, other = np.asarray(one), np.asarray(other)
    assert np.abs(one - other).max() < NEAR
    best = np.sort(one, axis=-1)
    clear = best[:, -1] - best[:, -2] > 2 * NEAR
    assert clear.mean() >= 0.5
    assert (one.argmax(-1) == other.argmax(-1))[clear].all()


def table_of(trainer):
    return trainer.predict_table(make_rows(24, 40), "t", "test")


def base_weight(model):
    return model.get_base_model().model.layers[0].mlp.up_proj.weight


def test_all_that_is_trained_is_in_float32(tmp_path, strong_folder, lora, monkeypatch):
    trainer = trainer_of(tmp_path / "a", strong_folder, lora)
    assert base_weight(trainer.model).dtype == torch.bfloat16
    trainer.train()
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    assert trained and all(p.dtype == p.grad.dtype == torch.float32 for p in trained if p.grad is not None)
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    assert states and all(value.dtype == torch.float32 for value in states)
    batch = trainer.backend.collate(list(trainer.backend.prepare(make_rows(4))))
    assert trainer.backend.read(trainer.model, batch).logits.dtype == torch.float32
    assert trainer.compute_loss(trainer.model, batch).dtype == torch.float32

    monkeypatch.setenv("DAPPR_CPU_DTYPE", "float32")
    other = trainer_of(tmp_path / "b", strong_folder, lora)
    assert base_weight(other.model).dtype == torch.float32
    other.train()
    found, wanted = ([entry["loss"] for entry in steps(each)] for each in (trainer, other))
    assert found == pytest.approx(wanted, rel=0.1) and found != wanted
    assert np.mean(wanted[-4:]) < 0.9 * np.mean(wanted[:4])  # something was learnt


def test_both_dtypes_answer_alike(tmp_path, strong_folder, lora, monkeypatch):
    trainer = trainer_of(tmp_path / "a", strong_folder, lora)
    trainer.train()
    trainer.save_model(str(tmp_path / "a"))
    found = table_of(trainer)
    precise = load_checkpoint(tmp_path / "a", dtype="float32")
    assert precise.backend.precision == "float32"
    wanted = precise.predictor().predict_table(make_rows(24, 40), task="t")
    same_answers(found.probs, wanted.probs)
    assert np.abs(found.probs - wanted.probs).max() > 1e-6  # they are two computations


def test_what_was_trained_is_what_is_loaded_on_any_machine(tmp_path, strong_folder, lora, monkeypatch):
    trainer = trainer_of(tmp_path / "a", strong_folder, lora, num_train_epochs=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "a"))
    assert json.loads((tmp_path / "a" / "uncertainty_config.json").read_text())["precision"] == "bfloat16"
    monkeypatch.setenv("DAPPR_CPU_DTYPE", "float32")
    run = load_checkpoint(tmp_path / "a")
    assert base_weight(run.model).dtype == torch.bfloat16
    again = run.predictor().predict_table(make_rows(24, 40), task="t")
    assert np.allclose(again.probs, table_of(trainer).probs, atol=1e-6)
    other = trainer_of(tmp_path / "b", strong_folder, lora, num_train_epochs=1)
    other.save_model(str(tmp_path / "b"))
    monkeypatch.setenv("DAPPR_CPU_DTYPE", "bfloat16")
    assert base_weight(load_checkpoint(tmp_path / "b").model).dtype == torch.float32


@pytest.mark.parametrize("options", [{"packing": False}, {"share_prefix": False}, {"per_device_eval_batch_size": 1}])
def test_packing_prefixes_and_batches_change_no_answer(tmp_path, strong_folder, lora, options):
    first = trainer_of(tmp_path / "a", strong_folder, lora)
    first.train()
    assert first.backend.reader.packing
    other = trainer_of(tmp_path / "b", strong_folder, lora, eval_tokens=0, **options)
    other.model.load_state_dict(first.model.state_dict())
    other.backend.evidence_offset = first.backend.evidence_offset
    same_answers(table_of(first).probs, table_of(other).probs)


def test_training_packed_is_training_padded(tmp_path, strong_folder, lora):
    packed, padded = (trainer_of(tmp_path / str(on), strong_folder, lora, packing=on) for on in (True, False))
    for each in (packed, padded):
        each.train()
    found, wanted = ([entry["loss"] for entry in steps(each)] for each in (packed, padded))
    assert found == pytest.approx(wanted, rel=0.1)


def test_the_trunk_cache_holds_what_the_trunk_computes(tmp_path, strong_folder):
    from peft import LoraConfig

    top = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=[1], task_type="CAUSAL_LM")
    tables = []
    for name, options in (("plain", {}), ("cached", {"trunk_cache": str(tmp_path / "trunk")})):
        trainer = trainer_of(tmp_path / name, strong_folder, top, **options)
        trainer.train()
        tables.append(table_of(trainer))
    assert trainer.backend.reader.frozen.store.dtype == torch.bfloat16
    same_answers(tables[0].probs, tables[1].probs)


def run_recipe(recipe, *more):
    values = yaml.safe_load(recipe.read_text())
    values["model"]["name"] = str(recipe.parent / "strong")
    recipe.write_text(yaml.safe_dump(values))
    return main(["train", str(recipe), *more])


def test_members_of_an_ensemble_share_a_batch(tmp_path, strong_folder, recipe):
    folders = []
    for seed in (0, 1):
        folders.append(str(tmp_path / f"seed{seed}"))
        settings = (f"train.seed={seed}", "train.num_train_epochs=6", "method={name: ce}")
        more = [part for setting in settings for part in ("--set", setting)]
        assert run_recipe(recipe, "--output-dir", folders[-1], *more) == 0
    ensemble = AdapterEnsemble.from_pretrained(folders)
    assert ensemble.run.backend.precision == "bfloat16"
    rows = make_rows(12, 60)
    encoded = ensemble.run.encoded([row["question"] for row in rows], [row["choices"] for row in rows])
    together, turns = ensemble.predict_together(*encoded), ensemble.predict_in_turn(*encoded)
    for one, other in zip(together, turns, strict=True):
        same_answers(one.probs, other.probs)


def test_a_run_says_its_dtype_and_goes_on_with_it_elsewhere(tmp_path, strong_folder, recipe, monkeypatch, capsys):
    """Interrupted and resumed on a machine where `auto` is float32: bit for bit the uninterrupted run."""
    assert run_recipe(recipe) == 0
    assert "base model in bfloat16" in capsys.readouterr().out
    run = tmp_path / "run"
    assert json.loads((run / "results.json").read_text())["meta"]["precision"] == "bfloat16"
    assert yaml.safe_load((run / "recipe.yaml").read_text())["model"]["dtype"] == "bfloat16"
    wanted = (run / "adapter_model.safetensors").read_bytes()
    table = PredictionTable.load(run / "predictions" / "mine-test.npz")
    first = min(run.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    for path in [*run.iterdir()]:
        if path not in (first, run / "recipe.yaml"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    monkeypatch.setenv("DAPPR_CPU_DTYPE", "float32")
    assert main(["train", str(recipe), "--resume"]) == 0
    assert (run / "adapter_model.safetensors").read_bytes() == wanted
    again = PredictionTable.load(run / "predictions" / "mine-test.npz")
    assert np.array_equal(again.probs, table.probs)
    assert main(["train", str(recipe), "--resume"]) == 0 and "finished" in capsys.readouterr().out


def test_a_dtype_that_is_given_wins(tmp_path, strong_folder, recipe):
    assert run_recipe(recipe, "--set", "model.dtype=float32") == 0
    assert json.loads((tmp_path / "run" / "results.json").read_text())["meta"]["precision"] == "float32"


def test_a_head_is_trained_in_float32_above_a_frozen_base(tmp_path, tokenizer):
    base = tmp_path / "base"
    build_classifier().model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    trainer = trainer_of(tmp_path / "a", base, rows=make_texts(48))
    assert trainer.backend.precision == "bfloat16"
    trainer.train()
    trained = {name: p.dtype for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert any("score" in name for name in trained) and set(trained.values()) == {torch.float32}
    trainer.save_model(str(tmp_path / "a"))
    found = load_checkpoint(tmp_path / "a").predictor().predict_table(make_texts(24, 60), task="t")
    wanted = load_checkpoint(tmp_path / "a", dtype="float32").predictor().predict_table(make_texts(24, 60), task="t")
    same_answers(found.probs, wanted.probs)


def test_full_fine_tuning_stays_in_float32(tmp_path, tokenizer):
    base = tmp_path / "base"
    build_classifier().model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    recipe = write_head_recipe(tmp_path, base, train={"num_train_epochs": 1})
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "lora": None}))
    assert main(["train", str(recipe)]) == 0
    run = load_checkpoint(tmp_path / "run")
    assert run.backend.precision == "float32" and {p.dtype for p in run.model.parameters()} == {torch.float32}


def test_weights_of_the_base_that_are_trained_stay_in_float32(tmp_path, strong_folder, lora):
    lora.target_modules.discard("lm_head")
    lora.modules_to_save = ["lm_head"]
    trainer = trainer_of(tmp_path / "a", strong_folder, lora)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_a_pooler_that_starts_at_random_is_trained_in_float32(tmp_path, tokenizer):
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    small = BertConfig(
        vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, pad_token_id=0,
    )  # fmt: skip
    BertForMaskedLM(small).save_pretrained(tmp_path / "bert")  # without a pooler, which a classifier has
    tokenizer.save_pretrained(tmp_path / "bert")
    trainer = trainer_of(tmp_path / "a", tmp_path / "bert", rows=make_texts(48))
    assert trainer.backend.precision == "bfloat16"
    before = weights(trainer)
    assert any("pooler" in name for name in before)
    assert {value.dtype for value in before.values()} == {torch.float32}
    trainer.train()
    after = weights(trainer)
    assert all(not torch.equal(before[name], after[name]) for name in before if "pooler" in name)


def test_a_run_of_an_older_version_stays_in_float32(tmp_path, monkeypatch):
    fixture = Path(__file__).resolve().parents[1] / "fixtures" / "run_v0_1_0"
    folder = shutil.copytree(fixture, tmp_path / "old")
    monkeypatch.chdir(folder)
    assert load_checkpoint("run").backend.precision == "float32"


def test_a_script_on_another_machine_is_told_how_to_go_on(tmp_path, strong_folder, lora, monkeypatch):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer_of(tmp_path / "a", strong_folder, lora, **options).train()
    monkeypatch.setenv("DAPPR_CPU_DTYPE", "float32")
    with pytest.raises(UserError, match="precision is 'bfloat16', now 'float32'.*DAPPR_CPU_DTYPE"):
        trainer_of(tmp_path / "a", strong_folder, lora, **options).train(resume_from_checkpoint=True)
