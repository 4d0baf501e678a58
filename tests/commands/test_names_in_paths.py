"""Names in tables and recipes that try to lead out of their folder."""

import json

import numpy as np
import pytest

from dappr_llm.commands.main import main
from dappr_llm.commands.predict import save_tables
from dappr_llm.core.errors import UserError
from dappr_llm.core.recipe import Recipe
from dappr_llm.evaluation.prediction_table import PredictionTable
from dappr_llm.evaluation.runs import load_run
from dappr_llm.inference.batching import RowSet


def make_table(path=None, rows=8, **meta):
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(4), rows)
    meta = {"task": "mine", "split": "test", "method": "ce", "num_choices": 4, "task_num_choices": 4, **meta}
    table = PredictionTable.from_arrays([f"q{i}" for i in range(rows)], rng.integers(0, 4, rows), probs, meta=meta)
    if path is not None:
        table.save(path)
    return table


def files_below(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("task", ["/../../victim", "../../victim", "../victim-test", "..", "x/../../../victim"])
def test_a_tables_task_cannot_overwrite_another_run(tmp_path, monkeypatch, task):
    for name in ("victim", "victim-test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text("precious")
    work = tmp_path / "work"
    work.mkdir()
    make_table(work / "bad.npz", task=task)
    before = files_below(tmp_path)
    monkeypatch.chdir(work)
    assert main(["evaluate", "--id", "bad.npz", "--resamples", "0"]) == 0
    after = files_below(tmp_path)
    assert {name: after[name] for name in before} == before
    (results,) = (name for name in after.keys() - before.keys() if name.endswith("results.json"))
    assert results.startswith("work/evaluations/") and results.count("/") == 3
    load_run(tmp_path / results.removesuffix("/results.json")).tables  # noqa: B018 - reads them


def test_a_split_cannot_lead_out_of_the_folder(tmp_path):
    out = tmp_path / "a" / "b" / "run"
    save_tables([RowSet([], "/../../x", "../../../y")], [make_table()], out)
    (path,) = tmp_path.rglob("*.npz")
    assert path.parent == out / "predictions"


@pytest.mark.parametrize("task", [["a"], {"a": 1}, 5])
def test_a_tables_task_is_a_text(tmp_path, capsys, task):
    make_table(tmp_path / "bad.npz", task=task)
    assert main(["evaluate", "--id", str(tmp_path / "bad.npz"), "--out", str(tmp_path / "out")]) == 2
    assert "meta.task must be a text" in capsys.readouterr().err


def test_results_are_read_with_tables_of_their_own_folder_only(tmp_path):
    make_table(tmp_path / "secret.npz")
    make_table(tmp_path / "given.npz")
    out = tmp_path / "out"
    assert main(["evaluate", "--id", str(tmp_path / "given.npz"), "--out", str(out), "--resamples", "0"]) == 0
    assert len(load_run(out).tables["mine"]) == 8  # a copy of the given table
    content = json.loads((out / "results.json").read_text())
    (out / "link.npz").symlink_to(tmp_path / "secret.npz")
    for place in ("../secret.npz", str(tmp_path / "secret.npz"), "link.npz", "predictions/../../secret.npz", 5, None):
        content["meta"]["tables"]["mine"] = place
        (out / "results.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match="results.json.*(must be a file in the run's|meta.tables.mine is)"):
            load_run(out)


def test_two_lists_of_tasks_have_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "a+b"):
        make_table(tmp_path / f"{name}.npz", task=name)
    assert main(["evaluate", "--id", "a.npz", "--ood", "b.npz", "--resamples", "0"]) == 0
    assert main(["evaluate", "--id", "a+b.npz", "--resamples", "0"]) == 0
    assert len(list((tmp_path / "evaluations").iterdir())) == 2
    assert (tmp_path / "evaluations" / "a-test+b").is_dir()


@pytest.mark.parametrize("name", ["../../victim", "/etc", "..", "a/../../b"])
def test_a_recipes_name_stays_below_runs(name):
    folder = Recipe(name=name, data={"train": "obqa"}).output_dir
    assert folder.parts[0] == "runs" and ".." not in folder.parts and len(folder.parts) > 1
    assert Recipe(name="group/mine", data={"train": "obqa"}).output_dir.as_posix() == "runs/group/mine"
