"""`dappr calibrate` by its command line."""

import errno
import os
import shutil

import pytest
from serving import questions
from tiny import write_rows

from dappr_llm import UncertaintyPipeline
from dappr_llm.commands.main import main
from dappr_llm.core.checkpoint import load_fingerprints
from dappr_llm.decisions.rule import Decision
from dappr_llm.evaluation.prediction_table import PredictionTable

EASY = ["--max-risk", "0.9"]


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


def test_a_copy_is_whole_or_not_there(run_folder, trained, tmp_path, capsys, monkeypatch):
    (run_folder / "checkpoint-9").mkdir()
    (run_folder / ".lock").touch()
    os.mkfifo(run_folder / "fifo")  # copying it would wait forever
    out, task = tmp_path / "new" / "copy", str(trained / "validation.jsonl")
    command = ["calibrate", str(run_folder), "--task", task, *EASY, "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(Decision, "save", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        assert main(command) == 2 and "No space left" in capsys.readouterr().err
    assert not any(out.parent.iterdir()) and not (run_folder / "decision.json").exists()
    assert main(command) == 0 and f"Decision rule: {out}" in capsys.readouterr().out
    assert [path.name for path in out.parent.iterdir()] == ["copy"]
    names = {path.name for path in out.iterdir()}
    assert "decision.json" in names and not names & {"checkpoint-9", ".lock", "fifo"}
    table = PredictionTable.load(out / "predictions" / "validation-validation.npz")
    assert table.meta["checkpoint"] == "copy" and UncertaintyPipeline.from_pretrained(out).decision
    assert main(command) == 2 and "not empty" in capsys.readouterr().err


def test_an_adapter_that_cannot_be_calibrated_leaves_no_folder(trained, tmp_path, capsys):
    command = ["calibrate", "--base", str(trained / "base"), "--adapter", str(trained / "run"), "--method", "ce"]
    assert main([*command, "--out", str(tmp_path / "out"), "--task", "nothing_like_it"]) == 2
    assert not any(tmp_path.iterdir())


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
        (["calibrate", "RUN", "--task", "gone.jsonl"], "gone.jsonl: no such file"),
        (["calibrate", "RUN", "--table", "gone.npz"], "no prediction table"),
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


@pytest.mark.parametrize(
    "words",
    [
        *(["calibrate", "x", f"--{name}", value] for name in ("alpha", "max-risk", "confidence") for value in ("2", "nan")),
        *(["predict", "x", "--task", "t", "--out", "o.csv", "--limit", value] for value in ("0", "-1", "1e3", "9" * 40)),
        ["plan", "quickstart", "--length", "-1"],
        ["sweep", "t.yaml", "--seeds", "-3"],
    ],
)  # fmt: skip
def test_arguments_have_ranges(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2 and "is needed, not" in capsys.readouterr().err


def test_a_name_that_is_too_long_is_one_sentence(capsys):
    assert main(["plan", "a" * 5000]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dappr: File name too long") and len(error) < 400


def test_a_table_of_another_model_is_refused(run_folder, trained, tmp_path, capsys):
    from dappr_llm.evaluation.prediction_table import PredictionTable

    table = PredictionTable.load(run_folder / "predictions" / "mine-test.npz")
    table.meta["method"] = "ce"
    table.save(tmp_path / "t.npz")
    assert main(["calibrate", str(run_folder), "--table", str(tmp_path / "t.npz")]) == 2
    assert "not this checkpoint's" in capsys.readouterr().err
