"""`dappr combine`: ensembles from saved tables alone; no model, no torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ..core import checkpoint
from ..core.errors import UserError
from ..core.files import say
from ..evaluation.item_texts import item_texts_path
from ..evaluation.prediction_table import PredictionTable, combine
from ..evaluation.reporting.run_results import finish
from ..evaluation.runs import load_run


def combine_tables(paths: list[str], out: str) -> PredictionTable:
    """
    The ensemble of saved prediction tables.

    Args:
        paths (`list[str]`): Tables (`.npz`) of the same items.
        out (`str`): Where to write theirs.
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


def combine_runs(runs: list[str], out: str, quiet: bool = False) -> dict[str, Any]:
    """
    The ensemble of finished runs, from their tables alone: every table, results and pictures into a new folder.

    Args:
        runs (`list[str]`): Folders of runs of the same task.
        out (`str`): The ensemble's folder.
        quiet (`bool`, *optional*, defaults to `False`): Write, but print nothing.
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
        if item_texts_path(path).is_file():  # the items' words, which reports show
            shutil.copy(item_texts_path(path), item_texts_path(folder / checkpoint.TABLES / path.name))
    return finish(folder, tables, folder.name, quiet=quiet)
