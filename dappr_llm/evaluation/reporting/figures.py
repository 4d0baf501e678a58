"""Matplotlib figures of prediction tables, and the style that the paper's figures share with them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import UserError
from ...core.files import PathLike, atomic_write
from .. import calibration_metrics, classification_metrics
from ..evaluators import num_letters
from ..prediction_table import PredictionTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which stays distinct for colour-blind readers; line styles repeat the distinction in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
# Beyond this ratio of largest to smallest value, a linear axis squeezes most items into one bin.
_LOG_SPREAD = 20


def plot_reliability(table: PredictionTable, path: PathLike) -> None:
    """
    Draws a reliability diagram (PNG) over the 15 bins of the ECE, each item read on its own options.

    Args:
        table ([`PredictionTable`]): Predictions; rows of unknown label are left out.
        path (`str` or `os.PathLike`): The PNG file to write.
    """
    known = (table.labels >= 0) & ~table.nan_rows
    if not known.any():
        raise UserError("A reliability diagram needs items of known label, but the table has none.")
    probs = table.reading("own").probs[known]
    confidence, correct = probs.max(axis=1), classification_metrics.is_correct(probs, table.labels[known])
    count, mean_confidence, accuracy = calibration_metrics.reliability_bins(confidence, correct)
    edges = np.linspace(0, 1, len(count) + 1)

    figure = new_figure(4.2, 4.9)
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3.2, 1], "hspace": 0.1})
    _draw_calibration(top, edges, count, mean_confidence, accuracy)
    title = f"ECE {100 * calibration_metrics.ece(confidence, correct):.2f} %,  n = {len(confidence)}"
    name = " · ".join(str(table.meta[key]) for key in ("method", "task") if table.meta.get(key))
    top.set_title(f"{name}\n{title}" if name else title, fontsize=10, pad=20)
    bottom.bar(edges[:-1], count, np.diff(edges), align="edge", color="#999999", edgecolor="white", linewidth=0.8)
    for value, label, style in ((confidence.mean(), "mean confidence", "--"), (correct.mean(), "accuracy", "-")):
        bottom.axvline(value, color="black", linestyle=style, linewidth=1, label=f"{label} {100 * value:.1f} %")
    bottom.legend(fontsize=7, frameon=False, loc="best")
    bottom.set(xlabel="confidence", ylabel="items", xlim=(0, 1))
    save_figure(figure, path)


def plot_alpha0(id_table: PredictionTable, ood_tables: dict[str, PredictionTable], path: PathLike) -> None:
    """
    Draws histograms (PNG) of the total evidence alpha0, in distribution against each other task.

    Every item is read on the training letters. Where a table has no alpha, the epistemic score is drawn instead.

    Args:
        id_table ([`PredictionTable`]): Predictions for the task the model was trained on.
        ood_tables (`dict[str, PredictionTable]`): Predictions for the other tasks, by name.
        path (`str` or `os.PathLike`): The PNG file to write.
    """
    letters = num_letters(id_table, "num_choices")
    readings = {f"{id_table.meta.get('task', 'in distribution')} (ID)": id_table.reading(letters)}
    readings |= {task: table.reading(letters) for task, table in ood_tables.items()}
    evidence = all(reading.alpha is not None for reading in readings.values())
    values = {}
    for name, reading in readings.items():
        value = reading.alpha.sum(axis=1) if evidence and reading.alpha is not None else reading.epistemic
        values[name] = value[np.isfinite(value)].astype(np.float64)
        if not len(values[name]):
            raise UserError(f"There is nothing to draw for {name}: it has no item with a finite score.")

    figure = new_figure(5.2, 3.6)
    axes = figure.subplots()
    _draw_histograms(axes, values)
    unit = "classes" if id_table.meta.get("modality") == "vision" else "letters"
    label = f"{'total evidence α₀' if evidence else 'epistemic uncertainty'}, read on {letters} {unit}"
    if not evidence:
        label += "\n(drawn instead of α₀, which not every table has)"
    axes.set(xlabel=label, ylabel="share of items")
    save_figure(figure, path)


def _draw_calibration(
    axes: Axes, edges: np.ndarray, count: np.ndarray, confidence: np.ndarray, accuracy: np.ndarray
) -> None:
    full = count > 0
    left, width = edges[:-1][full], np.diff(edges)[full]
    confidence, accuracy = confidence[full], accuracy[full]
    axes.bar(left, accuracy, width, align="edge", color="#9CC9E3", edgecolor="white", linewidth=0.8, label="accuracy")
    axes.bar(
        left,
        confidence - accuracy,
        width,
        bottom=accuracy,
        align="edge",
        facecolor=COLOURS[1] + "30",
        edgecolor=COLOURS[1],
        hatch="////",
        linewidth=0.8,
        label="gap to confidence",
    )
    # Drawn last: where the gap is small, this line still shows the top of the accuracy bar.
    axes.hlines(accuracy, left, left + width, color=COLOURS[0], linewidth=2)
    axes.plot([0, 1], [0, 1], linestyle="--", color="#333333", linewidth=1, label="perfect calibration")
    axes.set(ylabel="accuracy", ylim=(0, 1.01))
    legend_above(axes, ncols=3)


def _draw_histograms(axes: Axes, values: dict[str, np.ndarray]) -> None:
    everything = np.concatenate(list(values.values()))
    low, high = everything.min(), everything.max()
    if low > 0 and high / low > _LOG_SPREAD:
        edges = np.geomspace(low, high, 33)
        axes.set_xscale("log")
        if high / low < 1000:
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_xticks([t for t in _ticks(low, high) if low <= t <= high], minor=True)
            axes.xaxis.set_minor_formatter("{x:g}")
    else:
        # A constant score still needs bins of some width.
        edges = np.linspace(low, high, 33) if high > low else np.linspace(low - 0.5, high + 0.5, 33)
    for number, (name, value) in enumerate(values.items()):
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)]
        # Rounding may put the largest value slightly beyond the last edge.
        share = np.histogram(value.clip(edges[0], edges[-1]), edges)[0] / len(value)
        median = float(np.median(value))
        if number == 0:
            axes.stairs(share, edges, fill=True, color=colour, alpha=0.25)
        label = f"{name}: median {median:.3g}, n = {len(value)}"
        axes.stairs(share, edges, color=colour, linestyle=style, linewidth=1.6, label=label)
        axes.axvline(median, color=colour, linestyle=style, linewidth=1, alpha=0.8)
    axes.set_ylim(bottom=0)
    legend_above(axes, ncols=2)


def legend_above(axes: Axes, ncols: int) -> None:
    """A legend above the axes; inside, it would hide data in any corner."""
    place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "borderaxespad": 0.2}
    axes.legend(**place, ncols=ncols, fontsize=8, frameon=False, columnspacing=1.2, handlelength=2)


def _ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [digit * 10.0**decade for decade in decades for digit in (2, 5)]


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of the given size in inches; `UserError` if matplotlib is missing."""
    # `Figure` renders with Agg by itself; pyplot would select a backend for the whole process.
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("Figures need matplotlib: pip install 'dappr-llm[report]'.") from error
    return Figure(figsize=(width, height))


def save_figure(figure: Figure, path: PathLike, tick_size: float = 8) -> None:
    """Apply the common style and write the figure as PNG, atomically; `tick_size` in points."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(which="both", labelsize=tick_size)
        axes.xaxis.label.set_fontsize(9)
        axes.yaxis.label.set_fontsize(9)
    with atomic_write(path) as handle:
        figure.savefig(handle, format="png", dpi=200, bbox_inches="tight")
