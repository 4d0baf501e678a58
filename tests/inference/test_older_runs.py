"""A run that version 0.1.0 wrote, before the package had folders: it loads and evaluates to the same figures."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dappr_llm import PredictionTable, UncertaintyPipeline, evaluate_ood
from dappr_llm.commands.main import main
from dappr_llm.evaluation.evaluators import evaluate_tables

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "run_v0_1_0"


@pytest.fixture
def old(tmp_path, monkeypatch):
    """Copied, and entered: the run names its base model and data by relative paths."""
    folder = shutil.copytree(FIXTURE, tmp_path / "old")
    monkeypatch.chdir(folder)
    return folder


def stored():
    return json.loads((FIXTURE / "run" / "results.json").read_text())


def test_its_tables_give_the_stored_results():
    tables = {name: PredictionTable.load(FIXTURE / "run" / path) for name, path in stored()["meta"]["tables"].items()}
    found = evaluate_tables(tables["mine"], {"other": tables["other"]})
    wanted = stored()["results"]
    assert {key: found[key] for key in wanted if wanted[key] is not None} == pytest.approx(
        {key: value for key, value in wanted.items() if value is not None}, abs=1e-12
    )
    assert evaluate_ood(tables["mine"], tables["other"])["auroc"] == pytest.approx(wanted["ood/other/auroc"])


def test_it_predicts_what_it_predicted(old):
    command = ["evaluate", "run", "--id", "data/test.jsonl", "--ood", "data/other.jsonl", "--out", "again"]
    assert main(command) == 0
    for mine, its in (("test-test", "mine-test"), ("other-test", "other-test")):
        found = PredictionTable.load(old / "again" / "predictions" / f"{mine}.npz")
        wanted = PredictionTable.load(FIXTURE / "run" / "predictions" / f"{its}.npz")
        assert found.ids.tolist() == wanted.ids.tolist()
        for name in ("probs", "alpha", "epistemic"):
            assert np.allclose(getattr(found, name), getattr(wanted, name), atol=1e-6), name
    again = json.loads((old / "again" / "results.json").read_text())
    for key, value in stored()["results"].items():
        if value is not None:
            assert again["results"][key] == pytest.approx(value, abs=1e-6), key
    for key, pair in stored()["intervals"].items():
        if None not in pair:
            assert again["intervals"][key] == pytest.approx(pair, abs=1e-6), key


def test_its_decision_rule_is_applied(old):
    """The arithmetic of the stored rule, redone here."""
    rule = json.loads((old / "run" / "decision.json").read_text())
    pipe, plain = (
        UncertaintyPipeline.from_pretrained("run"),
        UncertaintyPipeline.from_pretrained("run", decision=False),
    )
    rows = [json.loads(line) for line in (old / "data" / "test.jsonl").read_text().splitlines()][:6]
    for answer, raw in zip(pipe(rows), plain(rows), strict=True):
        scaled = np.array(raw.probs) ** (1 / rule["temperature"])
        assert answer.probs == pytest.approx(scaled / scaled.sum(), abs=1e-9)
        assert answer.abstain == (not answer.aleatoric <= rule["abstention"]["threshold"])
        assert raw.abstain is None and raw.prediction_set is None


def test_predicting_builds_no_trainer_and_touches_no_folder(old, monkeypatch):
    """An evaluation from a checkpoint needs no `Trainer`, and writes where it was told to and nowhere else."""
    monkeypatch.setattr("transformers.Trainer.__init__", lambda *_, **__: pytest.fail("a Trainer was built"))
    before = {path: path.stat().st_mtime_ns for path in (old / "run").rglob("*")}
    assert main(["evaluate", "run", "--id", "data/test.jsonl", "--out", "again"]) == 0
    assert main(["predict", "run", "--task", "data/test.jsonl", "--out", "answers.jsonl"]) == 0
    assert {path: path.stat().st_mtime_ns for path in (old / "run").rglob("*")} == before
