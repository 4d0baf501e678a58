"""Damaged files, full disks, losses that are not finite: nothing is loaded silently, nothing good is lost."""

import errno
import json
import logging
import os
import resource
import shutil
from dataclasses import replace

import pytest
import torch
from tiny import make_rows
from training_runs import StopAt, build, steps, weights
from transformers import TrainerCallback

from dappr_llm import UserError, load_checkpoint
from dappr_llm.commands.main import main
from dappr_llm.core import checkpoint, manifest
from dappr_llm.inference.pipeline import UncertaintyPipeline

SAVES = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """A run with checkpoints at steps 2 and 4, and a model in its folder."""
    from peft import LoraConfig

    folder = tmp_path_factory.mktemp("saved")
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM")
    trainer = build(folder, tokenizer, lora, **SAVES)
    trainer.train()
    trainer.save_model()
    return folder


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x01
    path.write_bytes(bytes(content))


def test_checkpoints_are_named_when_whole(saved):
    assert [path.name for path in checkpoint.checkpoints(saved)] == ["checkpoint-4", "checkpoint-2"]
    assert not list(saved.glob(".*"))
    for folder in (saved, saved / "checkpoint-2", saved / "checkpoint-4"):
        assert checkpoint.file_problem(folder, required=True) is None
    names = {path.name for path in (saved / "checkpoint-4").iterdir()}
    assert {
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "trainer_state.json",
        "adapter_model.safetensors",
    } <= names


@pytest.mark.parametrize("damage", [truncate, flip])
def test_every_damaged_file_of_a_checkpoint_is_noticed(saved, tmp_path, damage, caplog):
    """Resuming passes over it, naming the file; loading it, or resuming from it by name, is refused."""
    run = shutil.copytree(saved, tmp_path / "run")
    names = sorted(p.name for p in (run / "checkpoint-4").iterdir() if p.is_file() and p.name != "README.md")
    assert len(names) >= 9 and checkpoint.MANIFEST in names
    for name in names:
        path = run / "checkpoint-4" / name
        before = path.read_bytes()
        damage(path)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert checkpoint.last_checkpoint(run) == str(run / "checkpoint-2"), name
        assert str(path) in caplog.text
        with pytest.raises(UserError, match=f"{name}.*(damaged|lacks|not a valid JSON)"):
            load_checkpoint(run / "checkpoint-4")
        path.write_bytes(before)
    assert checkpoint.last_checkpoint(run) == str(run / "checkpoint-4")


@pytest.mark.parametrize("damage", [truncate, flip])
def test_every_damaged_file_of_a_finished_model_is_noticed(saved, tmp_path, damage):
    run = shutil.copytree(saved, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-*"))
    # A card is the user's to edit, and a log is no part of the model.
    for path in sorted(p for p in run.iterdir() if p.is_file() and p.name not in ("README.md", "train_log.jsonl")):
        before = path.read_bytes()
        damage(path)
        for load in (load_checkpoint, UncertaintyPipeline.from_pretrained):
            with pytest.raises(UserError, match=path.name):
                load(run)
        path.write_bytes(before)
    (run / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="tokenizer.json is missing"):
        load_checkpoint(run)


def test_training_goes_on_from_the_last_good_checkpoint(saved, tmp_path, tokenizer, lora, caplog):
    run = shutil.copytree(saved, tmp_path / "run")
    flip(run / "checkpoint-4" / "optimizer.pt")
    with pytest.raises(UserError, match="optimizer.pt is damaged"):
        build(run, tokenizer, lora, **SAVES).train(resume_from_checkpoint=str(run / "checkpoint-4"))
    again = build(run, tokenizer, lora, **SAVES)
    with caplog.at_level(logging.WARNING):
        again.train(resume_from_checkpoint="auto")
    assert "optimizer.pt is damaged" in caplog.text and again.state.global_step == 4
    whole = build(tmp_path / "whole", tokenizer, lora, **SAVES)
    whole.train()
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(again)[name]), name
    assert checkpoint.file_problem(run / "checkpoint-4", required=True) is None  # the bad one was replaced

    for folder in checkpoint.checkpoints(run):
        truncate(folder / "trainer_state.json")
    fresh = build(run, tokenizer, lora, **SAVES)
    with caplog.at_level(logging.WARNING):
        fresh.train(resume_from_checkpoint="auto")
    assert "training starts anew" in caplog.text and fresh.state.global_step == 4


@pytest.mark.parametrize("key, value", [("train", 1), ("is_world_process_zero", "no"), ("trial_params", [])])
def test_a_state_that_trainer_cannot_take_is_named(saved, tmp_path, tokenizer, lora, key, value):
    run = shutil.copytree(saved, tmp_path / "run")
    path = run / "checkpoint-4" / "trainer_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    (run / "checkpoint-4" / checkpoint.MANIFEST).unlink()
    with pytest.raises(UserError, match=f"trainer_state.json is damaged.*{key}"):
        build(run, tokenizer, lora, **SAVES).train(resume_from_checkpoint=str(run / "checkpoint-4"))


def test_what_a_kill_leaves_is_cleaned_up(saved, tmp_path):
    run = shutil.copytree(saved, tmp_path / "run")
    (run / "checkpoint-4").rename(run / ".checkpoint-4.partial")  # killed right before the rename
    (run / ".checkpoint-6.partial").mkdir()
    (run / ".checkpoint-6.partial" / "optimizer.pt").write_bytes(b"half")
    (run / "checkpoint-2").rename(run / ".checkpoint-2.old.partial")  # killed between two renames
    manifest.tidy(run)
    assert [path.name for path in checkpoint.checkpoints(run)] == ["checkpoint-4", "checkpoint-2"]
    assert not list(run.glob(".*"))


def limit_files(trainer, step, size):
    """At a step's save no file may grow past a size: what a full disk is to those who write."""
    write = trainer._write_state

    def limited(folder):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if trainer.state.global_step == step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            write(folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    trainer._write_state = limited


@pytest.mark.parametrize("size", [100, 3_000, 15_000])
def test_a_full_disk_costs_nothing_that_was_saved(tmp_path, tokenizer, lora, size):
    """The limit hits safetensors', JSON's and torch's writers in turn."""
    trainer = build(tmp_path, tokenizer, lora, **SAVES)
    limit_files(trainer, 4, size)
    with pytest.raises(UserError, match="Cannot save .*checkpoint-4.*checkpoint-2 is whole"):
        trainer.train()
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-2"]
    assert not list(tmp_path.glob(".*")) and checkpoint.file_problem(tmp_path / "checkpoint-2", required=True) is None
    again = build(tmp_path, tokenizer, lora, **SAVES)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4


def test_a_read_only_folder_is_a_clear_error(tmp_path, tokenizer, lora, monkeypatch):
    trainer = build(tmp_path, tokenizer, lora)
    trainer.save_model()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(manifest.Path, "mkdir", refuse)
    with pytest.raises(UserError, match="Read-only file system"):
        trainer.save_model()
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def poison(trainer, row, value=float("nan")):
    read = trainer.backend.read

    def poisoned(model, inputs):
        out = read(model, inputs)
        if not model.training:
            return out
        added = torch.where(torch.isin(inputs["row"], torch.as_tensor(row)), value, 0.0)
        return replace(out, logits=out.logits + added.unsqueeze(-1))

    trainer.backend.read = poisoned
    return trainer


def test_a_loss_that_is_not_finite_stops_with_its_rows(tmp_path, tokenizer, lora):
    trainer = poison(build(tmp_path, tokenizer, lora, save_strategy="steps", save_steps=1), row=5)
    with pytest.raises(UserError, match=r"Step \d: the loss is not finite for rows q5 \(fit nan, reg nan\)"):
        trainer.train()
    for value in weights(trainer).values():  # stopped before the step, and nothing bad was saved
        assert torch.isfinite(value).all()
    assert all(checkpoint.file_problem(folder, required=True) is None for folder in checkpoint.checkpoints(tmp_path))


class Weights(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append(torch.cat([p.detach().flatten().clone() for p in model.parameters() if p.requires_grad]))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_that_is_not_finite_can_be_skipped(tmp_path, tokenizer, lora, caplog, accumulation):
    options = {"on_nonfinite": "skip", "per_device_train_batch_size": 8 // accumulation}
    trainer = build(tmp_path, tokenizer, lora, gradient_accumulation_steps=accumulation, **options)
    watched = Weights()
    trainer.add_callback(watched)
    start = torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters() if p.requires_grad])
    with caplog.at_level(logging.WARNING):
        poison(trainer, row=5).train()
    states = [start, *watched.seen]
    still = [torch.equal(a, b) for a, b in zip(states, states[1:], strict=False)]
    assert still.count(True) == 1 and trainer.state.global_step == 4
    step = still.index(True) + 1
    assert f"Step {step}: the loss is not finite for rows q5" in caplog.text
    assert all(torch.isfinite(values).all() for values in states)
    assert all(torch.isfinite(torch.tensor(entry["loss/fit"])) for entry in steps(trainer) if "loss/fit" in entry)


class Keep(TrainerCallback):
    """Counts optimizer steps."""

    count = 0

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.count += 1


def test_a_model_that_diverged_is_not_trained_by_skipping(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora, on_nonfinite="skip", learning_rate=1e38, max_grad_norm=0.0, max_steps=8)
    with pytest.raises(
        UserError, match="weights .*not finite.*[Tt]he model has diverged, and the run is not finished"
    ):
        trainer.train()
    assert not (tmp_path / checkpoint.RESULTS).exists()


def test_skipping_every_step_is_no_training(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora, on_nonfinite="skip")
    with pytest.raises(UserError, match="All 4 steps were skipped, so nothing was trained"):
        poison(trainer, row=torch.arange(32), value=float("nan")).train()


def test_skipping_ends_after_many_steps_in_a_row(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora, on_nonfinite="skip", num_train_epochs=20)
    counted = Keep()
    trainer.add_callback(counted)
    read, before = trainer.backend.read, weights(trainer)

    def poisoned(model, inputs):
        out = read(model, inputs)
        return replace(out, logits=out.logits * torch.nan) if model.training and counted.count >= 5 else out

    trainer.backend.read = poisoned
    with pytest.raises(UserError, match="50 steps in a row changed no weight"):
        trainer.train()
    assert trainer.state.global_step == 54  # the last one is not counted as done
    assert any((before[name] != value).any() for name, value in weights(trainer).items())


def test_weights_that_are_not_finite_end_no_training(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora)

    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 4:
                next(p for p in model.parameters() if p.requires_grad).data.fill_(torch.inf)

    trainer.add_callback(Break())
    with pytest.raises(UserError, match="Training ended with weights that are not finite"):
        trainer.train()


def test_train_with_a_diverged_model_exits_with_2(recipe, tmp_path, capsys):
    settings = ("train.on_nonfinite=skip", "train.learning_rate=1.0e+38", "train.max_grad_norm=0.0")
    assert main(["train", str(recipe), *(part for text in settings for part in ("--set", text))]) == 2
    assert "diverged" in capsys.readouterr().err and not (tmp_path / "run" / checkpoint.RESULTS).exists()


def test_a_gradient_that_is_not_finite_stops_too(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora)
    parameter = next(p for p in trainer.model.parameters() if p.requires_grad)
    parameter.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(UserError, match="gradient is not finite"):
        trainer.train()


def test_bad_choice_of_on_nonfinite(tmp_path, tokenizer, lora):
    with pytest.raises(UserError, match="one of stop, skip"):
        build(tmp_path, tokenizer, lora, on_nonfinite="ignore")


def test_the_best_checkpoint_is_checked_before_it_is_loaded(tmp_path, tokenizer, lora):
    class Damage(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 4:
                flip(tmp_path / "checkpoint-4" / "adapter_model.safetensors")
                flip(tmp_path / "checkpoint-2" / "adapter_model.safetensors")

    trainer = build(
        tmp_path, tokenizer, lora, validation=make_rows(8, start=50), eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True, metric_for_best_model="nll", **SAVES,
    )  # fmt: skip
    trainer.add_callback(Damage())
    with pytest.raises(UserError, match="adapter_model.safetensors is damaged"):
        trainer.train()


def test_a_stop_leaves_a_whole_checkpoint(tmp_path, tokenizer, lora):
    """The interrupt's own save at a step that has none, then again at the same step."""
    trainer = build(tmp_path, tokenizer, lora, save_strategy="epoch")
    trainer.add_callback(StopAt(3))
    trainer.interrupt.on_train_begin = lambda *args, **kwargs: None
    trainer.interrupt.requested = False
    trainer.train()
    trainer._save_checkpoint(trainer.model, None)
    trainer._save_checkpoint(trainer.model, None)
    assert checkpoint.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")
    assert not list(tmp_path.glob(".*"))


def test_a_clock_that_jumps_back_removes_no_new_checkpoint(tmp_path, tokenizer, lora):
    class Future(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            os.utime(tmp_path / f"checkpoint-{state.global_step}", (4e9 - state.global_step,) * 2)

    trainer = build(tmp_path, tokenizer, lora, save_strategy="steps", save_steps=1, save_total_limit=2)
    trainer.add_callback(Future())
    trainer.train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}
