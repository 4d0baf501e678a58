"""What the trainer chooses where nothing was given, and what it leaves alone."""

import logging

import pytest
import torch
import yaml
from tiny import make_rows, make_texts, write_recipe
from training_runs import StopAt, build, build_head, steps, weights

from dappr_llm.commands.main import main
from dappr_llm.core import checkpoint
from dappr_llm.core.recipe import load_recipe
from dappr_llm.methods import get_method
from dappr_llm.methods.base import reads_evidence
from dappr_llm.training.defaults import (
    FirstRead,
    choose,
    choose_coefficient,
    choose_offset,
    first_read,
    what_falls_short,
)

COEFFICIENT = {"method.reg_weight", "method.schedule", "method.warmup_epochs"}


def read(level=0.0, right=0.25, rows=128, classes=4):
    """Logits around a level, of which a share is right."""
    labels = torch.arange(rows) % classes
    logits = torch.zeros(rows, classes)
    answers = torch.where(torch.arange(rows) < right * rows, labels, (labels + 1) % classes)
    logits[torch.arange(rows), answers] = 1.0
    logits += level - logits.mean()
    return FirstRead(logits, labels, torch.full((rows,), classes))


def test_what_is_read_first():
    found = read(right=0.25)
    assert (found.accuracy, found.chance, found.at_chance) == (0.25, 0.25, True)
    assert not read(right=0.5).at_chance
    # A letter that a row does not offer is no answer.
    short = FirstRead(torch.tensor([[0.0, 1.0, 5.0]]), torch.tensor([1]), torch.tensor([2]))
    assert (short.accuracy, short.chance) == (1.0, 0.5)


@pytest.mark.parametrize("level, wanted", [(13.9, -12.9), (-8.0, 9.0), (0.3, 0.0), (3.9, 0.0)])
def test_offset_only_where_evidence_is_not_alive(level, wanted):
    assert choose_offset(read(level), None)[0] == pytest.approx(wanted, abs=0.01)
    assert choose_offset(read(level), -2.5)[0] == -2.5  # what an adapter learnt evidence with stays


def test_coefficients_by_what_the_model_can_do():
    open_method = get_method("dappr")
    at_chance, why = choose_coefficient(open_method, read(right=0.25), endless=False)
    assert (at_chance["reg_weight"], at_chance["schedule"]) == (5e-3, "constant") and "at chance" in why
    able, why = choose_coefficient(open_method, read(right=0.6), endless=False)
    assert able == {"reg_weight": 2e-4, "schedule": "warmup", "warmup_epochs": 10} and "above chance" in why
    assert choose_coefficient(open_method, read(right=0.6), endless=True)[0]["schedule"] == "constant"
    given = get_method("dappr", schedule="linear")
    found = choose_coefficient(given, read(right=0.25), endless=False)[0]
    assert (found["schedule"], found["reg_weight"]) == ("linear", 2e-4)


@pytest.mark.parametrize("name", ["dappr", "edl", "iedl", "redl", "edl_spurious", "dappr_kl", "daedl"])
def test_methods_know_what_was_given(name):
    bare, given = get_method(name), get_method(name, **get_method(name).options())
    assert bare == given and bare.options() == given.options()
    assert bare.open_options() == ("reg_weight", "schedule", "warmup_epochs") and given.open_options() == ()
    part = get_method(name, reg_weight=None, schedule="linear")
    assert part.given == {"schedule"} and part.open_options() == ("reg_weight",)
    assert get_method("dappr_no_reg").open_options() == get_method("ce").open_options() == ()


@pytest.mark.parametrize("name, settings", [
    ("dappr", {"train.evidence_offset", *COEFFICIENT}), ("edl", {"train.evidence_offset", *COEFFICIENT}),
    ("ib_edl", {"train.evidence_offset"}), ("dappr_exp", {"train.evidence_offset"}), ("ce", set()),
])  # fmt: skip
def test_a_script_gets_what_a_recipe_gets(tmp_path, tokenizer, lora, name, settings, caplog):
    trainer = build(tmp_path, tokenizer, lora, method=name, max_steps=1)
    with caplog.at_level(logging.INFO):
        trainer.train()
    assert set(trainer.chosen) == settings
    assert ("Not given, so chosen" in caplog.text) == bool(settings)
    if name == "dappr":
        assert trainer.method.schedule == "constant" and trainer.method is trainer.backend.method
        assert steps(trainer)[0]["loss/reg"] > 0


def test_what_is_given_is_never_replaced(tmp_path, tokenizer, lora):
    method = get_method("dappr", reg_weight=1e-3, schedule="warmup", warmup_epochs=3)
    trainer = build(tmp_path, tokenizer, lora, method=method, evidence_offset=0, max_steps=1)
    with torch.no_grad():  # logits far away, which would otherwise be moved
        trainer.backend.evidence_offset = 14.0
    trainer.train()
    assert trainer.chosen == {} and trainer.method is method and trainer.backend.evidence_offset == 0
    part = build(tmp_path, tokenizer, lora, method=get_method("edl", reg_weight=0.3), evidence_offset=0, max_steps=1)
    part.train()
    assert part.method.reg_weight == 0.3 and set(part.chosen) == COEFFICIENT - {"method.reg_weight"}


def test_logits_far_from_zero_are_moved(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora, method="dappr", max_steps=1, learning_rate=0.0)
    trainer.backend.read = shifted(trainer.backend.read, 14.0)
    trainer.train()
    assert -14 < trainer.backend.evidence_offset < -12
    assert steps(trainer)[0]["logits/mean"] == pytest.approx(1.0, abs=0.1)


def shifted(function, level):
    from dataclasses import replace

    def call(*args, **kwargs):
        out = function(*args, **kwargs)
        return replace(out, logits=out.logits + level)

    return call


def test_rows_are_read_from_all_of_the_data(tmp_path, tokenizer, lora):
    """A file that is sorted by label must not look like one label."""
    rows = sorted(make_texts(300), key=lambda row: row["label"])
    found = first_read(build_head(tmp_path, tokenizer, lora, train=rows))
    assert len(found.labels) == 128 and found.labels.bincount().min() > 30


def test_a_probed_head_is_above_chance(tmp_path, tokenizer, lora, caplog):
    trainer = build_head(tmp_path, tokenizer, lora, train=make_texts(60), method=get_method("dappr"), max_steps=1)
    trainer.backend.has_new_head = True
    with caplog.at_level(logging.INFO):
        trainer.train()
    assert trainer.chosen["train.evidence_offset"] == 0 and trainer.method.schedule == "warmup"
    assert "above chance" in caplog.text


@pytest.mark.parametrize("name", ["dappr", "redl"])
def test_resuming_takes_over_what_was_chosen(tmp_path, tokenizer, lora, name):
    options = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 5, "method": name}
    whole = build(tmp_path / "a", tokenizer, lora, **options)
    whole.train()
    first = build(tmp_path / "b", tokenizer, lora, **options)
    first.add_callback(StopAt(7))
    first.train()
    second = build(tmp_path / "b", tokenizer, lora, **options)
    with torch.no_grad():  # a model that now looks able: the choice is not made again
        second.backend.evidence_offset = 5.0
    second.train(resume_from_checkpoint="auto")
    assert second.chosen == first.chosen == whole.chosen and second.method == whole.method
    assert second.backend.evidence_offset == whole.backend.evidence_offset
    for key, value in weights(whole).items():
        assert torch.allclose(value, weights(second)[key], atol=1e-6), key


@pytest.fixture
def bare(tmp_path, model_folder):
    """A recipe that gives neither offset nor coefficient."""
    splits = {"train": make_rows(32), "validation": make_rows(9, 40), "test": make_rows(11, 60)}
    path = write_recipe(
        tmp_path, model_folder, splits, make_rows(10, 80, options=5), per_device_train_batch_size=8, num_train_epochs=2
    )
    values = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(values | {"method": {"name": "dappr"}}))
    return path


def test_a_run_writes_down_what_it_chose_and_is_repeated_by_it(bare, tmp_path, capsys):
    assert main(["train", str(bare)]) == 0
    run, again = tmp_path / "run", tmp_path / "again"
    stored = load_recipe(run / checkpoint.RECIPE)
    assert set(stored.chosen) == {"train.evidence_offset", *COEFFICIENT}
    assert stored.method == {"name": "dappr", "reg_weight": 5e-3, "schedule": "constant", "warmup_epochs": 10}
    assert isinstance(stored.train["evidence_offset"], float)
    assert checkpoint.load_sidecar(run)[1]["chosen"] == sorted(stored.chosen)
    # The recipe that gave nothing is still this run, one that gives another value is not.
    assert main(["train", str(bare), "--resume"]) == 0 and "finished" in capsys.readouterr().out
    assert main(["train", str(bare), "--resume", "--set", "method.reg_weight=1e-4"]) == 2
    assert "reg_weight is 0.005, now 0.0001" in capsys.readouterr().err
    # Its own recipe gives everything.
    assert main(["train", str(run / checkpoint.RECIPE), "--output-dir", str(again)]) == 0
    assert load_recipe(again / checkpoint.RECIPE).chosen == []
    one, two = ((folder / "adapter_model.safetensors").read_bytes() for folder in (run, again))
    assert one == two


def test_an_adapter_keeps_the_offset_it_learnt_with(bare, tmp_path):
    assert main(["train", str(bare), "--set", "train.evidence_offset=-3"]) == 0
    adapter = ["--set", f"model.adapter={tmp_path / 'run'}", "--set", "train.num_train_epochs=1"]
    for name, kept in (("dappr", True), ("ce", False)):
        assert main(["train", str(bare), "--output-dir", str(tmp_path / name), *adapter,
                     "--set", f"method.name={name}"]) == 0  # fmt: skip
        offset = checkpoint.load_sidecar(tmp_path / name)[1]["evidence_offset"]
        assert offset == -3, kept


@pytest.mark.parametrize("name, warned", [("dappr", True), ("edl", True), ("dappr_exp", False), ("ce", False)])
def test_evidence_that_cannot_reach_confidence_is_said(tmp_path, tokenizer, lora, name, warned, caplog):
    texts = [{"text": row["text"], "label": f"l{i % 40:02}"} for i, row in enumerate(make_texts(80))]
    options = {"train": texts, "labels": 40, "method": get_method(name), "max_steps": 2}
    trainer = build_head(tmp_path / "a", tokenizer, lora, learning_rate=4.0, **options)
    choose(trainer)
    assert ("dappr_exp has no such limit" in caplog.text) == warned
    for rate in (1e-4, 1e3):  # nothing could be confident after so little; after so much, anything
        trainer = build_head(tmp_path / "b", tokenizer, lora, learning_rate=rate, **options)
        assert what_falls_short(trainer, first_read(trainer)) is None


def test_all_evidence_methods_are_known():
    found = {
        name
        for name in ("ce", "dappr", "dappr_exp", "edl", "iedl", "redl", "ib_edl")
        if reads_evidence(get_method(name))
    }
    assert found == {"dappr", "dappr_exp", "edl", "iedl", "redl", "ib_edl"}
