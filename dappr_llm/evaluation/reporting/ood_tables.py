"""Tables of the OOD referee: what lengths and words alone achieve, every score, and ID and OOD items together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..metric_columns import BY_KEY, LENGTH_MATCHED, MIXTURE, SCORES, TRIVIAL, Metric
from ..ood_verdicts import not_matched, ood_tasks
from ..results import Intervals
from .tables import Cell, Table, interval_text, number

_SHORT = {
    "length": "length",
    "option_length": "option length",
    "options": "options",
    "question_mark": "?",
    "tfidf": "TF-IDF",
}
# What is shown of every score: key of the metric, ending of the reading, header.
_BY_SCORE = (
    ("auroc", "", "AUROC"),
    ("auroc", LENGTH_MATCHED, "length-matched"),
    ("mixture_failure_auroc", "", "failure AUROC, ID and OOD together"),
    ("mixture_aurc", "", "AURC, ID and OOD together"),
)
_MATCHED_NOTE = (
    "Length-matched: the same with ID and OOD items weighted so that question length, "
    "option length and number of options are alike; rows: effective ID/OOD rows of these weights; length itself: its "
    "AUROC under them."
)
_TRIVIAL_NOTE = (
    "On the right: detectors that see no model, two-sided. Lengths in tokens; TF-IDF: likeness to the nearest "
    "training row, or to the other half of the ID items where the tables do not hold it."
)
_MIXTURE_NOTE = (
    "OOD items are right or wrong by their labels, and wrong without one. Failure AUROC: right above wrong answers."
)


def referee_table(
    results: Mapping[str, float],
    intervals: Intervals | None = None,
    score: str = "epistemic",
    runs: Sequence[str] = (),
    narrow: bool = False,
) -> Table | None:
    """
    The AUROC beside what it is at equal lengths, and beside detectors that see no model; `None` without any of these.

    Args:
        results (`Mapping`): Of a results file, by key.
        intervals (`Mapping`, *optional*): Their intervals.
        score (`str`, *optional*, defaults to `"epistemic"`): What ranked the items, for the note.
        runs (`Sequence[str]`, *optional*): A name for the rows' second heading; empty for a single run.
        narrow (`bool`, *optional*, defaults to `False`): For a terminal: short headers, and only the two main
            intervals.
    """
    tasks = [task for task in ood_tasks(results) if _has_any(results, task)]
    if not tasks:
        return None
    shown = [name for name in TRIVIAL if any(f"ood/{t}/auroc_trivial_{name}" in results for t in tasks)]
    matched = any(f"ood/{task}/auroc{LENGTH_MATCHED}" in results for task in tasks)
    columns = ["AUROC", *(["length-matched", "rows"] if matched else ())]
    columns += [] if narrow or not matched else ["length itself"]
    columns += [_SHORT[name] if narrow else TRIVIAL[name] for name in shown]
    rows = []
    for task in tasks:
        cells = [_cell(results, intervals, f"ood/{task}/auroc")]
        if matched:
            cells.append(_cell(results, intervals, f"ood/{task}/auroc{LENGTH_MATCHED}"))
            cells.append(Cell(_rows(results, task)))
        if matched and not narrow:
            cells.append(_cell(results, None, f"ood/{task}/matched_length_auroc"))
        kept = None if narrow else intervals
        cells += [_cell(results, kept, f"ood/{task}/auroc_trivial_{name}") for name in shown]
        rows.append(([task, *runs], cells))
    said = [f"AUROC by the {SCORES.get(score, score)} score.", *([_MATCHED_NOTE] if matched else ()), _TRIVIAL_NOTE]
    note = " ".join([] if narrow else [*said, *not_matched(results)])
    title = "How much of it is length? AUROC without a model on the right"
    return Table(title, ["task", *(["run"] if runs else ())], columns, rows, note)


def mixture_table(
    results: Mapping[str, float],
    intervals: Intervals | None = None,
    score: str = "epistemic",
    runs: Sequence[str] = (),
    narrow: bool = False,
) -> Table | None:
    """Which answers are wrong where ID and OOD items are asked together; the arguments are those above."""
    tasks = [task for task in ood_tasks(results) if f"ood/{task}/mixture_aurc" in results]
    if not tasks:
        return None
    shown = [metric for metric in MIXTURE if metric.headline or not narrow]
    kept = None if narrow else intervals
    rows = [
        ([task, *runs], [_cell(results, kept, f"ood/{task}/{metric.key}", metric) for metric in shown])
        for task in tasks
    ]
    note = "" if narrow else _MIXTURE_NOTE
    headings = ["with", *(["run"] if runs else ())]
    title = f"ID and OOD questions asked together, ranked by {SCORES.get(score, score)}"
    return Table(title, headings, [metric.header for metric in shown], rows, note)


def scores_table(
    results: Mapping[str, float], intervals: Intervals | None = None, score: str = "", runs: Sequence[str] = ()
) -> Table | None:
    """Detection and the mixture by every score that the tables have; the arguments are those above."""
    matched = any(key.endswith(LENGTH_MATCHED) for key in results)
    shown = [column for column in _BY_SCORE if matched or column[1] != LENGTH_MATCHED]
    rows = []
    for task in ood_tasks(results):
        for name, header in SCORES.items():
            place = f"ood/{task}"
            if f"{place}/auroc_{name}" in results:
                cells = [_cell(results, intervals, f"{place}/{k}_{name}{end}", BY_KEY[k]) for k, end, _ in shown]
                rows.append(([task, *runs, header], cells))
    if not rows:
        return None
    columns = [title for _, _, title in shown]
    headings = ["task", *(["run"] if runs else ()), "score"]
    note = "All on the training letters. No score may be chosen by these rows: they are the test."
    return Table("Every score", headings, columns, rows, note)


def joined(tables: Sequence[Table | None]) -> Table | None:
    """One table of the same tables of several runs; columns that only some have are kept."""
    found = [table for table in tables if table is not None]
    if not found:
        return None
    columns = list(dict.fromkeys(column for table in found for column in table.columns))
    rows = []
    for table in found:
        for names, cells in table.rows:
            own = dict(zip(table.columns, cells, strict=True))
            rows.append((names, [own.get(column, Cell("–")) for column in columns]))
    return Table(found[0].caption, found[0].headings, columns, rows, found[0].note)


def _has_any(results: Mapping[str, float], task: str) -> bool:
    place = f"ood/{task}/auroc"
    return f"{place}{LENGTH_MATCHED}" in results or any(f"{place}_trivial_{name}" in results for name in TRIVIAL)


def _rows(results: Mapping[str, float], task: str) -> str:
    values = [results.get(f"ood/{task}/matched_n_{side}", math.nan) for side in ("id", "ood")]
    return "–" if any(map(math.isnan, values)) else "/".join(f"{value:.0f}" for value in values)


def _cell(
    results: Mapping[str, float], intervals: Intervals | None, key: str, metric: Metric = BY_KEY["auroc"]
) -> Cell:
    return Cell(number(results.get(key), metric.kind), interval_text((intervals or {}).get(key), metric.kind))
