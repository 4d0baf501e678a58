import json
import math
import subprocess
import sys

import numpy as np
import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.evaluation import calibration_metrics
from dappr_llm.evaluation.evaluators import evaluate_tables
from dappr_llm.evaluation.prediction_table import PredictionTable
from dappr_llm.evaluation.reporting.figures import plot_alpha0, plot_reliability
from dappr_llm.evaluation.reporting.text_tables import render_markdown, render_results
from dappr_llm.evaluation.results import load_results, load_results_file, save_results

RESULTS = {
    "id/accuracy": 0.8947,
    "id/nll": 0.3614,
    "id/ece": 0.0311,
    "id/brier": 0.1712,
    "id/conf_aupr": 0.9752,
    "id/n": 500,
    "id/n_unlabelled": 0,
    "id/options/4": 500,
    "ood/arc_c/auroc": 0.352,
    "ood/arc_c/aupr": 0.41,
    "ood/arc_c/auroc_published": 0.819,
    "ood/arc_c/aupr_published": 0.7,
    "ood/arc_c/auroc_max_prob": 0.604,
    "ood/arc_c/accuracy": 0.7,
    "ood/arc_c/nll": 0.9,
    "ood/arc_c/ece": 0.1,
    "ood/arc_c/n": 1172,
    "ood/arc_c/options/3": 2,
    "ood/arc_c/options/4": 1170,
    "ood/a|b/auroc": math.nan,
    "ood/a|b/n": 7,
}


def make_table(rows=200, dirichlet=True, scale=1.0, task="obqa", seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=rows)
    evidence = rng.gamma(1.0, 2.0, (rows, 4)) + 8 * rng.random((rows, 1)) * np.eye(4)[labels]
    alpha = 1 + scale * evidence
    arrays = {"alpha": alpha} if dirichlet else {"probs": alpha / alpha.sum(axis=1, keepdims=True)}
    meta = {"task": task, "method": "dappr", "num_choices": 4, "task_num_choices": 4}
    return PredictionTable.from_arrays([f"{task}-{row}" for row in range(rows)], labels, meta=meta, **arrays)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, for a look at their content."""
    figure = pytest.importorskip("matplotlib.figure")
    figures, save = [], figure.Figure.savefig

    def keep(self, *args, **kwargs):
        figures.append(self)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(figure.Figure, "savefig", keep)
    return figures


def test_render_results_is_an_aligned_table():
    text = render_results(RESULTS, title="DAPPr on OBQA")
    lines = text.splitlines()
    assert lines[0] == "DAPPr on OBQA"
    assert next(line for line in lines if line.startswith("ID")).split() == [
        "ID", "89.47", "0.361", "3.11", "0.171", "97.52", "500",
    ]  # fmt: skip
    header = next(line for line in lines if line.startswith("OOD task"))
    row = next(line for line in lines if line.startswith("arc_c"))
    assert row.split() == ["arc_c", "35.20", "81.90", "60.40", "41.00", "70.00", "70.00", "0.900", "10.00", "1172"]
    assert len(header) == len(row)
    assert header.index("published") + len("published") == row.index("81.90") + len("81.90")
    assert next(line for line in lines if line.startswith("a|b")).split() == ["a|b", *["-"] * 8, "7"]
    assert "items by number of options: id 4: 500; arc_c 3: 2, 4: 1170" in lines
    legend = [line for line in lines if "matched:" in line and "published:" in line]
    assert len(legend) == 1
    assert max(map(len, lines)) <= 120
    assert text.isascii()


def test_render_results_copes_with_half_the_results():
    only_id = render_results({"id/accuracy": 0.5, "id/n": 2})
    assert "50.00" in only_id and "OOD" not in only_id
    only_ood = render_results({"ood/x/auroc": 0.5})
    assert "50.00" in only_ood and "Brier  " not in only_ood


def test_render_markdown_has_equal_columns():
    lines = [line for line in render_markdown(RESULTS).splitlines() if line.startswith("|")]
    id_lines, ood_lines = lines[:3], lines[3:]
    assert {line.count("|") for line in id_lines} == {8}
    assert ood_lines[0].startswith("| OOD task | AUROC matched | AUROC published |")
    assert {line.replace("\\|", "").count("|") for line in ood_lines} == {11}
    assert "| arc_c | 35.20 | 81.90 |" in ood_lines[2]
    assert ood_lines[3].startswith("| a\\|b | - |")


def test_readings_that_coincide_are_shown_once():
    same = RESULTS | {"ood/arc_c/auroc_published": 0.352, "ood/arc_c/aupr_published": 0.41}
    text = render_results(same)
    assert "published" not in text and "matched" not in text
    row = next(line for line in text.splitlines() if line.startswith("arc_c"))
    assert row.split() == ["arc_c", "35.20", "60.40", "41.00", "70.00", "0.900", "10.00", "1172"]
    assert "| OOD task | AUROC | AUROC max prob | AUPR | accuracy |" in render_markdown(same)
    assert "published" in render_results(same | {"ood/arc_c/aupr_published": 0.42})


def test_results_round_trip_with_nan_as_null(tmp_path):
    path = tmp_path / "out" / "results.json"
    save_results({**RESULTS, "id/extra": np.float32(0.5)}, {"seed": 3, "tasks": ("a",)}, path)
    assert json.loads(path.read_text())["results"]["ood/a|b/auroc"] is None
    results, meta = load_results(path)
    assert math.isnan(results.pop("ood/a|b/auroc"))
    assert results == {**{key: value for key, value in RESULTS.items() if value == value}, "id/extra": 0.5}
    assert meta == {"seed": 3, "tasks": ["a"]}
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def test_results_file_holds_a_version_and_intervals(tmp_path):
    path = tmp_path / "results.json"
    save_results({"id/nll": 0.5}, {"seed": 1}, path, {"id/nll": (0.4, np.float64(0.6)), "id/x": (math.nan, math.nan)})
    content = json.loads(path.read_text())
    assert list(content) == ["schema_version", "meta", "results", "intervals"] and content["schema_version"] == 2
    assert content["intervals"] == {"id/nll": [0.4, 0.6], "id/x": [None, None]}
    read = load_results_file(path)
    assert (read.results, read.meta, read.intervals["id/nll"]) == ({"id/nll": 0.5}, {"seed": 1}, (0.4, 0.6))
    assert all(map(math.isnan, read.intervals["id/x"]))
    # Files from before the version, and from after it.
    path.write_text('{"meta": {}, "results": {"id/nll": null}}')
    assert math.isnan(load_results(path)[0]["id/nll"]) and load_results_file(path).intervals == {}
    for bad, words in (
        ('{"schema_version": 3, "meta": {}, "results": {}}', "newer dappr_llm .format 3.; please upgrade"),
        ('{"meta": {}, "results": {"id/nll": "x"}}', "results.id/nll is 'x'; allowed: a number or null"),
        (
            '{"meta": {}, "results": {}, "intervals": {"id/nll": [1]}}',
            r"intervals.id/nll is \[1\]; allowed: a list of 2",
        ),
    ):
        path.write_text(bad)
        with pytest.raises(UserError, match=words):
            load_results_file(path)


def test_intervals_are_printed_below_the_numbers():
    intervals = {"id/accuracy": (0.86, 0.92), "id/nll": (0.3, 0.41), "ood/arc_c/auroc": (0.3, math.nan)}
    lines = render_results(RESULTS, intervals=intervals).splitlines()
    below = lines[next(i for i, line in enumerate(lines) if line.startswith("ID")) + 1]
    assert below.split() == ["95", "%", "86.0-92.0", "0.30-0.41"]
    assert max(map(len, lines)) <= 120 and "bootstrap" in lines[-1]
    assert "|   95 % | 86.0-92.0 | 0.30-0.41 |" in render_markdown(RESULTS, intervals)
    assert "ECE floor" in render_results({**RESULTS, "id/ece_floor": 0.012}) and "1.20" in render_results(
        {**RESULTS, "id/ece_floor": 0.012}
    )


@pytest.mark.parametrize("content", ["", "{", "[]", '{"results": {}}', '{"results": [], "meta": {}}', "\udcff"])
def test_bad_results_files_are_user_errors(tmp_path, content):
    path = tmp_path / "results.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"results\.json"):
        load_results(path)
    with pytest.raises(UserError, match=r"Cannot read .*missing"):
        load_results(tmp_path / "missing.json")


def test_plot_reliability_draws_the_bins(tmp_path, drawn):
    table = make_table()
    table.labels[:20] = -1
    plot_reliability(table, tmp_path / "reliability.png")
    assert (tmp_path / "reliability.png").read_bytes().startswith(b"\x89PNG")
    top, bottom = drawn[0].axes
    probs, labels = table.probs[20:], table.labels[20:]
    correct = probs.argmax(axis=1) == labels
    count, confidence, accuracy = calibration_metrics.reliability_bins(probs.max(axis=1), correct)
    full = count > 0
    bars, gaps = top.containers
    np.testing.assert_allclose([bar.get_height() for bar in bars], accuracy[full])
    tops = [gap.get_y() + gap.get_height() for gap in gaps]
    np.testing.assert_allclose(tops, confidence[full])
    assert [bar.get_height() for bar in bottom.containers[0]] == count.tolist() and len(count) == 15
    assert f"ECE {100 * calibration_metrics.ece(probs.max(axis=1), correct):.2f} %" in top.get_title()
    assert "n = 180" in top.get_title()


def test_plot_reliability_needs_labels(tmp_path):
    with pytest.raises(UserError, match="known label"):
        plot_reliability(PredictionTable.from_arrays(["a"], probs=np.eye(2)[:1]), tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("scale", "axis"), [(0.02, "linear"), (50.0, "log")])
def test_plot_alpha0_shares_bins_and_marks_medians(tmp_path, drawn, scale, axis):
    reference, other = make_table(), make_table(rows=90, scale=scale, task="arc_c", seed=1)
    plot_alpha0(reference, {"arc_c": other}, tmp_path / "alpha0.png")
    assert (tmp_path / "alpha0.png").read_bytes().startswith(b"\x89PNG")
    axes = drawn[0].axes[0]
    assert axes.get_xscale() == axis
    assert "total evidence" in axes.get_xlabel() and "4 letters" in axes.get_xlabel()
    outlines = [patch for patch in axes.patches if patch.get_label().startswith(("obqa (ID)", "arc_c"))]
    assert len(outlines) == 2
    values, edges, _ = zip(*(patch.get_data() for patch in outlines), strict=True)
    np.testing.assert_array_equal(edges[0], edges[1])
    assert [value.sum() for value in values] == [pytest.approx(1), pytest.approx(1)]
    medians = [line.get_xdata()[0] for line in axes.lines]
    expected = [np.median(table.alpha.astype(np.float64).sum(axis=1)) for table in (reference, other)]
    np.testing.assert_allclose(medians, expected, rtol=1e-5)


def test_plot_alpha0_without_alpha_says_so(tmp_path, drawn):
    reference, other = make_table(dirichlet=False), make_table(rows=90, task="arc_c")
    plot_alpha0(reference, {"arc_c": other}, tmp_path / "alpha0.png")
    axes = drawn[0].axes[0]
    assert "epistemic" in axes.get_xlabel() and "instead of" in axes.get_xlabel()
    np.testing.assert_allclose(axes.lines[0].get_xdata()[0], np.median(reference.epistemic), rtol=1e-5)


def test_plot_alpha0_of_a_constant_score(tmp_path, drawn):
    table = PredictionTable.from_arrays(["a", "b"], alpha=np.full((2, 4), 2.0), meta={"num_choices": 4})
    plot_alpha0(table, {}, tmp_path / "alpha0.png")
    assert drawn[0].axes[0].get_xscale() == "linear"


def test_missing_matplotlib_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (lambda path: plot_reliability(make_table(), path), lambda path: plot_alpha0(make_table(), {}, path)):
        with pytest.raises(UserError, match=r"pip install 'dappr-llm\[report\]'"):
            draw(tmp_path / "x.png")


def test_plots_leave_the_backend_alone(tmp_path):
    pytest.importorskip("matplotlib")
    table = tmp_path / "table.npz"
    make_table().save(table)
    code = (
        "import sys\n"
        "from dappr_llm.evaluation.prediction_table import PredictionTable\n"
        "from dappr_llm.evaluation.reporting.figures import plot_alpha0, plot_reliability\n"
        f"table = PredictionTable.load({str(table)!r})\n"
        f"plot_reliability(table, {str(tmp_path / 'a.png')!r})\n"
        f"plot_alpha0(table, {{}}, {str(tmp_path / 'b.png')!r})\n"
        "import matplotlib\n"
        "print('matplotlib.pyplot' in sys.modules, matplotlib.get_backend(auto_select=False))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "None"]


def test_rendering_follows_the_evaluators():
    results = evaluate_tables(make_table(), {"arc_c": make_table(rows=90, scale=0.3, task="arc_c", seed=1)})
    row = next(line for line in render_results(results).splitlines() if line.startswith("arc_c")).split()
    assert row[1] == f"{100 * results['ood/arc_c/auroc']:.2f}" and row[-1] == "90"
    assert "-" not in row
