"""QLoRA on a CPU, streams, shards, tracking: what large runs need, on a tiny model."""

import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny import make_rows, write_recipe
from training_runs import METHOD, build, config, steps, weights
from transformers import TrainerCallback

from dappr_llm import DAPPrConfig, DAPPrTrainer, UserError, load_checkpoint
from dappr_llm.commands.main import main
from dappr_llm.methods.dappr import DAPPr
from dappr_llm.training.callbacks.ood_monitor import OODMonitor


@pytest.fixture
def wide_folder(tmp_path, tokenizer):
    """A base whose layers are as wide as bitsandbytes' blocks."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    shape = MistralConfig(
        vocab_size=80, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=2, eos_token_id=2,
        sliding_window=None,
    )  # fmt: skip
    MistralForCausalLM(shape).save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


def test_gradients_pass_through_a_4_bit_base_that_was_evaluated_before(wide_folder, tmp_path, lora):
    """bitsandbytes rewrites weights in evaluation mode, on some CPUs only, and then gradients stop at every layer."""
    pytest.importorskip("bitsandbytes")
    quantization = {"load_in_4bit": True}
    trainer = DAPPrTrainer(
        str(wide_folder), config(tmp_path), make_rows(4), peft_config=lora, quantization_config=quantization
    )
    assert not any(getattr(m, "support_avx512bf16_for_cpu", False) for m in trainer.model.modules())
    name, lowest = next(
        (n, p) for n, p in trainer.model.named_parameters() if "layers.0" in n and "v_proj.lora_B" in n
    )
    batch = trainer.backend.collate([trainer.train_dataset[i] for i in range(4)])

    def gradient():
        loss = trainer.compute_loss(trainer.model.train(), dict(batch))
        return torch.autograd.grad(loss, lowest)[0]

    before = gradient()
    with torch.no_grad():
        trainer.backend.read(trainer.model.eval(), batch)
    assert before.abs().max() > 0 and torch.allclose(gradient(), before, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize("bits, layer", [(4, "Linear4bit"), (8, "Linear8bitLt")])
def test_quantised_base_forward_backward_save_and_reload(wide_folder, tmp_path, lora, bits, layer):
    pytest.importorskip("bitsandbytes")
    quantization = {f"load_in_{bits}bit": True}
    args = config(tmp_path / "run", gradient_checkpointing=True, max_steps=3)
    trainer = DAPPrTrainer(
        str(wide_folder), args, make_rows(24), peft_config=lora, quantization_config=quantization, method=METHOD
    )
    kinds = [type(module).__name__ for module in trainer.model.modules()]
    assert kinds.count(layer) > 0
    if bits == 4:
        state = next(m for m in trainer.model.modules() if type(m).__name__ == layer).weight.quant_state
        assert state.quant_type == "nf4" and state.nested  # double quantisation
    frozen = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    before = weights(trainer)
    trainer.train()
    after = weights(trainer)
    assert any(not torch.equal(before[name], after[name]) for name in before if "lora_A" in name)
    assert all(torch.equal(p, frozen[n]) for n, p in trainer.model.named_parameters() if not p.requires_grad)
    batch = trainer.backend.collate(list(trainer.backend.prepare(make_rows(4))))
    with torch.no_grad():
        assert trainer.backend.read(trainer.model.eval(), batch).logits.dtype == torch.float32
    trainer.save_model()
    table = trainer.predict_table(make_rows(9, start=40), "mine", "test")
    loaded = load_checkpoint(tmp_path / "run", quantization=quantization)
    rows = make_rows(9, start=40)
    answer = loaded.predict([row["question"] for row in rows], [row["choices"] for row in rows])
    assert np.allclose(answer.alpha.numpy(), table.alpha, atol=1e-3)


def test_gradient_checkpointing_changes_nothing(tmp_path, tokenizer, lora):
    plain = build(tmp_path / "a", tokenizer, lora)
    plain.train()
    saved = build(tmp_path / "b", tokenizer, lora, gradient_checkpointing=True)
    saved.train()
    for name, value in weights(plain).items():
        assert torch.allclose(value, weights(saved)[name], atol=1e-6), name


def stream(rows):
    from datasets import IterableDataset

    return IterableDataset.from_generator(lambda: iter(rows))


def test_a_stream_trains_as_the_same_rows_in_order(tmp_path, tokenizer, lora):
    rows = make_rows(32)
    whole = build(tmp_path / "a", tokenizer, lora, train=rows, train_sampling_strategy="sequential", max_steps=4)
    whole.train()
    streamed = build(tmp_path / "b", tokenizer, lora, train=stream(rows), max_steps=4)
    streamed.train()
    wanted = [entry["loss"] for entry in steps(whole)]
    assert [entry["loss"] for entry in steps(streamed)] == pytest.approx(wanted, rel=1e-6)
    streamed.save_model()
    assert not (tmp_path / "b" / "trained_rows.json").exists()


def test_a_resumed_stream_goes_on_where_it_was(tmp_path, tokenizer, lora):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = build(tmp_path / "a", tokenizer, lora, train=stream(make_rows(48)), **options)
    whole.train()
    again = build(tmp_path / "a", tokenizer, lora, train=stream(make_rows(48)), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    for name, value in weights(whole).items():
        assert torch.allclose(value, weights(again)[name], atol=1e-6), name


def test_what_a_stream_cannot_do(tmp_path, tokenizer, lora):
    with pytest.raises((UserError, ValueError), match="max_steps"):
        build(tmp_path, tokenizer, lora, train=stream(make_rows(16))).train()
    warm = DAPPr(reg_weight=1e-2, schedule="warmup", warmup_epochs=2)
    with pytest.raises(UserError, match="epoch_rows"):
        build(tmp_path, tokenizer, lora, train=stream(make_rows(16)), max_steps=2, method=warm).train()
    trainer = build(
        tmp_path,
        tokenizer,
        lora,
        train=stream(make_rows(40)),
        max_steps=4,
        epoch_rows=8,
        method=warm,
        learning_rate=0.0,
    )
    trainer.train()
    terms = [entry["loss/reg"] for entry in steps(trainer)]
    assert terms[0] == 0.0 and all(term > 0 for term in terms[1:])
    with pytest.raises(UserError, match="5 options, but only 4 letters"):
        rows = make_rows(250) + make_rows(8, start=300, options=5)
        build(tmp_path, tokenizer, lora, train=stream(rows), max_steps=40).train()


def test_a_streaming_recipe(tmp_path, model_folder):
    splits = {"train": make_rows(40), "validation": make_rows(6, 50), "test": make_rows(8, 60)}
    recipe = write_recipe(
        tmp_path, model_folder, splits, make_rows(6, 80, options=5), per_device_train_batch_size=8, max_steps=4,
        save_strategy="no", monitor_ood_rows=3,
    )  # fmt: skip
    settings = ["--set", "data.streaming=true", "--set", "train.eval_strategy=steps", "--set", "train.eval_steps=2"]
    assert main(["train", str(recipe), *settings]) == 0
    assert "ood/other/epistemic" in (tmp_path / "run" / "train_log.jsonl").read_text()
    assert json.loads((tmp_path / "run" / "results.json").read_text())["results"]["id/n"] == 8


class Logs(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


def test_trackers_get_terms_and_evidence(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora, validation=make_rows(8, start=50), eval_strategy="epoch")
    logs = Logs()
    trainer.add_callback(logs)
    trainer.add_callback(OODMonitor(trainer, {"other": make_rows(9, start=80, options=5)}, rows=4))
    trainer.train()
    train = next(entry for entry in logs.seen if "loss" in entry)
    assert {"loss/fit", "loss/reg", "alpha0", "alpha0/q10", "alpha0/q50", "alpha0/q90", "evidence/dead"} <= set(train)
    assert train["alpha0/q10"] <= train["alpha0/q50"] <= train["alpha0/q90"]
    evaluated = next(entry for entry in logs.seen if "eval_loss" in entry)
    assert {"eval_epistemic", "eval_alpha0/q50", "eval_evidence/dead"} <= set(evaluated)
    watched = next(entry for entry in logs.seen if "ood/other/epistemic" in entry)
    table = trainer.predict_table(make_rows(4, start=80, options=5), "other", "monitor")
    assert watched["ood/other/epistemic"] == pytest.approx(table.epistemic.mean(), rel=1e-5)


def test_dead_evidence_is_counted(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora, evidence_offset=-20, learning_rate=0.0)
    trainer.train()
    assert steps(trainer)[0]["evidence/dead"] == 1.0


def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="trackio needs its package: pip install trackio"):
        DAPPrConfig(str(tmp_path), report_to="trackio")


def shards(folder, sizes):
    folder.mkdir()
    start = 0
    for number, size in enumerate(sizes):
        rows = make_rows(size, start)
        pq.write_table(pa.Table.from_pylist(rows), folder / f"part-{number}.parquet")
        start += size
    return folder


def test_shards_in_shards_out(run_folder, tmp_path, capsys):
    source = shards(tmp_path / "in", [7, 12, 5])
    command = ["predict", str(run_folder), "--task", str(source), "--out", str(tmp_path / "out"), "--batch-size", "4"]
    assert main(command) == 0 and "24 answers" in capsys.readouterr().out
    tables = [pq.read_table(path) for path in sorted((tmp_path / "out").glob("*.parquet"))]
    assert [table.num_rows for table in tables] == [7, 12, 5]
    assert [name for table in tables for name in table["id"].to_pylist()] == [f"q{i}" for i in range(24)]

    # Finished shards are not done again, a missing one is, and its answers are the same.
    (tmp_path / "out" / "part-1.parquet").unlink()
    assert main(command) == 0 and "12 answers" in capsys.readouterr().out
    assert pq.read_table(tmp_path / "out" / "part-1.parquet") == tables[1]

    # A limit counts over all of them.
    limited = [*command[:-3], str(tmp_path / "some"), "--limit", "9"]
    assert main(limited) == 0 and "9 answers" in capsys.readouterr().out
    assert [pq.read_table(path).num_rows for path in sorted((tmp_path / "some").glob("*.parquet"))] == [7, 2]
    assert main([*command[:-3], str(tmp_path / "some")]) == 2
    assert "made by another job" in capsys.readouterr().err


@pytest.mark.parametrize("out, message", [("x.parquet", "into a folder"), ("in", "holds the questions")])
def test_mistakes_with_shards(run_folder, tmp_path, capsys, out, message):
    source = shards(tmp_path / "in", [3])
    assert main(["predict", str(run_folder), "--task", str(source), "--out", str(tmp_path / out)]) == 2
    assert message in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["predict", str(run_folder), "--task", str(tmp_path / "empty"), "--out", str(tmp_path / "o")]) == 2


def test_a_partitioned_head_falls_back_to_its_own_output(model):
    """DeepSpeed ZeRO-3 marks its weights with `ds_id`: they are empty outside of their module's own forward pass."""
    from dappr_llm.text.readouts.vocabulary import read_rows

    head = model.get_output_embeddings()
    hidden, ids = torch.randn(2, 32), torch.tensor([1, 2])
    assert read_rows(head, hidden, ids) is not None
    head.weight.ds_id = 0
    assert read_rows(head, hidden, ids) is None


def test_probe_of_a_stream(tmp_path, tokenizer, lora, caplog):
    with caplog.at_level(logging.INFO, logger="dappr_llm"):
        build(tmp_path, tokenizer, lora, train=stream(make_rows(16)), max_steps=1, evidence_offset="auto").train()
    assert "Answer logits start at 1.0" in caplog.text
