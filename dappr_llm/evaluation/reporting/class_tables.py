"""Tables about classes and baselines, for the report, the terminal and model cards alike."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.csv_files import write_csv
from ..baseline_results import COMPARED, DIFFERENCE, OWN, title
from ..metric_columns import columns
from ..per_class import ESTIMATED, ClassMetrics
from ..results import Intervals
from ..verdicts import baseline_names
from .run_data import RunData
from .svg import short
from .tables import Cell, Table, interval_text, number

_SHOWN = ("accuracy", "balanced_accuracy", "macro_f1", "nll", "ece")
_WIDE = ("mean p", "share", "ECE")
_CLASSES_NOTE = (
    "Percent; intervals: 95 %, Wilson. Confidence: mean over the rows that were given the class, to compare with its "
    "precision; *: outside that interval. Mean p: the class's mean probability over all rows, to compare with its "
    "share of them. ECE: of the class's own probability. –: undefined, since the class does not occur or is never "
    "predicted."
)
_LARGEST_MATRIX = 20  # classes; beyond it a table of numbers is wider than a page


def worth_table(
    results: Mapping[str, Any],
    intervals: Intervals,
    facts: Mapping[str, Mapping[str, Any]] | None = None,
    run: str = "this run",
    shown: Sequence[str] = _SHOWN,
) -> Table | None:
    """
    The run and its baselines side by side; `None` without baselines.

    Args:
        results, intervals (`Mapping`): Of a results file, by key.
        facts (`Mapping`, *optional*): `meta["baselines"]` of the results file.
        run (`str`, *optional*, defaults to `"this run"`): Name of the run's row.
        shown (`Sequence[str]`, *optional*): Keys of the metrics.
    """
    names, facts = baseline_names(results), facts or {}
    if not names:
        return None
    kept = [column for column in columns(shown) if column.key in {metric.key for metric in COMPARED}]

    def cells(place: str) -> list[Cell]:
        keys = [(f"{place}/{column.key}", column.kind) for column in kept]
        return [Cell(number(results.get(k), kind), interval_text(intervals.get(k), kind)) for k, kind in keys]

    rows = [([run], [*cells("id"), Cell("")])]
    for name in names:
        key = f"{DIFFERENCE}/{name}/accuracy"
        gain = Cell(number(results.get(key), "percent"), interval_text(intervals.get(key), "percent"))
        rows.append(([title(name) + _fitted_on(facts.get(name, {}))], [*cells(f"{OWN}/{name}"), gain]))
    note = "Same test rows; baselines see training rows only. The difference is paired: this run minus the baseline."
    headers = [*(column.header for column in kept), "accuracy gained"]
    return Table("Was fine-tuning worth it?", ["on the same rows"], headers, rows, note)


def _fitted_on(facts: Mapping[str, Any]) -> str:
    rows, of = facts.get("rows"), facts.get("of")
    return f" (on {rows:,} of {of:,} rows)" if isinstance(rows, int) and isinstance(of, int) and rows < of else ""


def classes_table(classes: ClassMetrics, most: int | None = None, run: str = "", narrow: bool = False) -> Table:
    """
    Precision, recall, F1 and calibration of each class, the lowest F1 first.

    Args:
        classes ([`ClassMetrics`]): The metrics.
        most (`int`, *optional*): Show only this many classes.
        run (`str`, *optional*): The run's name, where the table must say it.
        narrow (`bool`, *optional*, defaults to `False`): For a terminal: shorter names, fewer columns.
    """
    order = classes.worst_first()[:most]
    rows = []
    for k in order:
        cells = [Cell(str(classes.support[k])), Cell(str(classes.predicted[k]))]
        for value in ESTIMATED:
            low, high = classes.intervals[value][k]
            cells.append(Cell(number(getattr(classes, value)[k], "percent"), interval_text((low, high), "percent")))
        mark = "*" if classes.miscalibrated[k] else ""
        cells.append(Cell(number(classes.confidence[k], "percent") + mark))
        if not narrow:
            cells += [Cell(number(value[k], "percent")) for value in (classes.mean_prob, classes.share, classes.ece)]
        rows.append(([short(classes.names[k]) if narrow else classes.names[k]], cells))
    headers = ["rows", "predicted", "precision", "recall", "F1", "confidence", *_WIDE[: 0 if narrow else 3]]
    some = f", the {len(order)} of {len(classes)} with the lowest F1" if len(order) < len(classes) else ""
    note = "*: the mean confidence lies outside the interval of the precision" if narrow else _CLASSES_NOTE
    return Table(f"Classes{some}{f' ({run})' if run else ''}", ["class"], headers, rows, note)


def confused_table(classes: ClassMetrics, most: int = 15, run: str = "", narrow: bool = False) -> Table | None:
    """The pairs of classes that are confused most often; `None` if nothing was wrong."""
    pairs = classes.confused_pairs(most)
    if not pairs:
        return None
    rows = []
    for true, given, count in pairs:
        share = count / max(1, int(classes.support[true]))
        names = [short(classes.names[k]) if narrow else classes.names[k] for k in (true, given)]
        rows.append((names, [Cell(str(count)), Cell(number(share, "percent"))]))
    caption = f"Most often confused{f' ({run})' if run else ''}"
    return Table(caption, ["true class", "predicted"], ["rows", "% of the true class"], rows)


def confusion_table(classes: ClassMetrics, run: str = "") -> Table | None:
    """The whole confusion matrix, up to 20 classes; beyond that, `None`: see `confusion.csv` and the picture."""
    if len(classes) > _LARGEST_MATRIX:
        return None
    some_nan = bool(classes.confusion[:, -1].any())
    width = len(classes) + some_nan
    rows = [([name], [Cell(str(n)) for n in classes.confusion[k, :width]]) for k, name in enumerate(classes.names)]
    headers = [*classes.names, *(["none (NaN)"] if some_nan else [])]
    note = "Rows: the true class. Columns: the predicted one."
    return Table(f"Confusion matrix{f' ({run})' if run else ''}", ["true class"], headers, rows, note)


def class_tables(runs: Sequence[RunData], most: int | None = None) -> list[Table]:
    """Every table about classes, of all runs that have any."""
    found: list[Table | None] = []
    for run in runs:
        if run.classes is not None:
            name = run.name if len(runs) > 1 else ""
            found += [confusion_table(run.classes, name), confused_table(run.classes, run=name)]
            found.append(classes_table(run.classes, most, name))
    return [table for table in found if table is not None]


def classes_csv(runs: Sequence[RunData]) -> str:
    """Metrics of every class of every run as CSV, fractions in full precision; empty where undefined."""
    ends = [f"{value}_{end}" for value in ESTIMATED for end in ("low", "high")]
    names = ["support", "predicted", *ESTIMATED, "confidence", "mean_prob", "share", "ece"]
    rows = []
    for run in runs:
        for k, name in enumerate(run.classes.names if run.classes else ()):
            values = [getattr(run.classes, value)[k] for value in names]
            values += [end for value in ESTIMATED for end in run.classes.intervals[value][k]]  # type: ignore[union-attr]
            rows.append([run.name, name, *("" if np.isnan(value) else value for value in values)])
    return _csv(["run", "class", *names, *ends], rows)


def confusion_csv(runs: Sequence[RunData]) -> str:
    """The confusion matrices as CSV: run, true class, predicted class, rows; pairs without rows are left out."""
    rows = []
    for run in runs:
        if run.classes is not None:
            names = [*run.classes.names, "(none: NaN)"]
            for true, given in zip(*np.nonzero(run.classes.confusion), strict=True):
                rows.append([run.name, names[true], names[given], int(run.classes.confusion[true, given])])
    return _csv(["run", "true", "predicted", "rows"], rows)


def _csv(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    out = io.StringIO()
    write_csv(out, header, rows)
    return out.getvalue()
