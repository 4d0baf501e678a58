"""The report's figures: inline SVG with legend and caption, and a table of the plotted values where they are few."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .. import calibration_metrics, classification_metrics, ranking_metrics
from ..bootstrap import wilson
from ..evaluators import mixture_answers, ood_uncertainties
from ..metric_columns import SCORES
from ..prediction_table import PredictionTable
from ..scores import has_score, uncertainty
from . import svg
from .run_data import RunData
from .tables import Cell, Table, interval_text, number

_QUANTILES = 10
_HISTOGRAM_BINS = 32
# Beyond this ratio of largest to smallest value, a linear axis squeezes most items into one bin.
_LOG_SPREAD = 20
# (slots of `ood_uncertainties`, suffix of the result keys, CSS class, text in the legend)
_READINGS = (("train", "", "", "matched"), ("task", "_published", " dashed", "published"))


@dataclass(frozen=True)
class Chart:
    """
    A figure: inline SVG, caption, `(CSS class, text)` of each legend entry, and a table of the plotted values.

    `kind` is a CSS class of the figure: `"wide"` for one that has its own size and scrolls where the page is narrower.
    """

    title: str
    svg: str
    caption: str
    legend: list[tuple[str, str]] = field(default_factory=list)
    table: Table | None = None
    kind: str = ""


def answered(table: PredictionTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labelled rows without NaN or Inf: their indices, confidences and whether the answer is correct, `[N]` each."""
    rows = np.flatnonzero((table.labels >= 0) & ~table.nan_rows)
    probs = table.reading("own").probs[rows]
    return rows, probs.max(axis=1, initial=0), classification_metrics.is_correct(probs, table.labels[rows])


def reliability(run: RunData, task: str) -> Chart | None:
    """Reliability diagram over the bins of the ECE, with the interval and number of items of each bin."""
    _, confidence, correct = answered(run.tables[task])
    if not len(correct):
        return None
    count, mean, accuracy = calibration_metrics.reliability_bins(confidence, correct)
    edges = np.linspace(0, 1, len(count) + 1)
    plot = svg.Plot((0, 1), (0, 1), "confidence, %", "accuracy, %", percent="xy")
    rows = []
    for b in np.flatnonzero(count):
        low, high = map(float, wilson(accuracy[b] * count[b], count[b]))
        place = f"{100 * edges[b]:.0f}–{100 * edges[b + 1]:.0f} %"
        tooltip = f"confidence {place}: accuracy {100 * accuracy[b]:.1f} %, {count[b]:.0f} items"
        plot.bar(edges[b], edges[b + 1], 0, accuracy[b], "fill c0", tooltip)
        plot.bar(edges[b], edges[b + 1], min(accuracy[b], mean[b]), max(accuracy[b], mean[b]), "gap")
        plot.whisker((edges[b] + edges[b + 1]) / 2, low, high)
        cells = [Cell(f"{count[b]:.0f}"), Cell(number(mean[b], "percent"))]
        rows.append(([place], [*cells, Cell(number(accuracy[b], "percent"), interval_text((low, high), "percent"))]))
    plot.line([(0, 0), (1, 1)], "line ideal")
    error, floor = calibration_metrics.ece(confidence, correct), calibration_metrics.ece_floor(confidence)
    caption = (
        f"ECE {100 * error:.2f} %; chance alone would show {100 * floor:.2f} % at {len(correct)} items. "
        "Below: items per bin."
    )
    table = Table(f"Reliability bins of {task}", ["confidence"], ["items", "mean confidence", "accuracy"], rows)
    legend = [("c0", "accuracy"), ("gap", "gap to confidence"), ("whisker", "95 % interval"), ("ideal", "perfect")]
    drawn = plot.render(f"Reliability diagram of {task}: {caption}") + _bin_counts(edges, count)
    return Chart(f"Reliability, {task}", drawn, caption, legend, table)


def _bin_counts(edges: np.ndarray, count: np.ndarray) -> str:
    plot = svg.Plot((0, 1), (0, 1.25 * float(count.max())), "", "items", percent="x", height=110, y_ticks=2)
    for b in np.flatnonzero(count):
        plot.bar(edges[b], edges[b + 1], 0, count[b], "fill c6", f"{count[b]:.0f} items")
        plot.label((edges[b] + edges[b + 1]) / 2, count[b], f"{count[b]:.0f}")
    return plot.render("Items per confidence bin")


def histogram(run: RunData, evidence: bool) -> Chart | None:
    """Histograms of total evidence or epistemic uncertainty by task, all items read on the letters of training."""
    letters = run.id_table.meta.get("num_choices", run.id_table.width)
    values = {}
    for task, table in run.tables.items():
        if evidence:
            if table.alpha is None:
                return None
            value = table.reading(letters).alpha.sum(axis=1)  # type: ignore[union-attr]
        else:
            value = uncertainty(table, letters, "epistemic")
        values[task] = value[np.isfinite(value)].astype(np.float64)
    everything = np.concatenate(list(values.values()))
    if not len(everything):
        return None
    low, high = float(everything.min()), float(everything.max())
    log = low > 0 and high / low > _LOG_SPREAD
    if high <= low:
        low, high = low - 0.5, high + 0.5
    edges = (np.geomspace if log else np.linspace)(low, high, _HISTOGRAM_BINS + 1)
    shares = {
        task: np.histogram(value.clip(edges[0], edges[-1]), edges)[0] / max(len(value), 1)
        for task, value in values.items()
    }
    top = max(float(share.max()) for share in shares.values())
    name = "total evidence α₀" if evidence else "epistemic uncertainty"
    plot = svg.Plot((low, high), (0, 1.05 * top), name, "share of items, %", log_x=log, percent="y")
    legend = []
    for i, (task, share) in enumerate(shares.items()):
        if i == 0:
            plot.steps(edges.tolist(), share.tolist(), "area c0", fill=True)
        plot.steps(edges.tolist(), share.tolist(), f"line c{i % 7}")
        if len(values[task]):
            median = float(np.median(values[task]))
            plot.mark(median, f"median c{i % 7}")
            where = " (in distribution)" if task == run.id_name else ""
            legend.append((f"c{i % 7}", f"{task}{where}: median {median:.3g}, n = {len(values[task])}"))
    unit = "classes" if run.id_table.meta.get("modality") == "vision" else "training letters"
    caption = f"All items read on the {letters} {unit}. Thin upright lines: medians."
    return Chart(name.capitalize(), plot.render(f"Histograms of {name} by task"), caption, legend)


def roc(runs: list[RunData], task: str) -> Chart:
    """ROC curves of OOD detection for every run and reading: share of accepted ID items against accepted OOD items."""
    from sklearn.metrics import roc_curve

    plot = svg.Plot((0, 1), (0, 1), f"{task} accepted, %", f"{runs[0].id_name} accepted, %", percent="xy")
    plot.line([(0, 0), (1, 1)], "line ideal")
    legend = []
    single = all(run.one_reading for run in runs)
    for i, run in enumerate(runs):
        for slots, suffix, kind, reading in _READINGS[:1] if single else _READINGS:
            one, other = ood_uncertainties(run.id_table, run.tables[task], run.score, slots)
            score = -np.nan_to_num(np.concatenate([one, other]).astype(np.float64), nan=np.inf, posinf=np.inf)
            ranks = np.unique(score, return_inverse=True)[1]
            false, true, _ = roc_curve(np.arange(len(score)) < len(one), ranks)
            plot.line(zip(false.tolist(), true.tolist(), strict=True), f"line c{i % 7}{kind}")
            key = f"ood/{task}/auroc{suffix}"
            pair = interval_text(run.intervals.get(key), "percent")
            value = number(run.results[key], "percent")
            name = ", ".join([*([run.name] if len(runs) > 1 else []), *([] if single else [reading])])
            text = f"{name}: AUROC {value}" if name else f"AUROC {value}"
            legend.append((f"c{i % 7}{kind}", text + (f" ({pair})" if pair else "")))
    caption = "Items are accepted in the order of their uncertainty, the least uncertain first."
    if not single:
        caption = (
            "Matched: both sides on the training letters. Published: each task on its own letters, which by itself "
            "raises the uncertainty of tasks with more options."
        )
    return Chart(f"ROC, {task}", plot.render(f"ROC curves of telling {task} apart"), caption, legend)


def risk_coverage(runs: list[RunData]) -> Chart | None:
    """Risk-coverage curves of the answers in distribution, ranked by aleatoric uncertainty."""
    curves = []
    for run in runs:
        rows, _, correct = answered(run.id_table)
        if len(correct):
            ranked = run.id_table.reading("own").aleatoric[rows]
            curves.append((run, *ranking_metrics.risk_curve(correct, ranked)))
    if not curves:
        return None
    top = max(float(risk.max()) for _, _, risk in curves) or 0.01
    plot = svg.Plot((0, 1), (0, min(1.0, 1.05 * top)), "coverage, %", "wrong answers, %", percent="xy")
    legend = []
    for i, (run, coverage, risk) in enumerate(curves):
        plot.line(zip(coverage.tolist(), risk.tolist(), strict=True), f"line c{i % 7}")
        pair = interval_text(run.intervals.get("id/aurc"), "plain")
        text = f"{run.name}: AURC {number(run.results['id/aurc'], 'plain')}" + (f" ({pair})" if pair else "")
        legend.append((f"c{i % 7}", text))
    caption = "Share of wrong answers if only the items of least aleatoric uncertainty are answered."
    return Chart("Risk and coverage", plot.render("Risk-coverage curves"), caption, legend)


def mixture(runs: list[RunData], task: str) -> Chart | None:
    """Risk-coverage curves of ID and OOD items together, by the runs' score and by density where there is one."""
    curves = []
    for run in runs:
        rows, correct = mixture_answers(run.id_table, run.tables[task])
        for name in dict.fromkeys((run.score, "density")):
            if len(rows) and all(has_score(table, name) for table in (run.id_table, run.tables[task])):
                ranked = np.concatenate(ood_uncertainties(run.id_table, run.tables[task], name))[rows]
                curves.append((run, name, *ranking_metrics.risk_curve(correct, ranked)))
    if not curves:
        return None
    top = max(float(risk.max()) for *_, risk in curves) or 0.01
    plot = svg.Plot((0, 1), (0, min(1.0, 1.05 * top)), "coverage, %", "wrong answers, %", percent="xy")
    legend = []
    for i, (run, name, coverage, risk) in enumerate(curves):
        plot.line(zip(coverage.tolist(), risk.tolist(), strict=True), f"line c{i % 7}")
        key = f"ood/{task}/mixture_aurc_{name}"
        pair = interval_text(run.intervals.get(key), "plain")
        words = ", ".join([*([run.name] if len(runs) > 1 else []), SCORES[name]])
        value = number(run.results.get(key), "plain")
        legend.append((f"c{i % 7}", f"{words}: AURC {value}" + (f" ({pair})" if pair else "")))
    caption = (
        f"{runs[0].id_name} and {task} asked together: share of wrong answers if only the least uncertain items are "
        "answered. OOD items are right or wrong by their labels, and wrong without one."
    )
    title = f"Risk and coverage, with {task}"
    return Chart(title, plot.render(f"Risk-coverage curves of {runs[0].id_name} and {task} together"), caption, legend)


def accuracy_by_quantile(run: RunData, task: str) -> Chart | None:
    """Accuracy per decile of epistemic uncertainty, from the least to the most uncertain items."""
    table = run.tables[task]
    rows, _, correct = answered(table)
    if len(correct) < _QUANTILES:
        return None
    order = np.argsort(table.reading("own").epistemic[rows], kind="stable")
    plot = svg.Plot((0, 1), (0, 1), "epistemic quantile, %", "accuracy, %", percent="xy")
    cells = []
    for i, part in enumerate(np.array_split(correct[order], _QUANTILES)):
        low, high = map(float, wilson(part.sum(), len(part)))
        left, right = i / _QUANTILES, (i + 1) / _QUANTILES
        place = f"{100 * left:.0f}–{100 * right:.0f} %"
        plot.bar(left, right, 0, part.mean(), "fill c0", f"quantile {place}: accuracy {100 * part.mean():.1f} %")
        plot.whisker((left + right) / 2, low, high)
        value = Cell(number(part.mean(), "percent"), interval_text((low, high), "percent"))
        cells.append(([place], [Cell(str(len(part))), value]))
    plot.line([(0, correct.mean()), (1, correct.mean())], "line ideal")
    caption = "From the least uncertain items (left) to the most uncertain: accuracy should fall to the right."
    numbers = Table(f"Accuracy by epistemic quantile, {task}", ["quantile"], ["items", "accuracy"], cells)
    legend = [("c0", "accuracy"), ("whisker", "95 % interval"), ("ideal", "all items")]
    label = f"Accuracy by epistemic quantile, {task}"
    return Chart(label, plot.render(label), caption, legend, numbers)
