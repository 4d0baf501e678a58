"""A model that does not learn is noticed within the first tenth of its run."""

import logging

import pytest
from tiny import make_rows, make_texts
from training_runs import StopAt, build, build_head

from dappr_llm.methods import get_method


def messages(caplog):
    return [record.getMessage() for record in caplog.records if "at chance" in record.getMessage()]


def run(build, folder, tokenizer, lora, caplog, rows, stop=None, **options):
    trainer = build(folder, tokenizer, lora, train=rows, **options)
    if stop:
        trainer.add_callback(StopAt(stop))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    return trainer


@pytest.mark.parametrize("method", ["ce", "dappr", "ib_edl"])
def test_a_model_at_chance_is_noticed_in_the_first_tenth(tmp_path, tokenizer, lora, caplog, method):
    """130 steps of 8 rows: the 13th is the last of the first tenth, and has seen 104 rows."""
    options = {"method": method, "learning_rate": 0.0, "max_steps": 130, "logging_steps": 500, "evidence_offset": None}
    run(build, tmp_path, tokenizer, lora, caplog, make_rows(104), stop=13, **options)
    (found,) = messages(caplog)
    assert "after 13 of 130 steps" in found and "104 rows, chance 0.25" in found
    assert "model.adapter" in found and found.count(". ") == 1  # one sentence of remedy


def test_it_is_said_again_at_half_time_and_not_after_it_learnt(tmp_path, tokenizer, lora, caplog):
    options = {"method": get_method("ce"), "max_steps": 26, "per_device_train_batch_size": 50}
    run(build, tmp_path / "a", tokenizer, lora, caplog, make_rows(100), learning_rate=0.0, **options)
    assert [text.split(" steps")[0][-8:] for text in messages(caplog)] == ["3 of 26", "13 of 26"] or len(
        messages(caplog)
    ) == 2
    caplog.clear()
    texts = make_texts(200)
    run(build_head, tmp_path / "b", tokenizer, lora, caplog, texts, learning_rate=5e-2, **options)
    assert len(messages(caplog)) <= 1


def test_a_short_run_is_left_alone(tmp_path, tokenizer, lora, caplog):
    run(build, tmp_path, tokenizer, lora, caplog, make_rows(32), method="ce", learning_rate=0.0, max_steps=4)
    assert messages(caplog) == []


def test_the_remedy_names_what_is_wrong(tmp_path, tokenizer, lora):
    from dappr_llm.training.chance import remedy

    warm = get_method("dappr", reg_weight=2e-4, schedule="warmup")
    trainer = build(tmp_path, tokenizer, lora, method=warm)
    assert "schedule: constant" in remedy(trainer, [10.0, 20.0]) and "schedule" not in remedy(trainer, [10.0, 10.0])
    assert "evidence_offset: auto" in remedy(build(tmp_path, tokenizer, lora), [10.0, 20.0])
    head = build_head(tmp_path, tokenizer, lora, method=get_method("ce"), head_init="random")
    head.backend.has_new_head = True
    assert "head_init: probe" in remedy(head, [])
