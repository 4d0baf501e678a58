"""The table of defaults: differences from cross-entropy on the same rows, and what is skipped."""

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import defaults_table  # noqa: E402
import defaults_tasks  # noqa: E402


def run(method, hits, task="banking4", seed=0, part="test"):
    accuracy = hits.count("1") / len(hits)
    return {
        "model": "m", "task": task, "method": method, "seed": seed, "part": part, "hits": hits, "accuracy": accuracy,
    }  # fmt: skip


def test_differences_are_paired():
    assert defaults_table.difference("1100", "1000") == pytest.approx((25.0, 1.96 * 50 / 2))
    assert defaults_table.difference("1010", "1010") == (0.0, 0.0)


def test_the_table():
    runs = [run("ce", "1110"), run("dappr", "1111"), run("ce", "1100", seed=1), run("edl", "0000", seed=2)]
    runs.append(run("dappr", "0000", part="validation"))
    lines = defaults_table.markdown(runs, "test", ["ce", "dappr", "edl"]).splitlines()
    assert len(lines) == 3 and lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    assert "| 2 | 62.5 | +25.0 ± 49.0 | – |" in lines[2]  # seeds that cross-entropy has not are left out


def test_finished_runs_are_skipped(tmp_path, monkeypatch, capsys):
    started = []

    def run_one(name, model, task, method, seed, args):
        started.append(method)
        return run(method, "10", task, seed, args.part) | {"model": name, "seconds": 1}

    monkeypatch.setattr(defaults_table, "run_one", run_one)
    command = ["defaults_table.py", "--out", str(tmp_path), "--model", "m=x", "--tasks", "banking4", "--methods"]
    for methods in (["ce", "dappr"], ["ce", "dappr", "edl"]):
        monkeypatch.setattr(sys, "argv", [*command, *methods])
        defaults_table.main()
    assert started == ["ce", "dappr", "edl"] and "+0.0 ± 0.0" in capsys.readouterr().out


def test_a_fifth_option_is_never_right(tmp_path):
    paths = defaults_tasks.write_files("everyday5", tmp_path, None, most=40)
    assert paths == defaults_tasks.write_files("everyday5", tmp_path, None)
    rows = [json.loads(line) for line in Path(paths["test"]).read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 40 and {len(set(row["choices"])) for row in rows} == {5}
    assert {row["answer"] for row in rows} == set("ABCDE")
    four = {(item["question"], tuple(item["options"])): item for item in defaults_tasks.generate("everyday", "test")}
    for row in rows:
        right = row["choices"]["ABCDE".index(row["answer"])]
        matches = [
            item for (question, options), item in four.items()
            if question == row["question"] and set(options) < set(row["choices"])
        ]  # fmt: skip
        assert right in [item["options"][item["label"]] for item in matches]


def test_a_recipe_says_nothing_of_its_method_but_the_name(tmp_path):
    import argparse

    from dappr_llm.core.recipe import build_recipe

    args = argparse.Namespace(
        out=str(tmp_path), data_root=None, part="test", rows=5, dtype="float32", steps=None, learning_rate=None
    )
    recipe = defaults_table.recipe_for("everyday5", "smollm2-135m", "edl", 3, args)
    assert build_recipe(recipe).method == {"name": "edl"}
    assert not {"evidence_offset", "head_init"} & set(recipe["train"]) and recipe["train"]["seed"] == 3
