"""The data of one run in a report: its tables, and their metrics and intervals, computed on first access."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..bootstrap import bootstrap
from ..evaluators import evaluate_tables, one_reading
from ..item_texts import ItemText
from ..prediction_table import PredictionTable
from ..results import Intervals
from ..runs import Run, TaskTables


@dataclass
class RunData(TaskTables):
    """
    One run of a report.

    Args:
        name (`str`): Its name in the report.
        id_name (`str`): The ID task.
        tables (`dict[str, PredictionTable]`): By task, the ID task first.
        item_texts (`dict[str, dict[str, ItemText]]`): Item texts by task and id; empty where there are none.
        meta (`dict`): Meta data of the results file, if there is one.
        score (`str`): Which uncertainty ranks the items for OOD detection.
        resamples (`int`): Number of bootstrap resamples of the intervals; 0 for no intervals.
    """

    name: str
    id_name: str
    tables: dict[str, PredictionTable]
    item_texts: dict[str, dict[str, ItemText]] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    score: str = "epistemic"
    resamples: int = 1000

    @classmethod
    def of(cls, run: Run, score: str = "epistemic", resamples: int = 1000) -> RunData:
        """From a run's folder."""
        return cls(run.name, run.id_name, run.tables, run.item_texts, run.meta, score, resamples)

    @cached_property
    def results(self) -> dict[str, float]:
        """Metrics by key; see [`evaluate_tables`]."""
        return evaluate_tables(self.id_table, self.ood_tables, self.score)

    @cached_property
    def one_reading(self) -> bool:
        """Whether the matched and the published reading coincide."""
        return one_reading(self.results)

    @cached_property
    def intervals(self) -> Intervals:
        """Lower and upper bounds by key."""
        if not self.resamples:
            return {}
        return bootstrap(self.id_table, self.ood_tables, self.resamples, score=self.score)
