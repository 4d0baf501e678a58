"""A run's folder → its prediction tables, their questions and their figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ...core import checkpoint
from ...core.errors import UserError, nearest
from ..bootstrap import bootstrap
from ..evaluators import evaluate_tables, one_reading
from ..item_texts import Question, load_questions
from ..prediction_table import PredictionTable
from ..results import Intervals, load_results_file, table_paths


@dataclass
class RunData:
    """
    Everything a report says about one run.

    Args:
        name (`str`): How the report calls it.
        id_name (`str`): The in-distribution task.
        tables (`dict[str, PredictionTable]`): By task, the in-distribution one first.
        questions (`dict[str, dict[str, Question]]`): Texts by task and id, as far as they were kept.
        meta (`dict`): Of the results file, if there is one.
        score (`str`): What ranks the items.
        resamples (`int`): Of the intervals; 0 for none.
    """

    name: str
    id_name: str
    tables: dict[str, PredictionTable]
    questions: dict[str, dict[str, Question]] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    score: str = "epistemic"
    resamples: int = 1000

    @property
    def id_table(self) -> PredictionTable:
        return self.tables[self.id_name]

    @property
    def ood_tables(self) -> dict[str, PredictionTable]:
        return {task: table for task, table in self.tables.items() if task != self.id_name}

    @cached_property
    def results(self) -> dict[str, float]:
        return evaluate_tables(self.id_table, self.ood_tables, self.score)

    @cached_property
    def one_reading(self) -> bool:
        return one_reading(self.results)

    @cached_property
    def intervals(self) -> Intervals:
        if not self.resamples:
            return {}
        return bootstrap(self.id_table, self.ood_tables, self.resamples, score=self.score)


def load_run(folder: str | Path, id_name: str | None = None, allow_nan: bool = False, **kwargs: Any) -> RunData:
    """
    Reads the prediction tables of a run; the model is not needed, nor is the results file if `id_name` is given.

    Args:
        folder (`str` or `Path`): What `dappr train` or `dappr evaluate` wrote.
        id_name (`str`, *optional*): The in-distribution task, where no results file says it.
        allow_nan (`bool`, *optional*, defaults to `False`): Accept rows with NaN or Inf.
        kwargs: More fields of [`RunData`].
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give one that `dappr train` or `dappr evaluate` wrote")
    results = folder / checkpoint.RESULTS
    meta = load_results_file(results).meta if results.is_file() else {}
    paths = table_paths(folder, meta)
    if not paths:
        raise UserError(f"{folder} holds no prediction tables ({checkpoint.TABLES}/*.npz); run `dappr evaluate` first")
    name = id_name or meta.get("id") or (next(iter(paths)) if len(paths) == 1 else None)
    if name is None:
        raise UserError(f"{folder} does not say which task is in distribution: pass --id, one of {', '.join(paths)}")
    if name not in paths:
        raise UserError(f"{folder} has no table of the task {name!r}; {nearest(name, paths)}")
    order = [name, *(task for task in paths if task != name)]
    tables = {task: PredictionTable.load(paths[task], allow_nan) for task in order}
    questions = {task: load_questions(paths[task]) for task in order}
    return RunData(folder.resolve().name, name, tables, questions, meta, **kwargs)
