"""Every method on answer-choice logits: training, saving, loading, several passes, further outputs."""

import json

import numpy as np
import pytest
import torch
from peft import LoraConfig
from tiny import make_rows
from training_runs import build

from dappr_llm import UserError, load_checkpoint
from dappr_llm.inference.stochastic_passes import dropout_on, seeded
from dappr_llm.methods import get_method, served_by


@pytest.fixture
def lora():
    """With dropout, which MC dropout needs."""
    targets = ["q_proj", "v_proj", "lm_head"]
    return LoraConfig(r=4, lora_alpha=8, lora_dropout=0.2, target_modules=targets, task_type="CAUSAL_LM")


@pytest.mark.parametrize("name", served_by(frozenset({"auxiliary_rows"})))
def test_train_save_load_predict(name, tmp_path, tokenizer, lora, model_folder):
    auxiliary = make_rows(7, start=200) if get_method(name).needs else None
    trainer = build(
        tmp_path / "run", tokenizer, lora, validation=make_rows(7, start=50), method=name, max_steps=2,
        auxiliary_dataset=auxiliary,
    )  # fmt: skip
    trainer.backend.base_model = str(model_folder)
    trainer.train()
    metrics = trainer.evaluate()
    assert np.isfinite(metrics["eval_loss"]) and metrics == trainer.evaluate() | _timing(metrics)
    trainer.save_model(str(tmp_path / "run"))
    table = trainer.predict_table(make_rows(7, start=50), "toy", "test", task_num_choices=5)
    assert table.width == 5 and table.meta["method"] == name

    run = load_checkpoint(tmp_path / "run")
    assert run.method == trainer.method
    again = build_predictor(run, tmp_path).predict_table(make_rows(7, start=50), "toy", "test", task_num_choices=5)
    np.testing.assert_allclose(again.probs, table.probs, atol=1e-5)
    np.testing.assert_allclose(again.epistemic, table.epistemic, atol=1e-4)
    answer = run.predict("Which one is a fruit ?", ["plum", "saw", "red"])
    assert answer.probs.shape == (1, 3) and answer.probs.sum().item() == pytest.approx(1, abs=1e-5)


def _timing(metrics):
    return {key: value for key, value in metrics.items() if "runtime" in key or "per_second" in key}


def build_predictor(run, folder):
    from dappr_llm import DAPPrConfig, DAPPrTrainer

    args = DAPPrConfig(str(folder / "again"), report_to="none", disable_tqdm=True, seed=0)
    return DAPPrTrainer(run.model, args, method=run.method, backend=run.backend)


def test_scales_are_read_from_fixed_rows(tmp_path, tokenizer, lora, model_folder):
    """A wider reading adds a letter and a scale row; it moves none."""
    trainer = build(tmp_path / "run", tokenizer, lora, method="ib_edl", max_steps=1)
    backend = trainer.backend
    rows = trainer.backend.prepare(make_rows(3))
    batch = backend.collate(list(rows))
    trainer.model.eval()
    with torch.no_grad():
        four = backend.read(trainer.model, batch).logits
        five = backend.read(trainer.model, batch, width=5).logits
    assert four.shape == (3, 8) and five.shape == (3, 10)
    torch.testing.assert_close(four[:, :4], five[:, :4])
    torch.testing.assert_close(four[:, 4:], five[:, 5:9])
    config = backend.config()
    assert config["extra_token_ids"] == [[79, 78, 77, 76]]
    assert not set(config["extra_token_ids"][0]) & set(config["letter_token_ids"])


def test_other_stored_scale_rows_are_refused(tmp_path, tokenizer, lora, model_folder):
    trainer = build(tmp_path / "run", tokenizer, lora, method="ib_edl", max_steps=1)
    trainer.backend.base_model = str(model_folder)
    trainer.save_model(str(tmp_path / "run"))
    run = load_checkpoint(tmp_path / "run")
    path = tmp_path / "run" / "uncertainty_config.json"
    config = json.loads(path.read_text())
    assert run.backend.config()["extra_token_ids"] == config["extra_token_ids"]
    config["extra_token_ids"] = [[70, 71, 72, 73]]
    path.write_text(json.dumps(config))
    (tmp_path / "run" / "manifest.json").unlink()
    with pytest.raises(UserError, match="extra_token_ids is .*70, 71, 72, 73"):
        load_checkpoint(tmp_path / "run")


def test_the_offset_moves_answers_and_not_scales(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora, method="ib_edl")
    batch = trainer.backend.collate(list(trainer.backend.prepare(make_rows(2))))
    trainer.model.eval()
    with torch.no_grad():
        plain = trainer.backend.read(trainer.model, batch).logits
        trainer.backend.evidence_offset = -3.0
        moved = trainer.backend.read(trainer.model, batch).logits
    torch.testing.assert_close(moved[:, :4], plain[:, :4] - 3)
    torch.testing.assert_close(moved[:, 4:], plain[:, 4:])


def test_passes_keep_only_dropout_on(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora, method="mc_dropout")
    model = trainer.model.eval()
    with dropout_on(model):
        on = {name for name, module in model.named_modules() if module.training}
    assert on and all("lora_dropout" in name for name in on)
    assert not any(module.training for module in model.modules())


def test_passes_differ_and_are_seeded(tmp_path, tokenizer, lora):
    trainer = build(
        tmp_path, tokenizer, lora, method=get_method("mc_dropout", passes=4), max_steps=2, learning_rate=0.1
    )
    trainer.train()
    rows = make_rows(5, start=40)
    state = torch.get_rng_state()
    first, second = (trainer.predict_table(rows, "toy") for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert first.members.shape == (4, 5, 4)
    assert np.ptp(first.members, axis=0).max() > 1e-4 and first.epistemic.max() > 0
    np.testing.assert_array_equal(first.members, second.members)


def test_passes_without_dropout_are_refused(tmp_path, tokenizer):
    plain = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = build(tmp_path, tokenizer, plain, method="mc_dropout")
    with pytest.raises(UserError, match="lora_dropout above 0"):
        trainer.predict_table(make_rows(2), "toy")


def test_seeded_leaves_the_stream_alone():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    with seeded(1):
        torch.rand(7)
    assert torch.equal(torch.rand(3), wanted)
