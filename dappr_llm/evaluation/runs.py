"""
Reads a run's folder: results file, prediction tables (ID task first), recipe and item texts.

Reports, ensembles, sweeps, the paper's analyses and model cards all read runs through this module. Tables and texts
are loaded on first access.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..core import checkpoint
from ..core.errors import UserError, nearest
from ..core.files import PathLike
from ..core.names import inside
from ..core.recipe import Recipe, load_recipe
from .item_texts import ItemText, load_item_texts
from .prediction_table import PredictionTable, id_and_ood
from .results import Intervals, ResultsFile, load_results_file


class TaskTables:
    """Prediction tables by task, of which the first is in distribution."""

    if TYPE_CHECKING:  # subclasses have them as a field or as a property

        @property
        def tables(self) -> dict[str, PredictionTable]: ...

    @property
    def id_table(self) -> PredictionTable:
        """Predictions for the ID task."""
        return id_and_ood(self.tables)[0]

    @property
    def ood_tables(self) -> dict[str, PredictionTable]:
        """Predictions for the OOD tasks, by name."""
        return id_and_ood(self.tables)[1]


@dataclass(frozen=True)
class Run(TaskTables):
    """
    A run's folder.

    Args:
        folder (`Path`): The folder.
        content ([`ResultsFile`]): The results file; empty if there is none.
        table_paths (`dict[str, Path]`): Files of the prediction tables by task, the ID task first.
        allow_nan (`bool`, *optional*, defaults to `False`): Accept tables with NaN or Inf.
    """

    folder: Path
    content: ResultsFile
    table_paths: dict[str, Path]
    allow_nan: bool = False

    @property
    def results(self) -> dict[str, Any]:
        """Metrics by key."""
        return self.content.results

    @property
    def meta(self) -> dict[str, Any]:
        """Meta data of the results file."""
        return self.content.meta

    @property
    def intervals(self) -> Intervals:
        """Lower and upper bounds by key; NaN where undefined."""
        return self.content.intervals

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def row(self) -> str:
        """Name of its row in a sweep, whose runs are folders `ROW/seedN`."""
        return self.folder.resolve().parent.name

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe it was trained with."""
        return load_recipe(self.folder / checkpoint.RECIPE)

    @property
    def seed(self) -> int:
        """The recipe's seed, or Trainer's default."""
        return int(self.recipe.train.get("seed", 42))

    @cached_property
    def tables(self) -> dict[str, PredictionTable]:
        """Prediction tables by task, the ID task first."""
        return {task: PredictionTable.load(path, self.allow_nan) for task, path in self.table_paths.items()}

    @property
    def id_name(self) -> str:
        """Name of the ID task."""
        return next(iter(self.table_paths))

    @cached_property
    def item_texts(self) -> dict[str, dict[str, ItemText]]:
        """Item texts by task and id; empty for tasks without such a file."""
        return {task: load_item_texts(path) for task, path in self.table_paths.items()}


def load_run(
    folder: PathLike,
    id_name: str | None = None,
    allow_nan: bool = False,
    require: Literal["results", "tables", "nothing"] = "tables",
) -> Run:
    """
    Reads a run's folder; the model is not needed.

    Args:
        folder (`str` or `os.PathLike`): A folder that `dappr train` or `dappr evaluate` wrote.
        id_name (`str`, *optional*): The ID task, if there is no results file that names it.
        allow_nan (`bool`, *optional*, defaults to `False`): Accept rows with NaN or Inf.
        require (`str`, *optional*, defaults to `"tables"`): What the folder must hold; otherwise a `UserError` names
            what is missing. `"tables"`: at least one table, and the ID task must be known. `"results"`: a results
            file and every table that it names. `"nothing"`: no requirement.
    """
    folder = Path(folder)
    path = folder / checkpoint.RESULTS
    if require == "results" and not path.is_file():
        raise UserError(f"{folder} is not a finished run: it holds no {checkpoint.RESULTS}")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give one that `dappr train` or `dappr evaluate` wrote")
    content = load_results_file(path) if path.is_file() else ResultsFile({}, {})
    named = [str(task) for task in (content.meta.get("id"), *(content.meta.get("ood") or ())) if task is not None]
    found = _find_tables(folder, content.meta, named)
    if require == "results":
        for task in named:
            if task not in found or not found[task].is_file():
                raise UserError(f"{folder}: its results name the task {task!r}, but its table is not there")
    elif require == "tables":
        named = [_id_task(folder, found, id_name or content.meta.get("id"))]
    order = dict.fromkeys([*(task for task in named if task in found), *found])
    return Run(folder, content, {task: found[task] for task in order}, allow_nan)


def find_runs(folder: PathLike) -> list[Run]:
    """
    The finished runs of a sweep's folder (`ROW/seedN`), or the single run of a run's folder.

    Args:
        folder (`str` or `os.PathLike`): A folder that `dappr sweep` or `dappr train` wrote.
    """
    root = Path(folder)
    places: Sequence[Path] = [root] if (root / checkpoint.RESULTS).is_file() else sorted(root.glob("*/seed*"))
    files = (checkpoint.RESULTS, checkpoint.RECIPE)
    runs = [load_run(place, require="results") for place in places if all((place / name).is_file() for name in files)]
    if not runs:
        raise UserError(f"{folder} holds no finished runs (ROW/seedN with {checkpoint.RESULTS}); start its sweep")
    return runs


def _find_tables(folder: Path, meta: dict[str, Any], named: list[str]) -> dict[str, Path]:
    """Paths by task: the tables that the results file names, otherwise all tables in the predictions folder."""
    paths = meta.get("tables")
    if isinstance(paths, dict) and paths:
        return {str(task): _table_path(folder, str(task), path) for task, path in paths.items()}
    tables = sorted((folder / checkpoint.TABLES).glob("*.npz"))
    found = {path.stem.rpartition("-")[0] or path.stem: path for path in tables}
    return {task: found[task] for task in named if task in found} or found


def _table_path(folder: Path, task: str, path: Any) -> Path:
    try:
        return inside(folder, path)
    except ValueError as error:
        raise UserError(
            f"{folder / checkpoint.RESULTS}: the table of the task {task!r} must be a file in the run's folder, but "
            f"{error}; make the results again with `dappr evaluate`"
        ) from None


def _id_task(folder: Path, found: dict[str, Path], name: str | None) -> str:
    """The ID task: the given name, or the only task there is."""
    if not found:
        raise UserError(f"{folder} holds no prediction tables ({checkpoint.TABLES}/*.npz); run `dappr evaluate` first")
    name = name or (next(iter(found)) if len(found) == 1 else None)
    if name is None:
        raise UserError(f"{folder} does not say which task is in distribution: pass --id, one of {', '.join(found)}")
    if name not in found:
        raise UserError(f"{folder} has no table of the task {name!r}; {nearest(name, found)}")
    return name
