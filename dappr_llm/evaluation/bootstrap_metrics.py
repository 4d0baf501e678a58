"""
Vectorised metrics: the values of the declared metrics for R bootstrap resamples at once.

A bootstrap resample is a vector of row weights, how often each row was drawn; R of them are an array `[R, N]`. Rows
are sorted and binned once, in O(N log N); each resample then costs a few cumulative sums, O(N). A test requires that
the values equal those of the plain functions on repeated rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from . import calibration_metrics, classification_metrics
from .evaluators import MIXTURE_READINGS, answer_rows, detection_sides, function_of, mixture_answers
from .length_matching import match_lengths
from .metric_columns import (
    ANSWERS,
    MATCHED,
    SHIFTED,
    TRIVIAL_READINGS,
    Metric,
    detection_keys,
    length_matched,
    mixture_metrics,
)
from .ood_baselines import Sides, TrivialSides, trivial_sides
from .prediction_table import PredictionTable
from .weighted_rankings import Ranking, Values, detection, divide, selective

if TYPE_CHECKING:
    from scipy.sparse import csr_array


class Answers:
    """
    Metrics of the answers of one table under any row weights, each item read on its own options.

    Metrics that would be slow to recompute for every resample have a vectorised form here. All others are computed by
    the function that they declare: for all resamples at once if it accepts weights, otherwise once per resample.

    Args:
        table ([`PredictionTable`]): The predictions; rows of unknown label are ignored.
        wanted (`tuple[Metric, ...]`, *optional*): The metrics to compute; by default all metrics of the answers.
    """

    def __init__(self, table: PredictionTable, wanted: tuple[Metric, ...] = ANSWERS):
        self.wanted = {metric.key: metric for metric in wanted if metric.estimate}
        self.known = np.flatnonzero(table.labels >= 0)
        if not len(self.known):
            return
        rows = answer_rows(table)
        rows["probs"] = rows["probs"].astype(np.float64)
        rows["confidence"] = rows["probs"].max(axis=1)
        self.rows = rows
        self.means = {
            "accuracy": rows["correct"].astype(np.float64),
            "nll": classification_metrics.nll_rows(rows["probs"], rows["labels"]),
            "brier": classification_metrics.brier_rows(rows["probs"], rows["labels"]),
        }
        self.bins = _groups(calibration_metrics.bin_index(rows["confidence"]), calibration_metrics.NUM_BINS + 1)
        self.gap = rows["confidence"] - rows["correct"]
        self.binned_gap = self.bins.multiply(self.gap).tocsr()
        if "ece_equal_mass" in self.wanted:
            self.by_confidence = Ranking(rows["confidence"], np.ones(len(self.known)))
        if "ece_classwise" in self.wanted:
            self._prepare_classes(rows["probs"], rows["labels"], rows["num_options"])
        if "aurc" in self.wanted:
            self.ranking = Ranking(rows["aleatoric"], rows["correct"])

    def _prepare_classes(self, probs: np.ndarray, labels: np.ndarray, options: np.ndarray) -> None:
        """Sparse matrices that sum gaps per class and bin, `[K * bins, N]`, and rows per class, `[K, N]`."""
        bins, classes = calibration_metrics.NUM_BINS + 1, int(options.max())
        row, option = np.nonzero(np.arange(classes) < options[:, None])
        p = probs[row, option]
        place = option * bins + calibration_metrics.bin_index(p)
        shape = (classes * bins, len(labels))
        self.class_gap = _sparse(p - (labels[row] == option), place, row, shape)
        self.offered = _sparse(np.ones(len(row)), option, row, (classes, len(labels)))

    @np.errstate(invalid="ignore", divide="ignore")
    def __call__(self, weights: np.ndarray) -> Values:
        """Values `[R]` by metric, from row weights `[R, N]`; empty if the table has no labelled row."""
        if not len(self.known):
            return {}
        weights = weights if len(self.known) == weights.shape[1] else weights[:, self.known]
        total = weights.sum(axis=1)
        values = {name: weights @ rows / total for name, rows in self.means.items()}
        gaps = np.abs((self.binned_gap @ weights.T).T)  # [R, bins]
        values["ece"] = gaps.sum(axis=1) / total
        if "mce" in self.wanted:
            values["mce"] = divide(gaps, (self.bins @ weights.T).T).max(axis=1)
        if "ece_equal_mass" in self.wanted:
            values["ece_equal_mass"] = self._equal_mass(weights) / total
        if "ece_classwise" in self.wanted:
            values["ece_classwise"] = self._classwise(weights)
        if "aurc" in self.wanted:
            right, wrong = self.ranking.sums(weights)
            ranked = detection(right, wrong, ("auroc", "aupr"))
            values |= {f"conf_{name}": value for name, value in ranked.items()} | selective(right, wrong)
        values |= {key: self._by_function(m, weights) for key, m in self.wanted.items() if key not in values}
        return {key: np.where(total > 0, values[key], np.nan) for key in self.wanted}

    def _by_function(self, metric: Metric, weights: np.ndarray) -> np.ndarray:
        """A metric without a vectorised form here, `[R]`, by its declared function."""
        function, inputs = function_of(metric), [self.rows[name] for name in metric.inputs]
        if metric.weighted:
            return function(*inputs, weights=weights)
        found = []
        for counts in weights:
            drawn = np.repeat(np.arange(len(counts)), counts.astype(np.int64))
            found.append(function(*(rows[drawn] for rows in inputs)))
        return np.array(found)

    def _equal_mass(self, weights: np.ndarray) -> np.ndarray:
        """Equal-mass ECE times the total weight, `[R]`; see `calibration_metrics.equal_mass_ece`."""
        mass, gap = self.by_confidence.total(weights), self.by_confidence.total(weights * self.gap)
        found = np.empty(len(weights))
        for i, (m, g) in enumerate(zip(mass, gap, strict=True)):
            borders = np.interp(
                np.linspace(0, m[-1], calibration_metrics.NUM_BINS + 1), np.append(0, m), np.append(0, g)
            )
            found[i] = np.abs(np.diff(borders)).sum()
        return found

    def _classwise(self, weights: np.ndarray) -> np.ndarray:
        """Class-wise ECE, `[R]`."""
        gaps = np.abs(self.class_gap @ weights.T).reshape(self.offered.shape[0], -1, len(weights)).sum(axis=1)
        rows = self.offered @ weights.T  # [K, R]
        present = rows > 0  # a resample may contain no row that offers the last option
        return np.where(present, gaps / rows, 0).sum(axis=0) / present.sum(axis=0)


class Detection:
    """
    What one OOD task says of a model under any row weights: detection, lengths matched or not, and the mixture.

    Args:
        id_table, ood_table ([`PredictionTable`]): Predictions of one model.
        score (`str`, *optional*, defaults to `"epistemic"`): Which uncertainty ranks the items.
        trivial (`Mapping`, *optional*): From [`trivial_sides`], for this task.
    """

    def __init__(
        self,
        id_table: PredictionTable,
        ood_table: PredictionTable,
        score: str = "epistemic",
        trivial: Mapping[str, Sides] | None = None,
    ):
        is_id = np.arange(len(id_table) + len(ood_table)) < len(id_table)
        sides = detection_sides(id_table, ood_table, score, trivial)
        self.rankings = {suffix: Ranking(np.concatenate(pair), is_id) for suffix, pair in sides.items()}
        matching = match_lengths(id_table, ood_table)
        self.measured = matching is not None
        self.weights = matching.weights if matching is not None and matching.usable else None
        self.kept, correct = mixture_answers(id_table, ood_table)
        self.mixed = {
            suffix: Ranking(np.concatenate(pair)[self.kept], correct)
            for suffix, pair in sides.items()
            if suffix in MIXTURE_READINGS
        }

    def __call__(self, weights: np.ndarray) -> Values:
        """Values `[R]` by the last part of their keys, from weights `[R, N + M]` of the rows of both tasks."""
        values: Values = {}
        for suffix, ranking in self.rankings.items():
            found = detection(*ranking.sums(weights), detection_keys(suffix))
            values |= {f"{name}{suffix}": value for name, value in found.items()}
            if self.measured and suffix in MIXTURE_READINGS:
                values[f"auroc{length_matched(suffix)}"] = self._length_matched(ranking, weights)
        for suffix in TRIVIAL_READINGS:
            if suffix in self.rankings:
                values[f"auroc_minus{suffix}"] = values["auroc"] - values[f"auroc{suffix}"]
        return values | self._mixture(weights[:, self.kept])

    def _length_matched(self, ranking: Ranking, weights: np.ndarray) -> np.ndarray:
        if self.weights is None:
            return np.full(len(weights), np.nan)
        return detection(*ranking.sums(weights * self.weights), ("auroc",))["auroc"]

    def _mixture(self, weights: np.ndarray) -> Values:
        values: Values = {}
        for suffix, ranking in self.mixed.items():
            right, wrong = ranking.sums(weights)
            if not right.shape[1]:
                return {f"{m.key}{s}": np.full(len(weights), np.nan) for s in self.mixed for m in mixture_metrics(s)}
            (failure,) = detection(right, wrong, ("auroc",)).values()
            found = {"failure_auroc": failure, **selective(right, wrong)}
            if suffix == MATCHED:
                found["risk"] = divide(wrong[:, -1], right[:, -1] + wrong[:, -1])
            values |= {f"{m.key}{suffix}": found[m.key.removeprefix("mixture_")] for m in mixture_metrics(suffix)}
        return values


class Evaluation:
    """
    All metrics of a results file under R row weightings.

    Args:
        id_table ([`PredictionTable`]): Predictions for the task the model was trained on.
        ood_tables (`dict[str, PredictionTable]`): Predictions for the other tasks, by name.
        score (`str`, *optional*, defaults to `"epistemic"`): Which uncertainty ranks the items.
        wanted (`tuple[Metric, ...]`, *optional*): Metrics of the answers in distribution; by default all.
        trivial (`Mapping`, *optional*): From [`trivial_sides`]; by default from the tables alone.
    """

    def __init__(
        self,
        id_table: PredictionTable,
        ood_tables: dict[str, PredictionTable],
        score: str = "epistemic",
        wanted: tuple[Metric, ...] = ANSWERS,
        trivial: TrivialSides | None = None,
    ) -> None:
        trivial = trivial_sides(id_table, ood_tables) if trivial is None else trivial
        self.answers = Answers(id_table, wanted)
        self.shifted = {task: Answers(table, SHIFTED) for task, table in ood_tables.items()}
        self.detections = {
            task: Detection(id_table, table, score, trivial.get(task)) for task, table in ood_tables.items()
        }

    def __call__(self, id_weights: np.ndarray, ood_weights: dict[str, np.ndarray]) -> Values:
        """Values `[R]` by key, from weights `[R, N]` of the ID rows and `[R, M]` of the rows of each OOD task."""
        values = {f"id/{name}": value for name, value in self.answers(id_weights).items()}
        for task, weights in ood_weights.items():
            found = self.detections[task](np.concatenate([id_weights, weights], axis=1))
            values |= {f"ood/{task}/{name}": value for name, value in {**found, **self.shifted[task](weights)}.items()}
        return values


def _sparse(values: np.ndarray, row: np.ndarray, column: np.ndarray, shape: tuple[int, int]) -> csr_array:
    from scipy.sparse import csr_array

    return csr_array((values, (row, column)), shape=shape)


def _groups(index: np.ndarray, count: int) -> csr_array:
    """Indicator matrix `[count, N]` of the group that each row belongs to; `@ weights.T` sums weights per group."""
    return _sparse(np.ones(len(index)), index, np.arange(len(index)), (count, len(index)))
