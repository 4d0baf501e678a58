"""
A run's folder: its results file, its prediction tables with the in-distribution one first, its recipe and item texts.

The one reader for reports, ensembles, sweeps, the paper's analyses and model cards. Tables and texts are read when
they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..core import checkpoint
from ..core.errors import UserError, nearest
from ..core.files import PathLike
from ..core.recipe import Recipe, load_recipe
from .item_texts import Question, load_questions
from .prediction_table import PredictionTable
from .results import Intervals, ResultsFile, load_results_file


@dataclass(frozen=True)
class Run:
    """
    What a run's folder holds.

    Args:
        folder (`Path`): The folder.
        content ([`ResultsFile`]): Of its results file; empty if it has none.
        table_paths (`dict[str, Path]`): By task, the in-distribution one first.
        allow_nan (`bool`, *optional*, defaults to `False`): Accept tables with NaN or Inf.
    """

    folder: Path
    content: ResultsFile
    table_paths: dict[str, Path]
    allow_nan: bool = False

    @property
    def results(self) -> dict[str, Any]:
        """Numbers by key."""
        return self.content.results

    @property
    def meta(self) -> dict[str, Any]:
        """Facts about the run."""
        return self.content.meta

    @property
    def intervals(self) -> Intervals:
        """Low and high by key; NaN where undefined."""
        return self.content.intervals

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def row(self) -> str:
        """Its row in a sweep, whose runs are folders `ROW/seedN`."""
        return self.folder.resolve().parent.name

    @cached_property
    def recipe(self) -> Recipe:
        """What it was trained with."""
        return load_recipe(self.folder / checkpoint.RECIPE)

    @property
    def seed(self) -> int:
        """The recipe's seed, or Trainer's default."""
        return int(self.recipe.train.get("seed", 42))

    @cached_property
    def tables(self) -> dict[str, PredictionTable]:
        """Predictions by task, the in-distribution ones first."""
        return {task: PredictionTable.load(path, self.allow_nan) for task, path in self.table_paths.items()}

    @property
    def id_name(self) -> str:
        """The in-distribution task."""
        return next(iter(self.table_paths))

    @property
    def id_table(self) -> PredictionTable:
        """Predictions for the training task."""
        return self.tables[self.id_name]

    @property
    def ood_tables(self) -> dict[str, PredictionTable]:
        """Predictions for the other tasks."""
        return {task: table for task, table in self.tables.items() if task != self.id_name}

    @cached_property
    def item_texts(self) -> dict[str, dict[str, Question]]:
        """Questions by task and id, as far as they were kept."""
        return {task: load_questions(path) for task, path in self.table_paths.items()}


def load_run(
    folder: PathLike,
    id_name: str | None = None,
    allow_nan: bool = False,
    require: Literal["results", "tables", "nothing"] = "tables",
) -> Run:
    """
    Reads a run's folder; the model is not needed.

    Args:
        folder (`str` or `os.PathLike`): What `dappr train` or `dappr evaluate` wrote.
        id_name (`str`, *optional*): The in-distribution task, where no results file says it.
        allow_nan (`bool`, *optional*, defaults to `False`): Accept rows with NaN or Inf.
        require (`str`, *optional*, defaults to `"tables"`): What must be there, or a `UserError` says what is missing:
            `"tables"`: one at least, and it must be known which is in distribution. `"results"`: a results file and
            every table that it names. `"nothing"`: whatever there is.
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
    The finished runs below a sweep's folder (`ROW/seedN`), or the one of a single run's folder.

    Args:
        folder (`str` or `os.PathLike`): What `dappr sweep` or `dappr train` wrote.
    """
    root = Path(folder)
    places: Sequence[Path] = [root] if (root / checkpoint.RESULTS).is_file() else sorted(root.glob("*/seed*"))
    files = (checkpoint.RESULTS, checkpoint.RECIPE)
    runs = [load_run(place, require="results") for place in places if all((place / name).is_file() for name in files)]
    if not runs:
        raise UserError(f"{folder} holds no finished runs (ROW/seedN with {checkpoint.RESULTS}); start its sweep")
    return runs


def _find_tables(folder: Path, meta: dict[str, Any], named: list[str]) -> dict[str, Path]:
    """By task: the tables that the results file names, or else every table among the predictions."""
    paths = meta.get("tables")
    if isinstance(paths, dict) and paths:
        return {str(task): folder / str(path) for task, path in paths.items()}
    tables = sorted((folder / checkpoint.TABLES).glob("*.npz"))
    found = {path.stem.rpartition("-")[0] or path.stem: path for path in tables}
    return {task: found[task] for task in named if task in found} or found


def _id_task(folder: Path, found: dict[str, Path], name: str | None) -> str:
    if not found:
        raise UserError(f"{folder} holds no prediction tables ({checkpoint.TABLES}/*.npz); run `dappr evaluate` first")
    name = name or (next(iter(found)) if len(found) == 1 else None)
    if name is None:
        raise UserError(f"{folder} does not say which task is in distribution: pass --id, one of {', '.join(found)}")
    if name not in found:
        raise UserError(f"{folder} has no table of the task {name!r}; {nearest(name, found)}")
    return name
