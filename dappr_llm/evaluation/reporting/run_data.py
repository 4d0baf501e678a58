"""What a report says about one run: metrics and intervals, computed from its tables when they are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..bootstrap import bootstrap
from ..evaluators import evaluate_tables, one_reading
from ..item_texts import Question
from ..prediction_table import PredictionTable
from ..results import Intervals
from ..runs import Run


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

    @classmethod
    def of(cls, run: Run, score: str = "epistemic", resamples: int = 1000) -> RunData:
        """What a report says about a run's folder."""
        return cls(run.name, run.id_name, run.tables, run.item_texts, run.meta, score, resamples)

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
