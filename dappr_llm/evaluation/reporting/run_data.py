"""The data of one run in a report: its tables, and their metrics and intervals, computed on first access."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..baseline_results import baseline_results, load_baselines
from ..bootstrap import bootstrap
from ..evaluators import evaluate_tables, one_reading
from ..item_texts import ItemText
from ..ood_baselines import TrivialSides, trivial_sides
from ..ood_verdicts import against_trivial
from ..per_class import ClassMetrics, class_metrics, class_names
from ..prediction_table import PredictionTable
from ..results import Intervals
from ..runs import Run, TaskTables
from ..verdicts import verdicts


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
        baselines (`dict[str, PredictionTable]`): Tables of baselines for the ID task's rows, by name.
    """

    name: str
    id_name: str
    tables: dict[str, PredictionTable]
    item_texts: dict[str, dict[str, ItemText]] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    score: str = "epistemic"
    resamples: int = 1000
    baselines: dict[str, PredictionTable] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run, score: str = "epistemic", resamples: int = 1000) -> RunData:
        """From a run's folder."""
        texts, baselines = run.item_texts, load_baselines(run.folder, run.id_table)
        return cls(run.name, run.id_name, run.tables, texts, run.meta, score, resamples, baselines)

    @cached_property
    def results(self) -> dict[str, float]:
        """Metrics by key; see [`evaluate_tables`] and [`baseline_results`]."""
        own = evaluate_tables(self.id_table, self.ood_tables, self.score, self.trivial)
        return own | self._against_baselines[0]

    @cached_property
    def trivial(self) -> TrivialSides:
        """Scores of the detectors that see no model; see [`trivial_sides`]."""
        return trivial_sides(self.id_table, self.ood_tables, self.item_texts, self.id_name)

    @cached_property
    def one_reading(self) -> bool:
        """Whether the matched and the published reading coincide."""
        return one_reading(self.results)

    @cached_property
    def intervals(self) -> Intervals:
        """Lower and upper bounds by key."""
        if not self.resamples:
            return {}
        own = bootstrap(self.id_table, self.ood_tables, self.resamples, score=self.score, trivial=self.trivial)
        return own | self._against_baselines[1]

    @cached_property
    def classes(self) -> ClassMetrics | None:
        """Metrics of each class; `None` where rows bring options of their own."""
        names = class_names(self.id_table, self.item_texts.get(self.id_name))
        return class_metrics(self.id_table, names) if names else None

    @cached_property
    def verdicts(self) -> list[str]:
        """What has to be said before any table; see [`verdicts.verdicts`]."""
        modality = str(self.id_table.meta.get("modality", "text"))
        found = verdicts(self.results, self.intervals, self.classes is not None, modality)
        beaten = against_trivial(self.results, self.intervals, self.score)
        return [*found, *([beaten] if beaten else ())]

    @cached_property
    def _against_baselines(self) -> tuple[dict[str, float], Intervals]:
        return baseline_results(self.id_table, self.baselines, self.resamples)
