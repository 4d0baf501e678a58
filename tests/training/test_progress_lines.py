"""What training shows and writes about itself: lines, tables, bars, train_log.jsonl."""

import json
import logging
import math
import sys

import pytest
from tiny import build_model, make_rows
from training_runs import StopAt, build, config
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from dappr_llm import DAPPrTrainer
from dappr_llm.evaluation.reporting.text_tables import render_results
from dappr_llm.training.callbacks import progress_lines
from dappr_llm.training.callbacks.progress_lines import ProgressLines, StepClock, duration


@pytest.fixture
def terminal(monkeypatch):
    """Both streams as a terminal that keeps what is written."""
    written = []

    class Terminal:
        encoding = "utf-8"

        def write(self, text):
            written.append(text)

        def flush(self):
            pass

        def isatty(self):
            return True

    def start():
        both = Terminal()
        monkeypatch.setattr(sys, "stdout", both)
        monkeypatch.setattr(sys, "stderr", both)
        return written

    return start


def lines(text):
    return [line for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("hidden", [True, False])
def test_one_aligned_line_per_log(tmp_path, tokenizer, lora, capfd, hidden):
    trainer = build(tmp_path, tokenizer, lora, disable_tqdm=hidden)
    trainer.train()
    out, err = capfd.readouterr()
    heading, *found, summary = lines(out)
    assert heading.split() == ["step", "loss", "accuracy", "NLL", "uncertainty", "rows/s", "left"]
    assert [line.split()[0] for line in found] == ["1/4", "2/4", "3/4", "4/4"]
    assert {len(line) for line in found} == {len(heading)} and len(heading) <= 100
    for line, entry in zip(found, trainer.state.log_history, strict=False):
        _, loss, accuracy, nll, epistemic, speed, left = line.split()
        assert float(loss) == pytest.approx(entry["loss"], rel=1e-3)
        assert float(accuracy) == pytest.approx(100 * entry["accuracy"], abs=0.01)
        assert float(nll) == pytest.approx(entry["nll"], abs=1e-3)
        assert float(epistemic) == pytest.approx(entry["epistemic"], abs=1e-3)
        assert float(speed.replace(",", "")) > 0 and ":" in left
    assert found[-1].endswith("0:00") and "mean loss" in summary
    assert err == ""  # no bar in a file


def test_evaluations_show_the_table_of_evaluate(tmp_path, tokenizer, lora, capfd):
    trainer = build(tmp_path, tokenizer, lora, validation=make_rows(7, 50), eval_strategy="steps", eval_steps=2)
    trainer.train()
    out = capfd.readouterr().out
    metrics = next(entry for entry in trainer.state.log_history if "eval_nll" in entry)
    results = {f"id/{key.removeprefix('eval_')}": value for key, value in metrics.items() if "/" not in key}
    heading, rule, row = lines(render_results(results))[:3]
    assert lines(out)[3].split() == heading.split() and set(lines(out)[4]) == {"-"} == set(rule)
    assert lines(out)[5].split() == ["validation", *row.split()[1:]]
    assert out.count("validation") == 2 and out.count("step       loss") == 2  # the heading again after a table
    assert "eval_" not in out
    trainer.evaluate()  # a script is given the metrics
    assert capfd.readouterr().out == ""


def test_several_evaluation_sets_are_named(tmp_path, tokenizer, lora, capfd):
    sets = {"easy": make_rows(7, 50), "hard": make_rows(5, 70)}
    build(tmp_path, tokenizer, lora, validation=sets, eval_strategy="epoch").train()
    out = capfd.readouterr().out
    assert [line.split()[0] for line in lines(out) if line.startswith(("easy", "hard"))] == ["easy", "hard"]


def test_watched_sets_have_a_line(tmp_path, tokenizer, lora, capfd):
    trainer = DAPPrTrainer(
        build_model(),
        config(tmp_path, monitor_ood_rows=4, eval_strategy="epoch"),
        make_rows(16),
        make_rows(7, 50),
        tokenizer,
        lora,
        ood_datasets={"other": make_rows(6, 70)},
    )
    trainer.train()
    assert "OOD other: uncertainty 0." in capfd.readouterr().out


def test_logged_figures_are_those_of_the_evaluation(tmp_path, tokenizer, lora):
    """On the same rows and weights: the training log before the first step, and an evaluation of them."""
    rows = [*make_rows(4), *make_rows(4, 4, options=3)]
    trainer = build(tmp_path, tokenizer, lora, rows, rows, num_choices=5, eval_on_start=True)
    trainer.train()
    before, first = trainer.state.log_history[:2]
    assert first["nll"] == pytest.approx(before["eval_nll"], rel=1e-4)
    assert first["accuracy"] == pytest.approx(before["eval_accuracy"])


def test_a_terminal_has_a_bar_below_the_lines(tmp_path, tokenizer, lora, terminal):
    trainer = build(tmp_path, tokenizer, lora, disable_tqdm=False)
    written = terminal()
    trainer.train()
    text = "".join(written)
    assert "/4 [" in text and "1/4 " in text
    # The bar is cleared before a line, so that no line is appended to one.
    assert all("it/s]" not in line.split("\r")[-1] for line in text.split("\n") if " 1.3" in line)
    written.clear()
    build(tmp_path / "b", tokenizer, lora, disable_tqdm=True).train()
    assert "\r" not in "".join(written)


def test_users_callbacks_stay(tmp_path, tokenizer, lora, capfd):
    seen = []

    class Mine(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(logs)

    class Own(ProgressCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append("own")

    def trained(*callbacks):
        trainer = DAPPrTrainer(
            build_model(), config(tmp_path, max_steps=1), make_rows(8), None, tokenizer, lora, callbacks=[*callbacks]
        )
        trainer.train()
        return [type(callback) for callback in trainer.callback_handler.callbacks]

    kinds = trained(Mine())
    assert Mine in kinds and ProgressLines in kinds and not {ProgressCallback, PrinterCallback} & set(kinds)
    assert "grad_norm" in seen[0] and "loss" in capfd.readouterr().out
    kinds = trained(Own())
    assert Own in kinds and ProgressLines not in kinds and "own" in seen
    assert "loss" not in capfd.readouterr().out


@pytest.mark.parametrize("kind", [ProgressCallback, PrinterCallback, ProgressLines])
def test_it_can_be_removed_by_the_names_that_scripts_use(tmp_path, tokenizer, lora, capfd, kind):
    trainer = build(tmp_path, tokenizer, lora, max_steps=1)
    trainer.remove_callback(kind)
    trainer.train()
    assert capfd.readouterr().out == ""


def test_other_ranks_are_silent(tmp_path, tokenizer, lora, capfd):
    trainer = build(tmp_path, tokenizer, lora, max_steps=1)
    trainer.state.is_world_process_zero = False
    (callback,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, ProgressLines)]
    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    callback.on_step_end(trainer.args, trainer.state, trainer.control)
    callback.on_log(trainer.args, trainer.state, trainer.control, logs={"loss": 1.0})
    callback.on_train_end(trainer.args, trainer.state, trainer.control)
    assert capfd.readouterr() == ("", "")


def log_file(folder):
    return [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]


def test_everything_logged_is_in_the_file(tmp_path, tokenizer, lora):
    options = {"validation": make_rows(7, 50), "eval_strategy": "steps", "eval_steps": 2}
    trainer = build(tmp_path, tokenizer, lora, **options)
    trainer.train()
    assert log_file(tmp_path) == json.loads(json.dumps(trainer.state.log_history))
    assert {"alpha0/q50", "grad_norm", "loss/reg", "step"} <= set(log_file(tmp_path)[0])


def test_the_file_of_a_resumed_run_has_each_step_once(tmp_path, tokenizer, lora):
    options = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2}
    first = build(tmp_path, tokenizer, lora, **options)
    first.add_callback(StopAt(5))
    first.train()
    build(tmp_path, tokenizer, lora, **options).train(resume_from_checkpoint="auto")
    assert [entry["step"] for entry in log_file(tmp_path) if "loss" in entry] == [*range(1, 9)]


def test_numbers_that_are_not_finite_are_null_in_the_file(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora, max_steps=1)
    trainer.train()
    trainer.log({"odd": math.nan, "odder": math.inf, "text": "x"})
    assert log_file(tmp_path)[-1] == {"odd": None, "odder": None, "text": "x", "epoch": 0.25, "step": 1}


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path, tokenizer, lora, caplog):
    (tmp_path / "train_log.jsonl").mkdir()
    trainer = build(tmp_path, tokenizer, lora, max_steps=2)
    with caplog.at_level(logging.WARNING, "dappr_llm"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert len([record for record in caplog.records if "without this log" in record.getMessage()]) == 1


def test_the_clock_counts_steps_only(monkeypatch):
    now = iter([0.0, 2.0, 4.0, 104.0, 106.0, 106.0])
    monkeypatch.setattr(progress_lines.time, "perf_counter", lambda: next(now))
    clock = StepClock()
    clock.step()
    clock.step()
    clock.pause()  # 100 seconds of evaluation
    clock.step()
    speed, left = clock.read(rows=8, steps_left=6)
    assert speed == pytest.approx(8 * 3 / 6) and left == pytest.approx(106 / 3 * 6)


@pytest.mark.parametrize(
    "seconds, text",
    [(7.4, "0:07"), (750, "12:30"), (11045, "3:04:05"), (500 * 3600, "20 d 20 h"), (math.nan, "-")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_images_show_the_same_lines(tmp_path, capfd):
    from PIL import Image

    from dappr_llm import ImageClassifier, ImageClassifierConfig

    shades = [Image.new("L", (8, 8), 80 * (i % 3)) for i in range(24)]
    rows = [{"image": shade, "label": i % 3} for i, shade in enumerate(shades)]
    shape = {"num_classes": 3, "class_names": ["dark", "grey", "light"], "channels": 1, "image_size": 8}
    chosen = {"name": "dappr", "options": {}}
    model = ImageClassifier(ImageClassifierConfig(backbone="convnet", method=chosen, **shape))
    args = config(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=2, disable_tqdm=False)
    DAPPrTrainer(model, args, rows, rows).train()
    out, err = capfd.readouterr()
    assert lines(out)[0].split()[:4] == ["step", "loss", "accuracy", "NLL"] and "nan" not in out
    assert "2/2" in out and "validation" in out and err == ""
