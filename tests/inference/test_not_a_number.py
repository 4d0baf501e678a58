"""A model that gives NaN has no answer: one sentence that names the item, in every path."""

import ast
import io
import json
from pathlib import Path

import pytest
import torch
from fake_vision import FakeVision, blobs
from safetensors.torch import load_file, save_file
from serving import questions
from source_imports import PACKAGE
from tiny import write_rows

from dappr_llm import AdapterEnsemble, UncertaintyPipeline, load_checkpoint
from dappr_llm.commands.main import main
from dappr_llm.core import manifest
from dappr_llm.core.errors import UserError
from dappr_llm.core.outputs import Outputs
from dappr_llm.evaluation.prediction_table import PredictionTable
from dappr_llm.inference.finite_predictions import finite_prediction
from dappr_llm.inference.hf_pipeline import register_pipeline
from dappr_llm.methods import METHODS, get_method

SAYS = "gives NaN or Inf for item"


@pytest.fixture
def diverged(run_folder):
    """A run whose weights are numbers, but so large that its outputs are NaN; its manifest agrees."""
    path = run_folder / "adapter_model.safetensors"
    save_file({name: torch.full_like(value, 3e38) for name, value in load_file(path).items()}, path)
    manifest.write(run_folder, json.loads((run_folder / "manifest.json").read_text())["files"])
    return run_folder


def test_pipelines_refuse_to_answer(diverged):
    rows = questions(5, 3)
    pipe = UncertaintyPipeline.from_pretrained(diverged)
    for asked in (rows[:1], rows, iter(rows)):
        with pytest.raises(UserError, match=f"{SAYS} 's3-"):
            list(pipe(asked))
    import transformers

    other = transformers.pipeline(register_pipeline(), model=str(diverged))
    with pytest.raises(UserError, match=SAYS):
        other("Which one ?", choices=["plum", "saw"])
    with pytest.raises(UserError, match=SAYS):
        load_checkpoint(diverged).predict("Which one ?", ["plum", "saw"])


def test_one_bad_member_spoils_an_ensemble(trained, diverged):
    ensemble = AdapterEnsemble.from_pretrained([trained / "run", diverged])
    with pytest.raises(UserError, match=SAYS):
        ensemble.predict("Which one ?", ["plum", "saw"])
    rows, width = ensemble.run.encoded("Which one ?", ["plum", "saw"])
    with pytest.raises(UserError, match=SAYS):
        ensemble.predict_in_turn(rows, width)


@pytest.mark.parametrize("out", ["answers.jsonl", "answers.csv", "answers.parquet", "table.npz"])
def test_predict_writes_no_answer_and_exits_with_2(diverged, tmp_path, capsys, out):
    task = write_rows(tmp_path / "mine.jsonl", questions(3, 5))
    assert main(["predict", str(diverged), "--task", task, "--out", str(tmp_path / out)]) == 2
    assert f"{SAYS} 's5-" in capsys.readouterr().err and not (tmp_path / out).exists()


def test_evaluate_calibrate_audit_and_ask(diverged, trained, tmp_path, capsys, monkeypatch):
    task = write_rows(tmp_path / "mine.jsonl", questions(30, 5))
    for command in (
        ["evaluate", str(diverged), "--id", task],
        ["evaluate", str(diverged), "--id", task, "--allow-nan"],  # for saved tables
        ["evaluate", str(diverged), str(trained / "run"), "--id", task, "--out", str(tmp_path / "out")],
        ["calibrate", str(diverged), "--task", task, "--split", "dev"],
        ["audit", str(diverged), "--task", task],
    ):
        assert main(command) == 2 and SAYS in capsys.readouterr().err
    assert main(["predict", str(diverged), "--task", str(tmp_path), "--out", str(tmp_path / "bulk")]) == 2
    assert SAYS in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("Which one ? | plum | saw\n"))
    main(["ask", str(diverged)])
    printed = capsys.readouterr().out
    assert SAYS in printed and "→" not in printed


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_names_the_row(name):
    """Also those that read a head of their own, with which images are classified."""
    method = get_method(name)
    model = FakeVision(method).eval()
    points, labels = blobs(60)
    with torch.no_grad():
        if "fit_after" in method.needs or "fit_before" in method.needs:
            method.fit_head(model.method_head, model.body(points), labels)
        points = points[:3]
        finite_prediction(method, model(points), "abc")
        points[1] = torch.nan
        with pytest.raises(UserError, match=rf"{SAYS} 'b' \(1 of 3 rows\)"):
            finite_prediction(method, model(points), "abc")


@pytest.mark.parametrize("name", ["ce", "dappr", "edl"])
def test_infinite_logits_are_no_answer(name):
    logits = torch.zeros(3, 4)
    logits[1, 2] = torch.inf
    with pytest.raises(UserError, match=f"{SAYS} 'b'"):
        finite_prediction(get_method(name), Outputs(logits=logits), "abc")


def test_one_bad_pass_of_mc_dropout_is_noticed():
    logits = torch.zeros(3, 5, 4)  # [B, M, K]
    logits[2, 3, 0] = torch.nan
    with pytest.raises(UserError, match=f"{SAYS} 'c'"):
        finite_prediction(get_method("mc_dropout", passes=5), Outputs(logits=logits), "abc")


def test_saved_tables_with_nan_are_still_accepted_with_allow_nan(tmp_path):
    probs = [[0.5, 0.5], [float("nan")] * 2]
    meta = {"task": "mine", "split": "test", "num_choices": 2, "task_num_choices": 2}
    PredictionTable.from_arrays(["a", "b"], [0, 1], probs, meta=meta, allow_nan=True).save(tmp_path / "t.npz")
    command = ["evaluate", "--id", str(tmp_path / "t.npz"), "--out", str(tmp_path / "out"), "--resamples", "0"]
    assert main(command) == 2 and main([*command, "--allow-nan"]) == 0
    results = (tmp_path / "out" / "results.json").read_text()
    assert "NaN" not in results and json.loads(results)["results"]


def test_json_is_never_written_with_nan():
    """`json.dumps` writes NaN by default, which is not JSON: every call says that it must not."""
    for path in sorted(Path(PACKAGE).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dumps", "json.dump"):
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert given.get("allow_nan") == "False", f"{path}, line {node.lineno}"
