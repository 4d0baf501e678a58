"""The main metrics of a results file: plain text for the terminal, Markdown for model cards."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import Any

from ...core.terminal import printable
from ..evaluators import one_reading
from ..metric_columns import Column, columns
from ..ood_verdicts import against_trivial, not_matched
from ..per_class import ClassMetrics
from ..results import Intervals
from ..verdicts import verdicts
from .class_tables import classes_table, confused_table, worth_table
from .markdown import escape_text, markdown_table
from .ood_tables import mixture_table, referee_table
from .tables import Table, number, to_markdown, to_text

# The columns, limited to 120 characters per line.
_ID = ("accuracy", "nll", "ece", "brier", "conf_aupr", "n")
_ID_CLASSES = ("accuracy", "balanced_accuracy", "macro_f1", *_ID[1:])
# Classes in the printed table and in a card; results.json has all.
_PRINTED, _ALL_PRINTED, _IN_CARD = 6, 10, 20
_WIDTH = 100
_OOD = (
    *("auroc", "auroc_published", "auroc_max_prob", "aupr", "aupr_published"),
    *("accuracy", "nll", "ece", "n"),
)
_READINGS = "matched: both sides read on the training letters; published: each side on its own task's letters"


def render_results(
    results: dict[str, Any],
    title: str = "",
    intervals: Intervals | None = None,
    classes: ClassMetrics | None = None,
    meta: Mapping[str, Any] | None = None,
) -> str:
    """
    Results as a plain-text table for the terminal.

    Args:
        results (`dict`): From [`evaluate_tables`] or [`load_results`].
        title (`str`, *optional*, defaults to `""`): A line above the table.
        intervals (`dict`, *optional*): From [`bootstrap`]; shown below each row.
        classes ([`ClassMetrics`], *optional*): Metrics of each class, of which the weakest are shown.
        meta (`Mapping`, *optional*): Meta data of the results file.
    """
    said = [textwrap.fill(sentence, _WIDTH) for sentence in _verdicts(results, intervals, classes, meta)]
    blocks = ["\n".join([*([title] if title else []), *said])]
    for header, rows in _tables(results, intervals or {}, classes is not None):
        blocks.append(_plain(header, rows))
    printed = len(classes) if classes is not None and len(classes) <= _ALL_PRINTED else _PRINTED
    blocks += [to_text(table) for table in _more_tables(results, intervals, classes, meta, printed, narrow=True)]
    blocks += [textwrap.fill(sentence, _WIDTH) for sentence in not_matched(results)]
    options = _options(results)
    if options:
        blocks.append("items by number of options: " + "; ".join(f"{name} {text}" for name, text in options.items()))
    floor = results.get("id/ece_floor")
    if floor is not None and not math.isnan(floor):
        blocks.append(f"ECE floor in distribution (what chance alone would show at this size): {100 * floor:.2f}")
    legend = _legend(results) + ("\n95 %: bootstrap interval over test items" if intervals else "")
    return "\n\n".join([*(block for block in blocks if block), legend]) + "\n"


def render_answers(metrics: dict[str, Any], name: str) -> str:
    """
    The answers' table of [`render_results`] alone, for one set of rows, such as those of an evaluation in training.

    Args:
        metrics (`dict`): From [`evaluate_id`].
        name (`str`): Name of the row.
    """
    ((header, rows),) = _tables({f"id/{key}": value for key, value in metrics.items() if "/" not in key})
    rows[0][0] = printable(name, one_line=True)
    return _plain(header, rows)


def render_markdown(
    results: dict[str, Any],
    intervals: Intervals | None = None,
    classes: ClassMetrics | None = None,
    meta: Mapping[str, Any] | None = None,
) -> str:
    """
    Results as Markdown tables, for model cards.

    The arguments are those of [`render_results`].
    """
    blocks = [escape_text(sentence) for sentence in _verdicts(results, intervals, classes, meta)]
    for header, rows in _tables(results, intervals, classes is not None):
        blocks.append(markdown_table([" ".join(filter(None, pair)) for pair in zip(*header, strict=True)], rows))
    blocks.append(_legend(results))
    if more := _more_tables(results, intervals, classes, meta, _IN_CARD):
        blocks.append(to_markdown(more).strip())
    return "\n\n".join(blocks) + "\n"


def _verdicts(
    results: Mapping[str, Any],
    intervals: Intervals | None,
    classes: ClassMetrics | None,
    meta: Mapping[str, Any] | None,
) -> list[str]:
    facts = meta or {}
    found = verdicts(results, intervals or {}, classes is not None, str(facts.get("modality") or "text"))
    beaten = against_trivial(results, intervals or {}, str(facts.get("score") or "epistemic"))
    return [*found, *([beaten] if beaten else ())]


def _more_tables(
    results: Mapping[str, Any],
    intervals: Intervals | None,
    classes: ClassMetrics | None,
    meta: Mapping[str, Any] | None,
    most: int,
    narrow: bool = False,
) -> list[Table]:
    """The OOD referee and the mixture; baselines; the weakest classes and the pairs that are confused most often."""
    score = str((meta or {}).get("score") or "epistemic")
    ood = [table(results, intervals, score, narrow=narrow) for table in (referee_table, mixture_table)]
    shown = ("accuracy", "balanced_accuracy", "macro_f1", "nll") if classes else ("accuracy", "nll", "ece")
    found = [*ood, worth_table(results, intervals or {}, (meta or {}).get("baselines"), shown=shown)]
    if classes is not None:
        found += [
            classes_table(classes, most, narrow=narrow),
            confused_table(classes, max(3, most // 2), narrow=narrow),
        ]
    return [table for table in found if table is not None]


def _legend(results: dict[str, Any]) -> str:
    plain = f"{', '.join(column.header for column in columns(_ID) if column.kind == 'plain')} not in %"
    return plain if one_reading(results) else f"{_READINGS}; {plain}"


def _tables(
    results: dict[str, Any], intervals: Intervals | None = None, classes: bool = False
) -> list[tuple[tuple[list[str], list[str]], list[list[str]]]]:
    """Two header lines and rows of cells, for an ID and an OOD table; tables without results are left out."""
    rows: dict[str, dict[str, Any]] = {}
    for key, value in results.items():
        group, _, rest = key.partition("/")
        if group in ("id", "ood") and "options/" not in rest:
            task, _, name = rest.rpartition("/")
            rows.setdefault("" if group == "id" else task, {})[name] = value
    found = []
    for heading, shown, names in (
        ("", columns(_ID_CLASSES if classes else _ID), [name for name in rows if not name]),
        ("OOD task", columns(_OOD, one_reading(results)), [name for name in rows if name]),
    ):
        if names:
            lines = [_header(column) for column in shown]
            header = (["", *(first for first, _ in lines)], [heading, *(second for _, second in lines)])
            cells = []
            for name in names:
                shown_name = printable(name, one_line=True) or "ID"
                cells.append([shown_name, *(number(rows[name].get(c.key), c.kind, missing="-") for c in shown)])
                if intervals:
                    place = f"ood/{name}" if name else "id"
                    cells.append(["  95 %", *(_interval(intervals.get(f"{place}/{c.key}"), c.kind) for c in shown)])
            found.append((header, cells))
    return found


def _plain(header: tuple[list[str], list[str]], rows: list[list[str]]) -> str:
    """A table of two header lines and rows of cells as aligned text."""
    lines = [[" ".join(name.split()) for name in header[0]], header[1], *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header[1]))]
    texts = ["  ".join(_pad(line, widths)).rstrip() for line in lines]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([*(text for text in texts[:2] if text), rule, *texts[2:]])


def _header(column: Column) -> tuple[str, str]:
    """The two lines of a column header."""
    return (column.metric.header, column.reading) if column.reading else ("", column.header)


def _options(results: dict[str, Any]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for key, value in results.items():
        where, separator, option = key.rpartition("/options/")
        if separator:
            found.setdefault(where.removeprefix("ood/"), []).append(f"{option}: {value}")
    return {name: ", ".join(texts) for name, texts in found.items()}


def _interval(pair: tuple[float, float] | None, kind: str) -> str:
    if pair is None or any(map(math.isnan, pair)):
        return ""
    return "-".join(f"{100 * end:.1f}" if kind == "percent" else f"{end:.2f}" for end in pair)


def _pad(cells: list[str], widths: list[int]) -> list[str]:
    return [cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]
