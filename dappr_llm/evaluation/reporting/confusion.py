"""
The confusion matrix as a picture, readable for 150 classes: inline SVG for the report, PNG for the run's folder.

Each row is scaled to the rows of its class. Right answers and errors have different colours, and the square root of
the share is drawn, so that a single error among a hundred rows is still visible. Beyond a dozen classes, those that
are confused with each other are placed side by side; errors then form blocks.
"""

from __future__ import annotations

from html import escape

import numpy as np

from ...core.files import PathLike
from ..per_class import ClassMetrics
from .charts import Chart
from .figures import COLOURS, new_figure, save_figure
from .svg import short

MOST_CLASSES = 150
_KEEP_ORDER = 12  # classes; up to here their own order (1 to 5 stars) says more


def shown_classes(classes: ClassMetrics) -> np.ndarray:
    """Indices of the classes to draw, in their order: all, or the 150 with the most errors."""
    kept = np.arange(len(classes))
    if len(classes) > MOST_CLASSES:
        right = classes.confusion.diagonal()
        errors = classes.support + classes.predicted - 2 * right
        kept = np.sort(np.argsort(-errors, kind="stable")[:MOST_CLASSES])
    if len(kept) <= _KEEP_ORDER:
        return kept
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    shares = _shares(classes)[np.ix_(kept, kept)]
    near = shares + shares.T
    np.fill_diagonal(near, 0)
    if not near.any():
        return kept
    distance = 1 - near / near.max()
    np.fill_diagonal(distance, 0)
    return kept[leaves_list(linkage(squareform(distance, checks=False), "average"))]


def _shares(classes: ClassMetrics) -> np.ndarray:
    """The confusion matrix `[K, K]`, each row divided by the rows of its class."""
    return classes.confusion[:, :-1] / np.maximum(classes.support, 1)[:, None]


def _caption(classes: ClassMetrics, shown: np.ndarray) -> str:
    text = "Each row is scaled to the rows of its true class; colour: square root of the share."
    if len(shown) > _KEEP_ORDER:
        text += " Classes that are confused with each other stand side by side."
    if len(shown) < len(classes):
        text += f" The {len(shown)} of {len(classes)} classes with the most errors; confusion.csv holds all."
    return text


def confusion_chart(classes: ClassMetrics, name: str = "") -> Chart:
    """
    The confusion matrix as inline SVG; cells tell their numbers when pointed at.

    Args:
        classes ([`ClassMetrics`]): The metrics.
        name (`str`, *optional*): The run or task, for the heading.
    """
    shown, shares = shown_classes(classes), _shares(classes)
    size = len(shown)
    cell = 34 if size <= 12 else 17 if size <= 40 else 9
    kind = "large" if size <= 12 else "middle" if size <= 40 else "small"
    labels = [short(classes.names[k]) for k in shown]
    letter = {"large": 6.2, "middle": 5.6, "small": 4.4}[kind]
    margin = 26 + letter * max(map(len, labels))
    parts = []
    for i, true in enumerate(shown):
        y = margin + i * cell
        parts.append(f'<rect class="row" x="{margin:.0f}" y="{y:.0f}" width="{size * cell}" height="{cell - 1}"/>')
        for j, given in enumerate(shown):
            count = int(classes.confusion[true, given])
            if not count:
                continue
            colour, share = "c0" if true == given else "c1", float(shares[true, given])
            x = margin + j * cell
            tip = f"{classes.names[true]} → {classes.names[given]}: {count} ({100 * share:.1f} %)"
            parts.append(
                f'<rect class="cell {colour}" x="{x:.0f}" y="{y:.0f}" width="{cell - 1}" height="{cell - 1}" '
                f'fill-opacity="{max(0.15, share**0.5):.2f}"><title>{escape(tip)}</title></rect>'
            )
            if size <= 12:
                middle = f'x="{x + cell / 2:.1f}" y="{y + cell / 2 + 4:.1f}"'
                on = "count on" if share > 0.4 else "count"
                parts.append(f'<text class="{on}" {middle} text-anchor="middle">{count}</text>')
    parts += _axes(labels, margin, cell, kind)
    side = margin + size * cell + 4
    heading = f"Confusion matrix of {size} classes"
    drawn = (
        f'<svg class="matrix" width="{side:.0f}" height="{side:.0f}" viewBox="0 0 {side:.0f} {side:.0f}" role="img" '
        f'aria-label="{heading}">{"".join(parts)}</svg>'
    )
    legend = [("c0", "right (row: true class, column: predicted)"), ("c1", "confused")]
    title = f"Confusion matrix, {name}" if name else "Confusion matrix"
    return Chart(title, drawn, _caption(classes, shown), legend, kind="wide")


def _axes(labels: list[str], margin: float, cell: int, kind: str) -> list[str]:
    parts = []
    for i, label in enumerate(labels):
        at = margin + (i + 0.5) * cell
        turned = f'transform="translate({at + 3:.1f} {margin - 6:.1f}) rotate(-90)"'
        parts.append(
            f'<text class="{kind}" x="{margin - 6:.1f}" y="{at + 3:.1f}" text-anchor="end">{escape(label)}</text>'
        )
        parts.append(f'<text class="{kind}" {turned}>{escape(label)}</text>')
    return parts


def plot_confusion(classes: ClassMetrics, path: PathLike) -> None:
    """
    Draw the confusion matrix as PNG.

    Args:
        classes ([`ClassMetrics`]): The metrics.
        path (`str` or `os.PathLike`): The file to write.
    """
    shown, shares = shown_classes(classes), _shares(classes)
    size = len(shown)
    cell = 0.42 if size <= 12 else 0.2 if size <= 40 else 0.105  # inches
    points = 8.0 if size <= 12 else 7.0 if size <= 40 else 5.5
    figure = new_figure(size * cell + 1.6, size * cell + 1.6)
    axes = figure.subplots()
    axes.set_aspect("equal")
    picture = np.ones((size, size, 3))
    inside = np.sqrt(shares[np.ix_(shown, shown)])[..., None]
    blue, orange = (np.array([int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)]) for c in COLOURS[:2])
    colour = np.where(np.eye(size, dtype=bool)[..., None], blue, orange)
    picture += np.where(inside > 0, np.maximum(inside, 0.15), 0) * (colour - 1)
    axes.imshow(picture, interpolation="nearest")
    if size <= 12:
        for i, true in enumerate(shown):
            for j, given in enumerate(shown):
                if count := int(classes.confusion[true, given]):
                    dark = "white" if shares[true, given] > 0.4 else "black"
                    axes.text(j, i, str(count), ha="center", va="center", fontsize=8, color=dark)
    labels = [short(classes.names[k]).replace("$", r"\$") for k in shown]
    axes.set_xticks(range(size), labels, rotation=90)
    axes.set_yticks(range(size), labels)
    axes.set_xticks(np.arange(size + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(size + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="#e6e9ec", linewidth=0.4)
    axes.tick_params(which="minor", length=0)
    some = f" ({size} of {len(classes)}, those with the most errors)" if size < len(classes) else ""
    axes.set(xlabel="predicted class", ylabel=f"true class{some}")
    save_figure(figure, path, tick_size=points)
