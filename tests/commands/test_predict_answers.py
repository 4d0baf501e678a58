"""`dappr predict` into files of answers: every kind of file, resumed after a kill."""

import csv
import json
import os
import shutil

import pytest
from serving import questions
from tiny import build_model, write_rows

from dappr_llm import UncertaintyPipeline
from dappr_llm.commands.main import main
from dappr_llm.core.errors import UserError
from dappr_llm.inference import answer_files as batch_predict
from dappr_llm.inference.answer_files import Job, predict_file
from dappr_llm.text.data.items import MCQItem


@pytest.fixture(scope="module")
def pipe(trained):
    return UncertaintyPipeline.from_pretrained(trained / "run", batch_size=2)


def items(count, seed=31):
    rows = questions(count, seed)
    return [MCQItem(r["id"], r["question"], tuple(r["choices"]), "ABCD".index(r["answer"])) for r in rows]


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
    with pytest.raises(UserError, match="another job .its weights is a, now b."):
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


@pytest.fixture
def interrupted(run_folder, trained, tmp_path, monkeypatch):
    """A bulk prediction that stopped half way; a function that starts it again, with more arguments."""
    path = write_rows(tmp_path / "rows.jsonl", questions(40, 77))
    base = shutil.copytree(trained / "base", tmp_path / "place")
    line = ["predict", str(run_folder), "--task", path, "--out", str(tmp_path / "out.jsonl"), "--base", str(base)]
    monkeypatch.setattr(batch_predict, "_finish", lambda *_: (_ for _ in ()).throw(UserError("stopped")))
    assert main(line) == 2
    monkeypatch.undo()
    assert (tmp_path / ".out.jsonl.part.jsonl").is_file()
    return lambda *more: main([*line, *more])


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_sidecar(run, place, tmp_path, monkeypatch):
    (run / "manifest.json").unlink()
    edit_json(run / "uncertainty_config.json", max_length=50)


def change_base(run, place, tmp_path, monkeypatch):
    return "--base", str(shutil.copytree(place, tmp_path / "elsewhere"))


def change_base_weights(run, place, tmp_path, monkeypatch):
    build_model(seed=7).save_pretrained(place)


def change_precision(run, place, tmp_path, monkeypatch):
    monkeypatch.setattr("dappr_llm.text.loading.trained_dtype", lambda dtype, config: "bfloat16")


def change_data_root(run, place, tmp_path, monkeypatch):
    (tmp_path / "root").mkdir()
    return "--data-root", str(tmp_path / "root")


def change_environment(run, place, tmp_path, monkeypatch):
    monkeypatch.setenv("DAPPR_DATA_ROOT", str(tmp_path))


def change_options(run, place, tmp_path, monkeypatch):
    return ("--truncate",)


def change_decision(run, place, tmp_path, monkeypatch):
    line = [
        "calibrate",
        str(run),
        "--task",
        write_rows(tmp_path / "held.jsonl", questions(150, 9)),
        "--base",
        str(place),
    ]
    assert main(line) == 0


def change_input(run, place, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    stat = path.stat()
    text = path.read_text()
    path.write_text(text.replace("s77-3", "s88-3"))
    assert path.stat().st_size == stat.st_size and path.read_text() != text
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (change_sidecar, "sidecar"),
        (change_base, "base is"),
        (change_base_weights, "base weights"),
        (change_precision, "precision is float32, now bfloat16"),
        (change_data_root, "data root is None, now"),
        (change_environment, "data root"),
        (change_options, "options"),
        (change_decision, "decision"),
        (change_input, "input"),
    ],
)
def test_a_resumed_prediction_does_not_mix_jobs(interrupted, run_folder, tmp_path, monkeypatch, capsys, change, word):
    more = change(run_folder, tmp_path / "place", tmp_path, monkeypatch) or ()
    capsys.readouterr()
    assert interrupted(*more) == 2
    said = capsys.readouterr().err
    assert "part of another job" in said and word in said
    assert interrupted(*more, "--overwrite") == 0


def test_an_interrupted_prediction_goes_on(interrupted, tmp_path):
    assert interrupted() == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 40


def test_a_finished_shard_of_another_job_is_named(run_folder, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    write_rows(tmp_path / "in" / "a.jsonl", questions(3, 5))
    line = ["predict", str(run_folder), "--task", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert main(line) == 0 and main(line) == 0
    capsys.readouterr()
    assert main([*line, "--truncate"]) == 2
    assert "its options is" in capsys.readouterr().err
