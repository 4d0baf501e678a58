"""Sweeps: planning, running, resuming after any kind of end, and the table they make."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from dappr_llm.commands.main import main
from dappr_llm.core.errors import UserError
from dappr_llm.core.files import folder_lock
from dappr_llm.core.recipe import list_recipes
from dappr_llm.scale.sweep import is_finished, load_table

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--set", "train.num_train_epochs=1", "--set", "train.eval_strategy=no", "--set", "lora.lora_dropout=0.1"]


@pytest.fixture
def table_file(recipe, tmp_path):
    """A table of the tiny recipe: CE, its ensemble, its MC dropout, DAPPr."""
    values = yaml.safe_load(recipe.read_text())
    del values["train"]["output_dir"]
    for name, method in (("ce", {"name": "ce"}), ("mc", {"name": "mc_dropout", "passes": 2}), ("dappr", None)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values | ({"method": method} if method else {})))
    rows = [
        "ce",
        {"recipe": "mc", "weights_of": "ce", "label": "MC"},
        {"recipe": "ce", "name": "ensemble", "members": 2},
        {"recipe": "dappr", "set": {"method.reg_weight": 1e-3}},
    ]
    path = tmp_path / "table.yaml"
    path.write_text(yaml.safe_dump({"seeds": [0, 1], "rows": rows, "output_dir": str(tmp_path / "out")}))
    return path


def change(path, **values):
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | values))


def test_plan_shares_runs_and_orders_them(table_file, tmp_path):
    table = load_table(table_file)
    out = tmp_path / "out"
    names = [str(Path(folder).relative_to(out)) for folder in table.jobs]
    assert names == ["ce/seed0", "dappr/seed0", "mc/seed0", "ce/seed1000", "ce/seed1", "dappr/seed1", "mc/seed1",
                     "ce/seed1001"]  # fmt: skip
    assert table.runs["ensemble", 1] == [str(out / "ce/seed1"), str(out / "ce/seed1001")]
    assert table.jobs[str(out / "mc/seed1")].after == str(out / "ce/seed1")
    assert "method.reg_weight=0.001" in table.jobs[str(out / "dappr/seed0")].overrides


def test_rows_can_be_chosen_and_bring_what_they_build_on(table_file):
    assert [row.name for row in load_table(table_file, only=["dappr"]).rows] == ["ce", "dappr"]
    change(table_file, rows=["dappr", "ce", {"recipe": "mc", "weights_of": "ce"}])
    assert [row.name for row in load_table(table_file, only=["mc"]).rows] == ["dappr", "ce", "mc"]


def run_sweep(table_file, *arguments):
    command = [sys.executable, "-m", "dappr_llm", "sweep", str(table_file), *QUICK, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_a_whole_sweep_and_its_table(table_file, tmp_path):
    out = tmp_path / "out"
    first = run_sweep(table_file, "--seeds", "0")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "| ce | 1 |" in first.stdout and "| MC | 1 |" in first.stdout and "4 runs" in first.stdout
    assert {"table.md", "table.tex", "table.csv", "table.json"} <= {p.name for p in out.iterdir()}
    assert json.loads((out / "mc/seed0/results.json").read_text())["meta"]["method"] == "mc_dropout"
    labels = [entry["label"] for entry in json.loads((out / "table.json").read_text())["entries"]]
    assert labels == ["ce", "MC", "ensemble", "dappr"]
    times = {path: path.stat().st_mtime_ns for path in out.rglob("results.json") if "ensemble" not in str(path)}
    again = run_sweep(table_file, "--seeds", "0")
    assert again.returncode == 0 and "4 of them finished" in again.stdout and "started" not in again.stdout
    assert times == {path: path.stat().st_mtime_ns for path in times}


def test_dry_run_and_tables_only_run_nothing(table_file, tmp_path, capsys):
    assert main(["sweep", str(table_file), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "8 runs" in printed and printed.count("to do") == 8 and "ce seed 1001" in printed
    assert main(["sweep", str(table_file), "--tables-only"]) == 0
    assert "started" not in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_a_dry_run_changes_nothing_in_a_live_run(table_file, tmp_path, capsys):
    job = next(iter(load_table(table_file).jobs.values()))
    with folder_lock(job.folder):
        (job.folder / ".results.json.77.tmp").write_text("being written")
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
        for arguments in (["--dry-run"], ["--tables-only"]):
            assert main(["sweep", str(table_file), *arguments]) == 0
            assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}


@pytest.mark.parametrize("name", ["../../victim", "/victim", "..", "a/b"])
def test_a_rows_name_is_one_folder(table_file, tmp_path, name):
    change(table_file, rows=["ce", {"recipe": "mc", "name": name}])
    folders = [Path(folder) for folder in load_table(table_file).jobs]
    assert all(folder.parent.parent == tmp_path / "out" and ".." not in folder.parts for folder in folders)
    change(table_file, rows=["ce", {"recipe": "mc", "name": "CE"}])
    with pytest.raises(UserError, match="two rows are called"):
        load_table(table_file)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_interrupted_sweeps_lose_and_repeat_nothing(table_file, tmp_path, number):
    change(table_file, rows=["ce", {"recipe": "dappr", "set": {"train.num_train_epochs": 60}}])
    slow = [arg for arg in QUICK if arg != "train.num_train_epochs=1"]
    slow.remove("--set")
    command = [sys.executable, "-m", "dappr_llm", "sweep", str(table_file), "--seeds", "0", *slow]
    command += ["--set", "train.logging_steps=1", "--set", "train.save_steps=20"]
    out = tmp_path / "out"
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.time() + 180
    log = out / "dappr" / "seed0.log"
    while time.time() < deadline and (not log.exists() or " rows/s " not in log.read_text()):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    finished = (out / "ce/seed0/results.json").stat().st_mtime_ns
    process.send_signal(number)
    assert process.wait(60) == (130 if number == signal.SIGINT else -9)
    assert not (out / "dappr/seed0/results.json").exists()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "1 of them finished" in again.stdout and "dappr seed 0: done" in again.stdout
    assert "Resuming from" in log.read_text()
    assert (out / "ce/seed0/results.json").stat().st_mtime_ns == finished


@pytest.mark.parametrize(
    "values, message",
    [
        ({"rows": []}, "rows is .*; allowed: a list, not empty"),
        ({"rows": ["ce", "ce"]}, "two rows are called 'ce'"),
        ({"rows": ["cee"]}, "no such recipe file"),
        ({"rows": [{"name": "x"}]}, "rows.0.recipe is missing"),
        ({"rows": ["ce", {"recipe": "mc", "weights_of": "dappr"}]}, "wants the weights of 'dappr'"),
        ({"rows": [{"recipe": "ce", "members": 0}]}, "rows.0.members is 0; allowed: a whole number of at least 1"),
        ({"rows": [{"recipe": "ce", "member": 2}]}, "'members'"),
        ({"rows": [{"recipe": "ce", "set": {"tarin.seed": 1}}]}, "'train'"),
        ({"seeds": [0, 0]}, "seeds must be different"),
        ({"seeds": [5000]}, "below 1000"),
        ({"sedes": [0]}, "'seeds'"),
        ({"set": 3}, "set is 3; allowed: a mapping"),
    ],
)
def test_mistakes_show_before_anything_runs(table_file, tmp_path, values, message):
    change(table_file, **values)
    with pytest.raises(UserError, match=message):
        load_table(table_file)


def test_a_table_is_not_a_recipe_and_the_other_way_round(table_file, recipe, capsys):
    assert main(["train", str(table_file)]) == 2
    assert "dappr sweep" in capsys.readouterr().err
    assert main(["sweep", str(recipe)]) == 2
    assert "has no `rows`" in capsys.readouterr().err


def test_a_folder_with_another_run_is_refused(table_file, tmp_path):
    table = load_table(table_file)
    job = table.jobs[str(tmp_path / "out/ce/seed0")]
    job.folder.mkdir(parents=True)
    (job.folder / "recipe.yaml").write_text(yaml.safe_dump({"data": {"train": "obqa"}, "method": {"name": "ce"}}))
    with pytest.raises(UserError, match="holds another run"):
        is_finished(job)


@pytest.mark.parametrize("name", [name for name, _, _ in list_recipes(tables=True)])
def test_shipped_tables_resolve(name):
    table = load_table(name)
    assert len(table.jobs) >= len(table.rows)
    assert table.description


def test_a_folder_is_written_by_one_process_at_a_time(recipe, tmp_path, capsys):
    with folder_lock(tmp_path / "run"):
        code = f"from dappr_llm.commands.main import main; raise SystemExit(main(['train', {str(recipe)!r}]))"
        found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert found.returncode == 2 and "being written by another process" in found.stderr
