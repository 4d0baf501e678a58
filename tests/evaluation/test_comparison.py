"""Tables over methods and seeds, from prediction tables made in code."""

import csv
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.evaluation.comparison import Row, compare, render_csv, render_latex, render_markdown, save_comparison
from dappr_llm.evaluation.evaluators import evaluate_tables
from dappr_llm.evaluation.prediction_table import PredictionTable

HERE = Path(__file__).parent


def table(task, skill, seed, n=300, evidence=20.0):
    """Items of a task; the right option gets `skill` more logit, the total evidence is about `evidence`."""
    rng = np.random.default_rng([seed, len(task)])
    labels = np.random.default_rng(len(task)).integers(4, size=n)
    logits = rng.normal(size=(n, 4))
    logits[np.arange(n), labels] += skill
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    alpha = 1 + evidence * probs * rng.uniform(0.5, 1.5, size=(n, 1))
    meta = {"task": task, "num_choices": 4, "task_num_choices": 4, "method": "m"}
    return PredictionTable.from_arrays([f"{task}{i}" for i in range(n)], labels, alpha=alpha, meta=meta)


def row(name, skill, seeds=(0, 1, 2), ood_evidence=10.0):
    runs = {s: {"home": table("home", skill, s), "away": table("away", 0.0, s, evidence=ood_evidence)} for s in seeds}
    return Row(name, name.upper(), runs)


def test_mean_std_and_significance():
    comparison = compare([row("weak", 0.5), row("twin", 0.5), row("strong", 3.0)], resamples=200)
    weak, twin, strong = comparison.entries
    runs = row("weak", 0.5).runs.values()
    accuracies = [evaluate_tables(run["home"], {"away": run["away"]})["id/accuracy"] for run in runs]
    assert weak.summary["id/accuracy"].mean == pytest.approx(np.mean(accuracies))
    assert weak.summary["id/accuracy"].std == pytest.approx(np.std(accuracies, ddof=1))
    assert not weak.against_first
    assert twin.against_first["id/accuracy"].p_value > 0.05  # the very same predictions
    assert strong.against_first["id/accuracy"].difference > 0.2
    assert strong.against_first["id/accuracy"].p_value < 0.05


def test_holm_corrects_for_the_number_of_rows():
    rows = [row("a", 0.5), row("b", 0.62)]
    more = [*rows, *(row(f"c{i}", 0.5) for i in range(4))]
    alone, many = (compare(r, resamples=400).entries[1].against_first["id/nll"].p_value for r in (rows, more))
    assert 0 < alone < many <= 1


def test_rows_are_compared_on_the_seeds_they_share():
    comparison = compare([row("a", 0.5, seeds=(0, 1)), row("b", 0.5, seeds=(1, 2))], resamples=50)
    assert comparison.entries[1].seeds == [1, 2]
    assert comparison.entries[1].against_first["id/accuracy"].difference == 0  # seed 1 of both is the same
    lonely = compare([row("a", 0.5, seeds=(0,)), row("b", 0.5, seeds=(2,))], resamples=50)
    assert lonely.entries[1].against_first == {}
    assert math.isnan(lonely.entries[0].summary["id/accuracy"].std)


def test_other_items_are_refused():
    other = row("b", 0.5)
    other.runs[0]["home"].ids[5] = "other"
    with pytest.raises(UserError, match="other against home5"):
        compare([row("a", 0.5), other], resamples=50)


def test_renderings_agree(tmp_path):
    comparison = compare([row("a_1", 0.5), row("b|2", 3.0)], resamples=100)
    markdown = render_markdown(comparison)
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    assert lines[0] == "| method | seeds | accuracy | NLL | ECE | AUROC away |"
    mean = comparison.entries[1].summary["id/accuracy"]
    assert f"**{100 * mean.mean:.1f} ± {100 * mean.std:.1f}**\\*" in lines[3] and "B\\|2" in lines[3]
    assert "published" in markdown and "max prob" in markdown
    latex = render_latex(comparison)
    assert r"A\_1" in latex and rf"\mathbf{{{100 * mean.mean:.1f}}}" in latex and "^{*}" in latex
    assert latex.count("&") == 3 * 4
    found = {(line["method"], line["key"]): line for line in csv.DictReader(io.StringIO(render_csv(comparison)))}
    assert float(found["B|2", "id/accuracy"]["mean"]) == pytest.approx(mean.mean, rel=1e-5)
    assert found["A_1", "id/accuracy"]["p_value"] == ""
    printed = save_comparison(comparison, tmp_path, "mine", "about")
    assert markdown in printed and (tmp_path / "table.md").read_text().startswith("# mine\n\nabout\n")
    assert json.loads((tmp_path / "table.json").read_text())["entries"][1]["label"] == "B|2"


def test_the_same_runs_give_the_same_bytes(tmp_path):
    """In any process: the order of a set of texts differs from one to the next."""
    code = "import sys\nfrom pathlib import Path\nfrom test_comparison import compare, row, save_comparison\n"
    code += "rows = [row('a', 0.5, seeds=(0,)), row('b', 1.0, seeds=(0,))]\n"
    code += "save_comparison(compare(rows, resamples=20), Path(sys.argv[1]), 'mine')"
    for seed in "123":
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join((*sys.path, str(HERE)))}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / seed)], check=True, env=environment)
    for name in ("table.json", "table.csv", "table.md", "table.tex"):
        assert len({(tmp_path / seed / name).read_bytes() for seed in "123"}) == 1
        assert str(tmp_path) not in (tmp_path / "1" / name).read_text()
