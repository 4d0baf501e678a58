"""Results as text, Markdown and figures. Percent appears only here; files and dictionaries hold fractions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import UserError
from ...core.files import PathLike, atomic_write
from .. import metrics
from ..evaluators import num_letters, one_reading
from ..prediction_table import PredictionTable
from ..results import Intervals, load_results, save_results

__all__ = ["load_results", "plot_alpha0", "plot_reliability", "render_markdown", "render_results", "save_results"]

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which stays distinct for colour-blind readers; line styles repeat the distinction in print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", "-.", ":")
# Beyond this ratio of largest to smallest value, a linear axis squeezes most items into one bin.
_LOG_SPREAD = 20

# (first and second line of the header, key, how it is shown)
_ID_COLUMNS = (
    (("", "accuracy"), "accuracy", "percent"),
    (("", "NLL"), "nll", "plain"),
    (("", "ECE"), "ece", "percent"),
    (("", "Brier"), "brier", "plain"),
    (("", "conf. AUPR"), "conf_aupr", "percent"),
    (("", "n"), "n", "count"),
)
_OOD_COLUMNS = (
    (("AUROC", "matched"), "auroc", "percent"),
    (("AUROC", "published"), "auroc_published", "percent"),
    (("AUROC", "max prob"), "auroc_max_prob", "percent"),
    (("AUPR", "matched"), "aupr", "percent"),
    (("AUPR", "published"), "aupr_published", "percent"),
    (("", "accuracy"), "accuracy", "percent"),
    (("", "NLL"), "nll", "plain"),
    (("", "ECE"), "ece", "percent"),
    (("", "n"), "n", "count"),
)
_LEGEND = "NLL, Brier not in %"
_READINGS = "matched: both sides read on the training letters; published: each side on its own task's letters"


def render_results(results: dict[str, Any], title: str = "", intervals: Intervals | None = None) -> str:
    """
    Results as a plain-text table for the terminal.

    Args:
        results (`dict`): What [`evaluate_tables`] returned or [`load_results`] read.
        title (`str`, *optional*, defaults to `""`): A line above the table.
        intervals (`dict`, *optional*): What [`bootstrap`] returned; shown below each row.
    """
    blocks = [title] if title else []
    for header, rows in _tables(results, intervals or {}):
        lines = [[" ".join(name.split()) for name in header[0]], header[1], *rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(header[1]))]
        texts = ["  ".join(_pad(line, widths)).rstrip() for line in lines]
        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        blocks.append("\n".join([*(text for text in texts[:2] if text), rule, *texts[2:]]))
    options = _options(results)
    if options:
        blocks.append("items by number of options: " + "; ".join(f"{name} {text}" for name, text in options.items()))
    floor = results.get("id/ece_floor")
    if floor is not None and not math.isnan(floor):
        blocks.append(f"ECE floor in distribution (what chance alone would show at this size): {100 * floor:.2f}")
    legend = _legend(results) + ("\n95 %: bootstrap interval over test items" if intervals else "")
    return "\n\n".join([*blocks, legend]) + "\n"


def render_markdown(results: dict[str, Any], intervals: Intervals | None = None) -> str:
    """Results as Markdown tables, for model cards; the arguments are those of [`render_results`]."""
    blocks = []
    for header, rows in _tables(results, intervals):
        names = [" ".join(filter(None, pair)) for pair in zip(*header, strict=True)]
        rule = ["---", *["---:"] * (len(names) - 1)]
        lines = [[cell.replace("|", "\\|") for cell in line] for line in (names, rule, *rows)]
        blocks.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join([*blocks, _legend(results)]) + "\n"


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
    confidence, correct = probs.max(axis=1), metrics.is_correct(probs, table.labels[known])
    count, mean_confidence, accuracy = metrics.reliability_bins(confidence, correct)
    edges = np.linspace(0, 1, len(count) + 1)

    figure = _figure(4.2, 4.9)
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3.2, 1], "hspace": 0.1})
    _draw_calibration(top, edges, count, mean_confidence, accuracy)
    title = f"ECE {100 * metrics.ece(confidence, correct):.2f} %,  n = {len(confidence)}"
    name = " · ".join(str(table.meta[key]) for key in ("method", "task") if table.meta.get(key))
    top.set_title(f"{name}\n{title}" if name else title, fontsize=10, pad=20)
    bottom.bar(edges[:-1], count, np.diff(edges), align="edge", color="#999999", edgecolor="white", linewidth=0.8)
    for value, label, style in ((confidence.mean(), "mean confidence", "--"), (correct.mean(), "accuracy", "-")):
        bottom.axvline(value, color="black", linestyle=style, linewidth=1, label=f"{label} {100 * value:.1f} %")
    bottom.legend(fontsize=7, frameon=False, loc="best")
    bottom.set(xlabel="confidence", ylabel="items", xlim=(0, 1))
    _save(figure, path)


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

    figure = _figure(5.2, 3.6)
    axes = figure.subplots()
    _draw_histograms(axes, values)
    unit = "classes" if id_table.meta.get("modality") == "vision" else "letters"
    label = f"{'total evidence α₀' if evidence else 'epistemic uncertainty'}, read on {letters} {unit}"
    if not evidence:
        label += "\n(drawn instead of α₀, which not every table has)"
    axes.set(xlabel=label, ylabel="share of items")
    _save(figure, path)


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
        facecolor=_COLOURS[1] + "30",
        edgecolor=_COLOURS[1],
        hatch="////",
        linewidth=0.8,
        label="gap to confidence",
    )
    # Drawn last: in bins of few items only this line tells the bar's top from the gap's.
    axes.hlines(accuracy, left, left + width, color=_COLOURS[0], linewidth=2)
    axes.plot([0, 1], [0, 1], linestyle="--", color="#333333", linewidth=1, label="perfect calibration")
    axes.set(ylabel="accuracy", ylim=(0, 1.01))
    _legend_above(axes, ncols=3)


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
        colour, style = _COLOURS[number % len(_COLOURS)], _STYLES[number % len(_STYLES)]
        # Rounding may put the largest value a hair beyond the last edge.
        share = np.histogram(value.clip(edges[0], edges[-1]), edges)[0] / len(value)
        median = float(np.median(value))
        if number == 0:
            axes.stairs(share, edges, fill=True, color=colour, alpha=0.25)
        label = f"{name}: median {median:.3g}, n = {len(value)}"
        axes.stairs(share, edges, color=colour, linestyle=style, linewidth=1.6, label=label)
        axes.axvline(median, color=colour, linestyle=style, linewidth=1, alpha=0.8)
    axes.set_ylim(bottom=0)
    _legend_above(axes, ncols=2)


def _legend_above(axes: Axes, ncols: int) -> None:
    # Inside the axes it would hide data, whatever corner it takes.
    place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "borderaxespad": 0.2}
    axes.legend(**place, ncols=ncols, fontsize=8, frameon=False, columnspacing=1.2, handlelength=2)


def _ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [digit * 10.0**decade for decade in decades for digit in (2, 5)]


def _figure(width: float, height: float) -> Figure:
    # `Figure` itself draws with Agg; pyplot would choose a backend for the whole process.
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("Figures need matplotlib: pip install 'dappr-llm[report]'.") from error
    return Figure(figsize=(width, height))


def _save(figure: Figure, path: PathLike) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(which="both", labelsize=8)
        axes.xaxis.label.set_fontsize(9)
        axes.yaxis.label.set_fontsize(9)
    with atomic_write(path) as handle:
        figure.savefig(handle, format="png", dpi=200, bbox_inches="tight")


def _ood_columns(results: dict[str, Any]) -> tuple[tuple[tuple[str, str], str, str], ...]:
    """The columns of both readings, or, where these coincide, of the one."""
    if not one_reading(results):
        return _OOD_COLUMNS
    return tuple(
        (("", lines[0]) if lines[1] == "matched" else lines, key, kind)
        for lines, key, kind in _OOD_COLUMNS
        if not key.endswith("_published")
    )


def _legend(results: dict[str, Any]) -> str:
    return _LEGEND if one_reading(results) else f"{_READINGS}; {_LEGEND}"


def _tables(
    results: dict[str, Any], intervals: Intervals | None = None
) -> list[tuple[tuple[list[str], list[str]], list[list[str]]]]:
    """Header lines and rows of cells: one table for ID, one for OOD, as far as there are results."""
    rows: dict[str, dict[str, Any]] = {}
    for key, value in results.items():
        group, _, rest = key.partition("/")
        if "options/" not in rest:
            task, _, name = rest.rpartition("/")
            rows.setdefault("" if group == "id" else task, {})[name] = value
    found = []
    for heading, columns, names in (
        ("", _ID_COLUMNS, [name for name in rows if not name]),
        ("OOD task", _ood_columns(results), [name for name in rows if name]),
    ):
        if names:
            header = (["", *(lines[0] for lines, _, _ in columns)], [heading, *(lines[1] for lines, _, _ in columns)])
            cells = []
            for name in names:
                cells.append([name or "ID", *(_cell(rows[name].get(key), kind) for _, key, kind in columns)])
                if intervals:
                    place = f"ood/{name}" if name else "id"
                    pairs = [(intervals.get(f"{place}/{key}"), kind) for _, key, kind in columns]
                    cells.append(["  95 %", *(_interval(pair, kind) for pair, kind in pairs)])
            found.append((header, cells))
    return found


def _options(results: dict[str, Any]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for key, value in results.items():
        where, separator, option = key.rpartition("/options/")
        if separator:
            found.setdefault(where.removeprefix("ood/"), []).append(f"{option}: {value}")
    return {name: ", ".join(texts) for name, texts in found.items()}


def _cell(value: float | None, kind: str) -> str:
    if value is None or math.isnan(value):
        return "-"
    return {"percent": f"{100 * value:.2f}", "plain": f"{value:.3f}", "count": f"{value:.0f}"}[kind]


def _interval(pair: tuple[float, float] | None, kind: str) -> str:
    if pair is None or any(map(math.isnan, pair)):
        return ""
    return "-".join(f"{100 * end:.1f}" if kind == "percent" else f"{end:.2f}" for end in pair)


def _pad(cells: list[str], widths: list[int]) -> list[str]:
    return [cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]
