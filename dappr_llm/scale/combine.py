"""Ensembles from saved prediction tables, for `dappr combine` and for sweeps; no model, no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..core import checkpoint
from ..core.errors import UserError
from ..core.files import say
from ..evaluation.baseline_results import load_baselines
from ..evaluation.ensemble_tables import combine
from ..evaluation.item_texts import item_texts_path
from ..evaluation.prediction_table import PredictionTable, id_and_ood
from ..evaluation.reporting.run_results import finish
from ..evaluation.runs import load_run


def combine_tables(paths: list[str], out: str) -> PredictionTable:
    """
    Combine saved prediction tables into the table of their ensemble.

    Args:
        paths (`list[str]`): Tables (`.npz`) of the same items, one per member.
        out (`str`): File (`.npz`) of the ensemble's table.
    """
    if not out.endswith(".npz"):
        raise UserError(f"--out {out}: the ensemble of tables is a table, so the name must end in .npz")
    try:
        table = combine([PredictionTable.load(path) for path in paths])
    except UserError as error:
        raise UserError(f"Cannot combine {', '.join(paths)}: {error}") from None
    table.save(out)
    say(f"{len(table)} predictions of {len(paths)} members written to {out}")
    return table


def combine_runs(runs: list[str], out: str, quiet: bool = False) -> dict[str, float]:
    """
    Combine finished runs into an ensemble: writes its tables, results and figures to a new folder.

    Args:
        runs (`list[str]`): Folders of the member runs, all of the same tasks.
        out (`str`): Folder of the ensemble.
        quiet (`bool`, *optional*, defaults to `False`): Print nothing.

    Returns:
        `dict[str, float]`: The ensemble's metrics by key.
    """
    order = load_run(runs[0], require="results").table_paths
    folder = Path(out)
    if (folder / checkpoint.RECIPE).exists() or out in runs:
        raise UserError(f"{out} holds a run; choose another --out for the ensemble")
    tables = {}
    for task, path in order.items():
        members = [str(Path(run) / checkpoint.TABLES / path.name) for run in runs]
        try:
            tables[task] = combine([PredictionTable.load(member) for member in members])
        except UserError as error:
            raise UserError(f"Cannot combine {', '.join(members)}: {error}") from None
        tables[task].save(folder / checkpoint.TABLES / path.name)
        if item_texts_path(path).is_file():
            shutil.copy(item_texts_path(path), item_texts_path(folder / checkpoint.TABLES / path.name))
    baselines = load_baselines(Path(runs[0]), id_and_ood(tables)[0])  # of the same test rows, for every member
    return finish(folder, tables, folder.name, baselines=baselines, quiet=quiet)
