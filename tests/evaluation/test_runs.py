"""One reader of runs' folders: order of tables, lazy reading, and errors that name what is missing."""

import pytest
from random_tables import make_table

from dappr_llm.core.errors import UserError
from dappr_llm.evaluation.item_texts import save_item_texts
from dappr_llm.evaluation.results import save_results
from dappr_llm.evaluation.runs import find_runs, load_run


def write(folder, tasks=("obqa", "arc_c", "csqa"), **meta):
    for number, task in enumerate(tasks):
        make_table(8, seed=number, task=task).save(folder / "predictions" / f"{task}-test.npz")
    facts = {"id": tasks[0], "ood": list(tasks[1:]), **meta}
    save_results({"id/accuracy": 0.5}, facts, folder / "results.json", {"id/accuracy": (0.4, 0.6)})
    return folder


def test_the_id_table_comes_first(tmp_path):
    run = load_run(write(tmp_path / "run"))
    assert (run.name, run.row, run.id_name) == ("run", tmp_path.name, "obqa")
    assert list(run.tables) == ["obqa", "arc_c", "csqa"] and list(run.ood_tables) == ["arc_c", "csqa"]
    assert run.id_table.meta["task"] == "obqa"
    assert (run.results, run.intervals, run.meta["id"]) == ({"id/accuracy": 0.5}, {"id/accuracy": (0.4, 0.6)}, "obqa")
    # Another task may take the place in a report.
    assert list(load_run(tmp_path / "run", id_name="csqa").table_paths)[0] == "csqa"


def test_tables_are_where_the_results_say(tmp_path):
    elsewhere = write(tmp_path / "run" / "elsewhere", ("a", "b"))
    paths = {"a": "elsewhere/predictions/a-test.npz", "b": "elsewhere/predictions/b-test.npz"}
    save_results({}, {"id": "b", "ood": ["a"], "tables": paths}, tmp_path / "run" / "results.json")
    for require in ("tables", "results", "nothing"):
        run = load_run(tmp_path / "run", require=require)
        assert list(run.tables) == ["b", "a"]
    (elsewhere / "predictions" / "a-test.npz").unlink()
    with pytest.raises(UserError, match="its results name the task 'a', but its table is not there"):
        load_run(tmp_path / "run", require="results")


def test_nothing_is_read_before_it_is_needed(tmp_path):
    folder = write(tmp_path / "run")
    table = folder / "predictions" / "arc_c-test.npz"
    save_item_texts([{"id": "arc_c-0", "question": "q?", "options": ["x", "y"]}], table)
    table.write_bytes(b"broken")
    run = load_run(folder, require="results")
    assert run.item_texts["arc_c"]["arc_c-0"].question == "q?" and run.item_texts["obqa"] == {}
    with pytest.raises(UserError, match="arc_c-test.npz is not a readable prediction table"):
        run.tables  # noqa: B018


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such folder; give one that `dappr train`"):
        load_run(tmp_path / "nowhere")
    (tmp_path / "bare").mkdir()
    empty = load_run(tmp_path / "bare", require="nothing")
    assert (empty.results, empty.meta, empty.intervals, empty.table_paths) == ({}, {}, {}, {})
    with pytest.raises(UserError, match="not a finished run: it holds no results.json"):
        load_run(tmp_path / "bare", require="results")
    with pytest.raises(UserError, match="holds no prediction tables .* run `dappr evaluate` first"):
        load_run(tmp_path / "bare")
    folder = write(tmp_path / "run")
    (folder / "results.json").unlink()
    with pytest.raises(UserError, match="pass --id, one of arc_c, csqa, obqa"):
        load_run(folder)
    assert load_run(folder, id_name="obqa").id_name == "obqa"
    with pytest.raises(UserError, match="did you mean 'obqa'"):
        load_run(folder, id_name="obq")


def test_a_sweeps_finished_runs(tmp_path):
    with pytest.raises(UserError, match="holds no finished runs"):
        find_runs(tmp_path)
    for row, seed in (("b", 1), ("a", 0), ("a", 1)):
        folder = write(tmp_path / row / f"seed{seed}")
        (folder / "recipe.yaml").write_text(
            f"data: {{train: digits}}\nmodel: {{backbone: convnet}}\ntrain: {{seed: {seed}}}\n"
        )
    write(tmp_path / "c" / "seed0")  # an ensemble has no recipe
    assert [(run.row, run.seed) for run in find_runs(tmp_path)] == [("a", 0), ("a", 1), ("b", 1)]
    assert [run.seed for run in find_runs(tmp_path / "b" / "seed1")] == [1]
