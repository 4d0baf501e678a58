"""calibrate, predict into files of answers, and ask, by their command lines."""

import csv
import io
import json
import shutil

import pytest
from serving import questions
from tiny import write_rows

from dappr_llm import UncertaintyPipeline
from dappr_llm.commands.ask import ask, bar
from dappr_llm.commands.main import main
from dappr_llm.core.checkpoint import load_fingerprints
from dappr_llm.core.errors import UserError
from dappr_llm.decisions.rule import Decision
from dappr_llm.inference import answer_files as batch_predict
from dappr_llm.inference.answer_files import Job, predict_file
from dappr_llm.text.data.items import MCQItem

EASY = ["--max-risk", "0.9"]


@pytest.fixture(scope="module")
def pipe(trained):
    return UncertaintyPipeline.from_pretrained(trained / "run", batch_size=2)


def items(count, seed=31):
    rows = questions(count, seed)
    return [MCQItem(r["id"], r["question"], tuple(r["choices"]), "ABCD".index(r["answer"])) for r in rows]


# --- calibrate ----------------------------------------------------------------------------------------------------


def test_calibrate_from_a_task_and_from_its_table(run_folder, trained, capsys):
    task = str(trained / "validation.jsonl")
    assert main(["calibrate", str(run_folder), "--task", task, "--score", "possibility", *EASY]) == 0
    printed = capsys.readouterr().out
    assert "Prediction sets" in printed and "confidence" in printed and "decision.json" in printed
    first = Decision.load(run_folder)
    assert first.calibration_set["n"] == 150 and first.conformal["score"] == "possibility" and first.weights_sha256
    table = run_folder / "predictions" / "validation-validation.npz"
    assert main(["calibrate", str(run_folder), "--table", str(table), "--score", "possibility", *EASY]) == 0
    assert Decision.load(run_folder) == first


@pytest.mark.parametrize("renamed", [False, True])
def test_training_rows_are_recognised(run_folder, trained, tmp_path, capsys, renamed):
    """By the recipe's names, and by the rows themselves whatever the file is called."""
    assert len(load_fingerprints(run_folder)) == 64
    if renamed:
        task, split = str(shutil.copy(trained / "train.jsonl", tmp_path / "innocent.jsonl")), "dev"
    else:
        task, split = str(shutil.copy(trained / "train.jsonl", tmp_path / "mine.jsonl")), "train"
    assert main(["calibrate", str(run_folder), "--task", task, "--split", split]) == 2
    error = capsys.readouterr().err
    assert ("64 of 64 rows of innocent" if renamed else "is what") in error and "trained on" in error
    assert not (run_folder / "decision.json").exists()


def test_a_few_rows_seen_in_training_are_left_out(run_folder, trained, tmp_path, capsys):
    rows = questions(150, 1) + [dict(row, id=f"again {i}") for i, row in enumerate(questions(64, 0)[:5])]
    assert main(["calibrate", str(run_folder), "--task", write_rows(tmp_path / "dev.jsonl", rows), *EASY]) == 0
    assert "5 of 155 rows were trained on" in capsys.readouterr().out
    assert Decision.load(run_folder).calibration_set["n"] == 150


def test_rows_with_untrained_letters_do_not_calibrate(run_folder, tmp_path, capsys):
    rows = questions(120, 41) + questions(15, 42, options=5)
    assert main(["calibrate", str(run_folder), "--task", write_rows(tmp_path / "dev.jsonl", rows), *EASY]) == 0
    assert "15 rows offer more than 4 options" in capsys.readouterr().out
    assert Decision.load(run_folder).calibration_set["n"] == 120


def test_an_adapter_trained_elsewhere(trained, tmp_path, capsys):
    """A stock PEFT adapter, saved by plain PEFT: template, letters and rule are given to it; its files stay as they are."""
    from peft import LoraConfig, get_peft_model
    from tiny import build_model

    torch_free = tmp_path / "stock"
    get_peft_model(build_model(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(
        torch_free
    )
    out = tmp_path / "adopted"
    template = r"Question : {question}\n{choices}\nAnswer:"
    command = ["calibrate", "--base", str(trained / "base"), "--adapter", str(torch_free), "--method", "ce"]
    command += ["--out", str(out), "--template", template, "--task", str(trained / "validation.jsonl")]
    assert main([*command, *EASY]) == 0, capsys.readouterr().err
    assert (out / "adapter_model.safetensors").read_bytes() == (torch_free / "adapter_model.safetensors").read_bytes()
    pipe = UncertaintyPipeline.from_pretrained(out)
    assert pipe.run.backend.prompt.template == "Question : {question}\n{choices}\nAnswer:"
    answer = pipe("Which one ?", choices=["plum", "saw"])
    assert answer.alpha is None and answer.prediction_set and answer.abstain in (True, False)
    assert main([*command, *EASY]) == 2 and "not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command, words",
    [
        (["calibrate"], "Give a checkpoint"),
        (["calibrate", "RUN"], "--task NAME"),
        (["calibrate", "RUN", "--table", "gone.npz"], "no prediction table"),
        (["calibrate", "RUN", "--task", "VAL", "--alpha", "2"], "alpha must lie"),
        (["calibrate", "RUN", "--adapter", "x"], "--out FOLDER"),
        (["calibrate", "--adapter", "gone/away/x", "--out", "o"], "no such folder"),
        (["calibrate", "RUN", "--task", "VAL", "--max-risk", "0.001", "--min-coverage", "0.9"], "raise --max-risk"),
        (["predict", "RUN", "--task", "VAL", "--out", "x.xlsx"], ".jsonl, .csv, .parquet"),
    ],
)
def test_mistakes_are_one_sentence(run_folder, trained, capsys, command, words):
    names = {"RUN": str(run_folder), "VAL": str(trained / "validation.jsonl")}
    assert main([names.get(word, word) for word in command]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error and not (run_folder / "decision.json").exists()


def test_a_table_of_another_model_is_refused(run_folder, trained, tmp_path, capsys):
    from dappr_llm.evaluation.prediction_table import PredictionTable

    table = PredictionTable.load(run_folder / "predictions" / "mine-test.npz")
    table.meta["method"] = "ce"
    table.save(tmp_path / "t.npz")
    assert main(["calibrate", str(run_folder), "--table", str(tmp_path / "t.npz")]) == 2
    assert "not this checkpoint's" in capsys.readouterr().err


# --- answers into files -------------------------------------------------------------------------------------------


def test_all_kinds_of_files_hold_the_same_answers(run_folder, tmp_path, capsys):
    import pyarrow.parquet

    source = write_rows(tmp_path / "rows.jsonl", questions(9, 51) + questions(4, 52, options=2, labelled=False))
    for kind in ("jsonl", "csv", "parquet"):
        assert main(["predict", str(run_folder), "--task", source, "--out", str(tmp_path / f"out.{kind}")]) == 0
    assert "13 answers written" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [row["id"] for row in questions(9, 51) + questions(4, 52, options=2)]
    assert "label" in rows[0] and "label" not in rows[-1] and rows[0]["prediction_set"] is None
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    sheet = list(csv.DictReader((tmp_path / "out.csv").open(newline="", encoding="utf-8")))
    for row, one, two in zip(rows, table, sheet, strict=True):
        assert one["probs"] == row["probs"] == json.loads(two["probs"])
        assert one["answer"] == row["answer"] == two["answer"] and one["correct"] == row.get("correct")
    # What was written can be read again: CSV and Parquet in.
    assert main(["predict", str(run_folder), "--task", str(tmp_path / "out.parquet"), "--question", "answer",
                 "--out", str(tmp_path / "again.jsonl"), "--limit", "3"]) == 0  # fmt: skip
    assert not list(tmp_path.glob(".*.part.jsonl"))


def test_work_done_survives_a_kill(pipe, tmp_path, monkeypatch):
    rows, job, out = items(90), Job("t", "test"), tmp_path / "out.jsonl"
    predict_file(pipe, rows, tmp_path / "whole.jsonl", job)
    seen = []

    class Killed(BaseException):
        pass

    def dying():
        for item in rows:
            if len(seen) == 70:
                raise Killed
            seen.append(item.id)
            yield item

    with pytest.raises(Killed):
        predict_file(pipe, dying(), out, job)
    journal = tmp_path / ".out.jsonl.part.jsonl"
    done = len(journal.read_text().splitlines()) - 1
    assert not out.exists() and done >= 64
    journal.write_bytes(journal.read_bytes() + b'{"id": "half a li')  # a line that the kill cut short
    asked = []
    stream = pipe.stream
    monkeypatch.setattr(
        pipe, "stream", lambda given, *a, **k: stream((asked.append(r["id"]) or r for r in given), *a, **k)
    )
    assert predict_file(pipe, rows, out, job) == 90
    assert asked == [item.id for item in rows[done:]]  # nothing is asked twice
    assert not journal.exists()
    whole, resumed = ([json.loads(x) for x in p.read_text().splitlines()] for p in (tmp_path / "whole.jsonl", out))
    for one, two in zip(whole, resumed, strict=True):
        assert one["id"] == two["id"] and one["probs"] == pytest.approx(two["probs"], abs=1e-4)


def test_the_journal_of_another_job_is_not_continued(pipe, tmp_path):
    out = tmp_path / "out.csv"
    with pytest.raises(RuntimeError):
        predict_file(pipe, _failing(items(8)), out, Job("t", "test", weights="a"))
    with pytest.raises(UserError, match="another job"):
        predict_file(pipe, items(8), out, Job("t", "test", weights="b"))
    assert predict_file(pipe, items(8), out, Job("t", "test", weights="b"), overwrite=True) == 8


def _failing(rows):
    yield from rows[:3]
    raise RuntimeError("stop")


def test_a_job_knows_its_input_rule_and_weights(pipe, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", questions(2, 1))
    before = batch_predict.describe(pipe, path, "test", None)
    assert before == batch_predict.describe(pipe, path, "test", None) and before.weights
    assert before != batch_predict.describe(pipe, path, "test", 1)
    write_rows(tmp_path / "a.jsonl", questions(3, 1))
    assert before != batch_predict.describe(pipe, path, "test", None)


# --- ask ----------------------------------------------------------------------------------------------------------


def test_ask_in_the_terminal(pipe):
    lines = iter(
        ["Which one is a fruit ? | hammer | plum", "", "Which ?", "saw", "saw", "", "Which ?", "fig", "sky", ""]
    )

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    out = io.StringIO()
    assert ask(pipe, read, out) == 2
    text = out.getvalue()
    assert "plum" in text and "%" in text and "█" in text and "aleatoric" in text and "epistemic" in text
    assert "are the same" in text and "→" in text


def test_bars():
    assert bar(0, 4) == "    " and bar(1, 4) == "████" and bar(0.5, 4) == "██  " and bar(2, 4) == "████"
    assert bar(1 / 32, 4) == "▏   " and all(len(bar(x / 50)) == 30 for x in range(51))
