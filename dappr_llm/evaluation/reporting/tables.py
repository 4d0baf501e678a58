"""The report's tables as data, and their Markdown, CSV and LaTeX forms; the HTML template renders the same data."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...core.csv_files import write_csv
from ...core.errors import UserError
from ...core.terminal import printable
from ..bootstrap import paired_bootstrap
from ..metric_columns import Column, answer_columns, columns, detection_columns, shift_columns
from .markdown import escape_text, markdown_table
from .run_data import RunData

# Metrics whose differences between two runs are tested: few, since every further test makes a false positive likelier.
_COMPARED = ("accuracy", "nll", "brier", "ece", "conf_auroc", "aurc")

_SHORT_NOTE = 100  # characters: what fits a line of a terminal


@dataclass(frozen=True)
class Cell:
    """A formatted value and its formatted interval."""

    text: str
    interval: str = ""


@dataclass(frozen=True)
class Table:
    """
    A table of the report.

    Args:
        caption (`str`): Its caption.
        headings (`list[str]`): Headers of the columns that name a row, such as `task` and `run`.
        columns (`list[str]`): Headers of the columns with values.
        rows (`list[tuple[list[str], list[Cell]]]`): Names and values of each row.
        note (`str`, *optional*): Text below the table.
    """

    caption: str
    headings: list[str]
    columns: list[str]
    rows: list[tuple[list[str], list[Cell]]]
    note: str = field(default="")


def number(value: float | None, kind: str, missing: str = "–") -> str:
    """Format a value as percent, plain (three decimals) or count; `missing` for `None` and NaN."""
    if value is None or math.isnan(value):
        return missing
    return _signed({"percent": f"{100 * value:.2f}", "plain": f"{value:.3f}", "count": f"{value:.0f}"}[kind])


def interval_text(pair: tuple[float, float] | None, kind: str) -> str:
    """Format an interval, with one decimal less than its value in percent; empty for `None` and NaN."""
    if pair is None or any(map(math.isnan, pair)):
        return ""
    low, high = (_signed(f"{100 * end:.1f}" if kind == "percent" else f"{end:.3f}") for end in pair)
    # A dash between negative numbers would look like another minus sign.
    return f"{low} to {high}" if "-" in low + high else f"{low}–{high}"


def _signed(text: str) -> str:
    return text.removeprefix("-") if float(text) == 0 else text  # no "-0.00"


def report_tables(runs: Sequence[RunData]) -> tuple[list[Table], list[Table]]:
    """The headline tables (ID metrics, OOD detection) and the others (OOD answers, differences, counts, ...)."""
    headline = [_answers(runs, "In distribution: " + _id_names(runs), answer_columns(True), _answers_note())]
    more = [_answers(runs, "Calibration and selective prediction", answer_columns(False), _MORE_NOTE)]
    if any(run.ood_tables for run in runs):
        one = all(run.one_reading for run in runs)
        note = f"Ranked by the {runs[0].score} score. {'' if one else _READINGS_NOTE}{_DETECTION_NOTE}"
        headline.append(_per_task(runs, "Out-of-distribution detection", detection_columns(True, one), note))
        if any(f"ood/{task}/accuracy" in run.results for run in runs for task in run.ood_tables):
            more = [_per_task(runs, "Answers under shift", shift_columns()), *more]
        matched = "" if one else "Matched reading, unless a column states another."
        more.append(_per_task(runs, "More detection metrics", detection_columns(False, one), matched))
    return headline, [*(_differences(runs) if len(runs) > 1 else ()), *more, _counts(runs)]


def _answers_note() -> str:
    *others, last = [column.header for column in answer_columns(True) if column.kind == "plain"]
    return (
        f"Percent, except {', '.join(others)} and {last}. ECE floor: what chance alone would show at this size. "
        "Intervals: 95 %, bootstrap over items."
    )


_MORE_NOTE = "Equal mass: 15 bins of equally many items. MCE: the largest gap of a bin, however few items it holds."
_READINGS_NOTE = (
    "Matched: both sides on the training letters. Published: each task on its own letters; never compare across the "
    "two. "
)
_DETECTION_NOTE = (
    "AUPR: in-distribution items positive. FPR95: share of the other task accepted when 95 % of the in-distribution "
    "items are."
)


def _id_names(runs: Sequence[RunData]) -> str:
    return " / ".join(dict.fromkeys(run.id_name for run in runs))


def _answers(runs: Sequence[RunData], caption: str, shown: list[Column], note: str) -> Table:
    rows = [([run.name], _cells(run, "id", shown)) for run in runs]
    return Table(caption, ["run"], [column.header for column in shown], rows, note)


def _per_task(runs: Sequence[RunData], caption: str, shown: list[Column], note: str = "") -> Table:
    several = len(runs) > 1  # with a single run, rows do not name it
    rows = [
        ([task, run.name] if several else [task], _cells(run, f"ood/{task}", shown))
        for task in _tasks(runs)
        for run in runs
        if task in run.ood_tables
    ]
    return Table(caption, ["task", "run"] if several else ["task"], [column.header for column in shown], rows, note)


def _counts(runs: Sequence[RunData]) -> Table:
    rows = []
    for run in runs:
        for task, table in run.tables.items():
            options, count = np.unique(table.num_options, return_counts=True)
            by_options = ", ".join(f"{k}: {n}" for k, n in zip(options, count, strict=True))
            bad = int(table.nan_rows.sum())
            cells = [str(len(table)), by_options, str(int((table.labels < 0).sum())), str(bad)]
            rows.append(([task, run.name] if len(runs) > 1 else [task], [Cell(text) for text in cells]))
    columns = ["items", "by number of options", "left out of answers: no label", "with NaN or Inf"]
    note = (
        "Detection uses every item, answers every labelled one; nothing else is left out. Items with NaN or Inf rank "
        "as most uncertain and count as wrong."
    )
    return Table("Items", ["task", "run"] if len(runs) > 1 else ["task"], columns, rows, note)


def _differences(runs: Sequence[RunData]) -> list[Table]:
    first, found = runs[0], []
    for run in runs[1:]:
        title = f"{run.name} minus {first.name}"
        try:
            one, other = ([(r.id_table, r.ood_tables)] for r in (first, run))
            pairs = paired_bootstrap(one, other, resamples=run.resamples or 200, score=run.score)
        except UserError as error:
            found.append(Table(title, ["metric"], ["difference"], [], f"Not compared. {error}"))
            continue
        names = [(f"id/{column.key}", column.header, column.kind) for column in columns(_COMPARED)]
        detection = columns(("auroc", "auroc_published"), first.one_reading and run.one_reading)
        for task in run.ood_tables:
            names += [(f"ood/{task}/{column.key}", f"{task}: {column.header}", column.kind) for column in detection]
        rows = []
        for key, label, kind in names:
            if key in pairs:
                pair = pairs[key]
                ends = interval_text((pair.low, pair.high), kind)
                p = "–" if math.isnan(pair.p_value) else f"{pair.p_value:.3f}"
                rows.append(([label], [Cell(number(pair.difference, kind), ends), Cell(p)]))
        note = "The same resampled items in both runs. p: two-sided, for no difference; not corrected for many rows."
        found.append(Table(f"{title}, same items", ["metric"], ["difference", "p"], rows, note))
    return found


def _tasks(runs: Sequence[RunData]) -> list[str]:
    return list(dict.fromkeys(task for run in runs for task in run.ood_tables))


def _cells(run: RunData, place: str, shown: list[Column]) -> list[Cell]:
    cells = []
    for column in shown:
        key, kind = f"{place}/{column.key}", column.kind
        cells.append(Cell(number(run.results.get(key), kind), interval_text(run.intervals.get(key), kind)))
    return cells


def to_markdown(tables: Sequence[Table]) -> str:
    """The tables as Markdown."""
    blocks = []
    for table in tables:
        rows = [[*names, *(_with_interval(cell, "({})") for cell in cells)] for names, cells in table.rows]
        align = "l" * len(table.headings) + "r" * len(table.columns)
        body = markdown_table([*table.headings, *table.columns], rows, align, escape_text)
        note = f"\n\n{escape_text(table.note)}" if table.note else ""
        blocks.append(f"### {escape_text(table.caption)}\n\n{body}{note}")
    return "\n\n".join(blocks) + "\n"


def to_text(table: Table) -> str:
    """The table for a terminal: aligned, each interval below its value, in ASCII but for names."""
    lines = [[*table.headings, *table.columns]]
    for names, cells in table.rows:
        lines.append([*(printable(name, one_line=True) for name in names), *(cell.text for cell in cells)])
        if any(cell.interval for cell in cells):
            lines.append(["  95 %", *[""] * (len(names) - 1), *(cell.interval for cell in cells)])
    left = len(table.headings)
    kept = [[*line[:left], *(cell.replace("–", "-") for cell in line[left:])] for line in lines]
    widths = [max(map(len, column)) for column in zip(*kept, strict=True)]
    padded = [
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in kept
    ]
    texts = [line.rstrip() for line in padded]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    note = [table.note] if table.note and len(table.note) <= _SHORT_NOTE else []
    return "\n".join([table.caption, texts[0], rule, *texts[1:], *note])


def _with_interval(cell: Cell, brackets: str) -> str:
    return f"{cell.text} {brackets.format(cell.interval)}" if cell.interval else cell.text


def to_latex(tables: Sequence[Table]) -> str:
    """The tables as LaTeX with booktabs rules; needs `\\usepackage{booktabs}`."""
    blocks = []
    for table in tables:
        layout = "l" * len(table.headings) + "r" * len(table.columns)
        lines = [[*table.headings, *table.columns]]
        lines += [[*names, *(_with_interval(cell, "[{}]") for cell in cells)] for names, cells in table.rows]
        shown = [" & ".join(escape_latex(cell) for cell in line) + r" \\" for line in lines]
        body = "\n".join([r"\toprule", shown[0], r"\midrule", *shown[1:], r"\bottomrule"])
        caption = escape_latex(table.caption)
        head = f"\\begin{{table}}\n\\centering\n\\caption{{{caption}}}\n\\begin{{tabular}}{{{layout}}}"
        blocks.append(f"{head}\n{body}\n\\end{{tabular}}\n\\end{{table}}")
    return "\n\n".join(blocks) + "\n"


_LATEX: Mapping[str, str] = {
    "\\": r"\textbackslash{}",
    "–": "--",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{mark: "\\" + mark for mark in "&%$#_{}"},
}


def escape_latex(text: str) -> str:
    """Escapes LaTeX, so that the text is shown literally, on one line."""
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))


def to_csv(runs: Sequence[RunData]) -> str:
    """Every metric of every run as CSV: run, key, value, low, high; fractions in full precision."""
    out = io.StringIO()
    rows = (
        [run.name, key, value, *run.intervals.get(key, ("", ""))] for run in runs for key, value in run.results.items()
    )
    write_csv(out, ["run", "key", "value", "low", "high"], rows)
    return out.getvalue()
