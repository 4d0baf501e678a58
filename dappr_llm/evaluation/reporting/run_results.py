"""Output of runs, evaluations and ensembles from their prediction tables: results.json, figures, a printed table."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...core import checkpoint
from ...core.errors import UserError
from ...core.files import is_main_process, say
from ...core.names import table_name
from ...core.secrets import mask
from ..baseline_results import baseline_facts, baseline_results, save_baselines
from ..bootstrap import RESAMPLES, bootstrap
from ..evaluators import evaluate_tables
from ..item_texts import ItemText, load_item_texts, save_item_texts
from ..ood_baselines import trivial_sides
from ..per_class import ClassMetrics, class_metrics, class_names
from ..prediction_table import PredictionTable, id_and_ood
from ..results import load_results_file, save_results
from . import figures
from .confusion import plot_confusion
from .sample_answers import sample_answers
from .text_tables import render_results


def finish(
    folder: Path,
    tables: Mapping[str, PredictionTable],
    title: str,
    *,
    seed: int | None = None,
    resamples: int = RESAMPLES,
    score: str = "epistemic",
    paths: Mapping[str, str] | None = None,
    baselines: Mapping[str, PredictionTable] | None = None,
    quiet: bool = False,
    facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """
    Compute the metrics of prediction tables; rank 0 writes results.json and figures, and prints the metrics.

    Args:
        folder (`Path`):
            Folder to write to.
        tables (`Mapping[str, PredictionTable]`):
            By task; the first is in distribution, the others are out of distribution.
        title (`str`):
            A line above the printed table.
        seed, facts (`int` and `Mapping`, *optional*):
            The run's seed and the commits of base model and datasets, for the meta data.
        resamples, score (`int`, defaults to 1000, and `str`, defaults to `"epistemic"`):
            Bootstrap resamples (0 for no intervals); the uncertainty that ranks items for OOD detection.
        paths (`Mapping[str, str]`, *optional*):
            Paths of tables that are not in the folder's own `predictions/`, by task.
        baselines (`Mapping[str, PredictionTable]`, *optional*):
            Tables of baselines for the rows of the first task, by name; see `trivial_baselines.py`.
        quiet (`bool`, *optional*, defaults to `False`):
            Write, but print nothing.

    Returns:
        `dict`: The metrics by key, on every rank; those of detectors that read texts on rank 0.
    """
    id_table, ood_tables = id_and_ood(tables)
    meta = _facts(tables, seed=seed, score=score, resamples=resamples, paths=paths or {})
    texts = _texts(folder, meta)
    trivial = trivial_sides(id_table, ood_tables, texts, meta["id"])
    results = evaluate_tables(id_table, ood_tables, score, trivial)
    if not is_main_process():
        return results
    _name_nan_rows(tables)
    intervals = bootstrap(id_table, ood_tables, resamples, score=score, trivial=trivial) if resamples else {}
    more, more_intervals = baseline_results(id_table, baselines or {}, resamples)
    results, intervals = {**results, **more}, {**intervals, **more_intervals}
    meta["baselines"] = baseline_facts(baselines or {}) or None
    classes = _classes(id_table, texts[meta["id"]])
    save_baselines(folder, baselines or {})
    save_results(results, {**meta, **(facts or {})}, folder / checkpoint.RESULTS, intervals, classes)
    pictures = _draw(folder, id_table, ood_tables, classes)
    if not quiet:
        say("\n" + render_results(results, title, intervals, classes, meta))
        say(f"\nModel, tables and results: {folder}" + (f"\nPictures: {pictures}" if pictures else ""))
    return results


def show_samples(folder: Path, tables: Mapping[str, PredictionTable]) -> None:
    """Print a few questions of every task with their answers, where the texts lie beside the run's tables."""
    paths = {name: table_name(name, table.meta.get("split") or "") for name, table in tables.items()}
    texts = {name: load_item_texts(folder / checkpoint.TABLES / path) for name, path in paths.items()}
    shown = sample_answers(tables, texts)
    if shown:
        say("\n" + shown + "\n")


def _texts(folder: Path, meta: Mapping[str, Any]) -> dict[str, dict[str, ItemText]]:
    """The items' texts by task; only rank 0, which wrote them, knows that they are on the disk."""
    return {name: load_item_texts(folder / path) for name, path in meta["tables"].items() if is_main_process()}


def _classes(table: PredictionTable, texts: dict[str, ItemText]) -> ClassMetrics | None:
    names = class_names(table, texts)
    return class_metrics(table, names) if names else None


def _facts(
    tables: Mapping[str, PredictionTable], *, seed: int | None, score: str, resamples: int, paths: Mapping[str, str]
) -> dict[str, Any]:
    """Meta data of results.json."""
    id_name, *ood = tables
    facts = tables[id_name].meta
    own = {
        name: f"{checkpoint.TABLES}/{table_name(name, table.meta.get('split') or '')}"
        for name, table in tables.items()
        if name not in paths
    }
    return {
        "id": id_name,
        "ood": ood,
        "split": facts.get("split"),
        "method": facts.get("method"),
        "modality": facts.get("modality"),
        "options": facts.get("options"),
        "seed": seed,
        "score": score,
        "tables": {**own, **paths},
        "intervals": {"kind": "bootstrap", "level": 0.95, "resamples": resamples, "seed": 0} if resamples else None,
        "command": shlex.join(["dappr", *mask(sys.argv[1:])]),
        "versions": checkpoint.versions(),
    }


def show_results(folder: Path) -> None:
    """Print the metrics of a finished run."""
    content = load_results_file(folder / checkpoint.RESULTS)
    say(render_results(content.results, folder.name, content.intervals, content.classes, content.meta))


def save_table(table: PredictionTable, rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write a table (`.npz` or `.parquet`), and beside it the texts of its items if `rows` have a question column."""
    table.to_parquet(path) if path.suffix == ".parquet" else table.save(path)
    if "question" in getattr(rows, "column_names", ()):
        save_item_texts(rows, path)


def _name_nan_rows(tables: Mapping[str, PredictionTable]) -> None:
    for name, table in tables.items():
        if table.nan_rows.any():
            named = ", ".join(table.ids[table.nan_rows][:3])
            say(f"{name}: {table.nan_rows.sum()} rows hold NaN or Inf (first: {named}) and rank as most uncertain")


def _draw(
    folder: Path, id_table: PredictionTable, ood: dict[str, PredictionTable], classes: ClassMetrics | None
) -> str:
    """Draw the figures; returns their paths as text, empty if they could not be drawn, e.g. without matplotlib."""
    pictures = [folder / "reliability.png", folder / "alpha0.png"]
    try:
        figures.plot_reliability(id_table, pictures[0])
        figures.plot_alpha0(id_table, ood, pictures[1])
        matrix = folder / "confusion.png"
        if classes is None:
            matrix.unlink(missing_ok=True)  # of an earlier evaluation
        else:
            plot_confusion(classes, matrix)
            pictures.append(matrix)
    except UserError as error:  # the metrics are written already: report the reason and go on
        say(f"No pictures: {error}")
        return ""
    return ", ".join(map(str, pictures))
