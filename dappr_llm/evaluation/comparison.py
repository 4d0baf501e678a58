"""The comparison table of a sweep: methods x seeds, as Markdown, LaTeX, CSV and JSON, from prediction tables alone."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..core import checkpoint
from ..core.csv_files import write_csv
from ..core.files import write_text
from .bootstrap import Paired, Summary, over_seeds, paired_bootstrap
from .evaluators import evaluate_tables
from .metric_columns import LENGTH_MATCHED, TRIVIAL, Column, Metric, columns
from .prediction_table import PredictionTable, id_and_ood
from .reporting.markdown import markdown_table
from .reporting.tables import escape_latex
from .results import to_json

SIGNIFICANT = 0.05
# In-distribution columns, by modality; those of images are the columns of the papers' tables.
_ID = {"text": ("accuracy", "nll", "ece"), "vision": ("accuracy", "conf_aupr", "nll", "ece")}
# OOD detection columns per task: the one in the headline table, and those in the second table.
_OOD = {"text": "auroc", "vision": "aupr"}
_OTHER = {
    "text": ("auroc_length_matched", "auroc_published", "auroc_max_prob"),
    "vision": ("auroc", "fpr95", "auroc_max_prob"),
}


@dataclass(frozen=True)
class Row:
    """
    The runs of one method.

    Args:
        name (`str`): The row's name.
        label (`str`): The name shown in tables.
        runs (`dict[int, dict[str, PredictionTable]]`): Tables by seed and task, the ID task first.
    """

    name: str
    label: str
    runs: dict[int, dict[str, PredictionTable]]


@dataclass(frozen=True)
class Entry:
    """
    The results of one row.

    Args:
        label (`str`): The name shown in tables.
        seeds (`list[int]`): Its seeds.
        summary (`dict[str, Summary]`): Mean and spread over seeds, by key.
        against_first (`dict[str, Paired]`): Difference from the first row, by key; p-values are corrected for the
            number of rows.
    """

    label: str
    seeds: list[int]
    summary: dict[str, Summary]
    against_first: dict[str, Paired]


@dataclass(frozen=True)
class Comparison:
    """All results of a comparison; the first entry is the baseline of the others."""

    id_task: str
    ood_tasks: list[str]
    entries: list[Entry]
    modality: str = "text"


def compare(rows: Sequence[Row], resamples: int = 1000) -> Comparison:
    """
    Mean and spread over seeds, and paired differences from the first row on the seeds that both rows have.

    Args:
        rows (`Sequence[Row]`):
            At least one; the first is the baseline.
        resamples (`int`, *optional*, defaults to 1000):
            Number of resamples of the paired bootstrap over items.
    """
    first_tables = next(iter(rows[0].runs.values()))
    id_task, *ood_tasks = first_tables
    entries = []
    for number, row in enumerate(rows):
        results = [evaluate_tables(*id_and_ood(tables)) for tables in row.runs.values()]
        keys = [key for key in results[0] if all(key in other for other in results)]
        summary = {key: over_seeds([result[key] for result in results]) for key in keys}
        shared = [seed for seed in row.runs if seed in rows[0].runs]
        paired: dict[str, Paired] = {}
        if number and shared:
            sides = [[id_and_ood(side.runs[seed]) for seed in shared] for side in (rows[0], row)]
            paired = paired_bootstrap(sides[0], sides[1], resamples)
        entries.append(Entry(row.label, list(row.runs), summary, paired))
    modality = str(first_tables[id_task].meta.get("modality", "text"))
    return Comparison(id_task, ood_tasks, _holm(entries), modality)


def _holm(entries: list[Entry]) -> list[Entry]:
    """Holm's correction of the p-values of each metric for the number of rows compared with the first."""
    corrected: list[dict[str, Paired]] = [{} for _ in entries]
    for key in dict.fromkeys(key for entry in entries for key in entry.against_first):  # a set has no order
        found = [
            (entry.against_first[key].p_value, i) for i, entry in enumerate(entries) if key in entry.against_first
        ]
        largest = 0.0
        for rank, (p_value, i) in enumerate(sorted(found, key=lambda pair: (math.isnan(pair[0]), pair))):
            largest = max(largest, min(1.0, (len(found) - rank) * p_value)) if not math.isnan(p_value) else math.nan
            paired = entries[i].against_first[key]
            corrected[i][key] = Paired(paired.difference, paired.low, paired.high, largest)
    return [Entry(e.label, e.seeds, e.summary, new) for e, new in zip(entries, corrected, strict=True)]


# --- tables -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shown:
    """A column: the result key of its values, its header, and the declaration of its metric."""

    key: str
    header: str
    metric: Metric


def _columns(comparison: Comparison, part: str) -> list[_Shown]:
    kind, tasks = comparison.modality, comparison.ood_tasks
    if part == "headline":
        shown = [_Shown(f"id/{column.key}", column.header, column.metric) for column in columns(_ID[kind])]
        (column,) = columns([_OOD[kind]], one_reading=True)
        return shown + [_Shown(f"ood/{t}/{column.key}", f"{column.header} {t}", column.metric) for t in tasks]
    others = [(column, _other_header(column, kind)) for column in columns(_OTHER[kind], one_reading=kind == "vision")]
    found = [_Shown(f"ood/{t}/{c.key}", f"{t}, {header}", c.metric) for t in tasks for c, header in others]
    known = {key for e in comparison.entries for key, value in e.summary.items() if not math.isnan(value.mean)}
    # Lengths are unknown in older tables, and cannot always be matched.
    return [each for each in found if each.key in known or not each.key.endswith(LENGTH_MATCHED)]


def _other_header(column: Column, kind: str) -> str:
    # For text, every column of the second table is an AUROC, which its title states.
    names = [] if kind == "text" else [column.metric.header]
    return ", ".join([*names, *([column.reading] if column.reading else [])])


def _cells(comparison: Comparison, part: str) -> tuple[list[str], list[list[tuple[str, str, bool, bool]]]]:
    """Headers; per row and column: mean, standard deviation, is it the best, does it differ from the first row."""
    shown = _columns(comparison, part)
    # Metrics of image classifiers differ in the second decimal.
    digits = 2 if comparison.modality == "vision" else 1
    rows = []
    for entry in comparison.entries:
        cells = []
        for column in shown:
            key, kind = column.key, column.metric.kind
            means = [e.summary[key].mean for e in comparison.entries if key in e.summary]
            choose = max if column.metric.larger_is_better else min
            best = choose((m for m in means if not math.isnan(m)), default=math.nan)
            found = entry.summary.get(key)
            paired = entry.against_first.get(key)
            cells.append(
                (
                    _number(found.mean if found else math.nan, kind, digits),
                    _number(found.std, kind, digits) if found and not math.isnan(found.std) else "",
                    found is not None and found.mean == best and len(comparison.entries) > 1,
                    paired is not None and paired.p_value < SIGNIFICANT,
                )
            )
        rows.append(cells)
    return [column.header for column in shown], rows


def _number(value: float, kind: str, digits: int) -> str:
    if math.isnan(value):
        return "–"
    return f"{100 * value:.{digits}f}" if kind == "percent" else f"{value:.3f}"


def render_markdown(comparison: Comparison) -> str:
    """The comparison as Markdown tables."""
    blocks = []
    other = "OOD AUROC in other readings" if comparison.modality == "text" else "OOD detection in other measures"
    for title, part in (("", "headline"), (other, "readings")):
        if part == "readings" and not comparison.ood_tasks:
            continue
        headers, rows = _cells(comparison, part)
        table = markdown_table(
            ["method", "seeds", *headers],
            [
                [entry.label, str(len(entry.seeds)), *(_markdown_cell(*cell) for cell in cells)]
                for entry, cells in zip(comparison.entries, rows, strict=True)
            ],
        )
        blocks.append(f"{title}:\n\n{table}" if title else table)
    return "\n\n".join([*blocks, *_without_model(comparison), _legend(comparison)]) + "\n"


def _without_model(comparison: Comparison) -> list[str]:
    """What detectors that see no model achieve on these rows, whatever the method; nothing where there are none."""
    summary, parts = comparison.entries[0].summary, []
    for task in comparison.ood_tasks:
        found = {name: summary.get(f"ood/{task}/auroc_trivial_{key}") for key, name in TRIVIAL.items()}
        values = [f"{name} {_number(value.mean, 'percent', 1)}" for name, value in found.items() if value is not None]
        if values:
            parts.append(f"{task}: {', '.join(values)}")
    return [f"AUROC without a model: {'; '.join(parts)}."] if parts else []


def _markdown_cell(mean: str, std: str, best: bool, differs: bool) -> str:
    text = f"{mean} ± {std}" if std else mean
    return (f"**{text}**" if best else text) + ("\\*" if differs else "")


def _legend(comparison: Comparison) -> str:
    first = comparison.entries[0].label
    return (
        "Mean ± standard deviation over seeds; all in % but NLL; best mean in bold. \\*: differs from the first row "
        f"({first}) by a paired bootstrap over items on the seeds that both have, p < {SIGNIFICANT} after Holm's "
        f"correction for {max(1, len(comparison.entries) - 1)} comparisons. " + _reading(comparison)
    )


def _reading(comparison: Comparison) -> str:
    if comparison.modality == "vision":
        return (
            "conf. AUPR: right answers above wrong ones by aleatoric uncertainty (1 − max p). AUPR, AUROC and FPR95: "
            f"in distribution ({comparison.id_task}, the positives) against each other set by epistemic uncertainty "
            "(K/α0; softmax methods: entropy, or mutual information over members). max prob: by 1 − max p."
        )
    return (
        "AUROC: in distribution "
        f"({comparison.id_task}) against each other task by epistemic uncertainty (K/α0; softmax methods: entropy, or "
        "mutual information over members), both sides read on the training letters. published: each side on all "
        "letters of its own task, as papers do, which an unused letter alone can raise. max prob: by 1 − max p, "
        "training letters. length-matched: items weighted so that both tasks have equal lengths and numbers of "
        "options."
    )


def render_latex(comparison: Comparison) -> str:
    """The headline table as LaTeX, for `booktabs`."""
    headers, rows = _cells(comparison, "headline")
    lines = [
        r"\begin{tabular}{l" + "r" * len(headers) + "}",
        r"\toprule",
        " & ".join(["method", *map(escape_latex, headers)]) + r" \\",
        r"\midrule",
    ]
    for entry, cells in zip(comparison.entries, rows, strict=True):
        lines.append(" & ".join([escape_latex(entry.label), *(_latex_cell(*cell) for cell in cells)]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex_cell(mean: str, std: str, best: bool, differs: bool) -> str:
    if mean == "–":
        return "--"
    value = rf"\mathbf{{{mean}}}" if best else mean
    return f"${value}" + (rf" \pm {std}" if std else "") + ("^{*}" if differs else "") + "$"


def render_csv(comparison: Comparison) -> str:
    """Every metric of every row, one line each."""
    rows = []
    for entry in comparison.entries:
        for key, found in entry.summary.items():
            paired = entry.against_first.get(key)
            values = [found.mean, found.std, found.low, found.high]
            values += [paired.difference, paired.low, paired.high, paired.p_value] if paired else [math.nan] * 4
            rows.append([entry.label, key, found.n, *("" if math.isnan(v) else f"{v:.6g}" for v in values)])
    out = io.StringIO()
    write_csv(out, ["method", "key", "seeds", "mean", "std", "low", "high", *_PAIRED], rows)
    return out.getvalue()


_PAIRED = ("difference", "difference_low", "difference_high", "p_value")


def save_comparison(comparison: Comparison, folder: Path, name: str, description: str = "") -> str:
    """
    Write `table.md`, `table.tex`, `table.csv` and `table.json`; returns the Markdown.

    Args:
        comparison (`Comparison`): From [`compare`].
        folder (`Path`): The folder to write to.
        name, description (`str`): Title and description, for the heading of `table.md`.
    """
    markdown = render_markdown(comparison)
    versions = ", ".join(f"{package} {version}" for package, version in checkpoint.versions().items())
    heading = f"# {name}\n\n" + (f"{description}\n\n" if description else "")
    write_text(folder / "table.md", f"{heading}{markdown}\nVersions: {versions}\n")
    write_text(folder / "table.tex", render_latex(comparison))
    write_text(folder / "table.csv", render_csv(comparison))
    content = {"name": name, "versions": checkpoint.versions(), **to_json(asdict(comparison))}
    write_text(folder / "table.json", json.dumps(content, indent=2, allow_nan=False) + "\n")
    return markdown + f"\nTables: {folder / 'table.md'}, .tex, .csv, .json"
