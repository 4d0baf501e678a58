"""
Vectorised metrics: the values of the declared metrics for R bootstrap resamples at once.

A bootstrap resample is a vector of row weights, how often each row was drawn; R of them are an array `[R, N]`. Rows
are sorted and binned once, in O(N log N); each resample then costs a few cumulative sums, O(N). A test requires that
the values equal those of the plain functions on repeated rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import calibration_metrics, classification_metrics, ranking_metrics
from .evaluators import answer_rows, detection_sides, function_of
from .metric_columns import ANSWERS, SHIFTED, Metric, detection_keys
from .prediction_table import PredictionTable

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Values = dict[str, np.ndarray]  # metric → [R]


class Ranking:
    """
    Rows sorted once by uncertainty; cumulative sums along that order give every ranking metric under any row weights.

    Rows of equal uncertainty form one group, that is, one step of every curve; G is the number of groups.

    Args:
        uncertainty (`np.ndarray` of shape `[N]`): NaN ranks as most uncertain.
        positive (`np.ndarray` of shape `[N]`): Whether each row is a positive: correct, or in distribution.
    """

    def __init__(self, uncertainty: np.ndarray, positive: np.ndarray):
        uncertainty = np.asarray(uncertainty, dtype=np.float64)
        uncertainty = np.where(np.isnan(uncertainty), np.inf, uncertainty)
        self.order = np.argsort(uncertainty, kind="stable")
        ordered = uncertainty[self.order]
        self.ends: np.ndarray | slice = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True)[: len(ordered)])
        if len(self.ends) == len(ordered):
            self.ends = slice(None)  # no ties: a view instead of a copy
        self.positive = np.asarray(positive, dtype=np.float64)[self.order]

    def total(self, weights: np.ndarray) -> np.ndarray:
        """Cumulative weight `[R, G]` of all rows up to each group, least uncertain first, from weights `[R, N]`."""
        return np.cumsum(np.take(weights, self.order, axis=1), axis=1)[:, self.ends]

    def sums(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cumulative weights of positives and of negatives up to each group, `[R, G]` each, from weights `[R, N]`."""
        weights = np.take(weights, self.order, axis=1)
        everything = np.cumsum(weights, axis=1)[:, self.ends]
        weights *= self.positive
        positives = np.cumsum(weights, axis=1)[:, self.ends]
        return positives, everything - positives


@np.errstate(invalid="ignore", divide="ignore")
def detection(positives: np.ndarray, negatives: np.ndarray, names: tuple[str, ...]) -> Values:
    """
    `auroc`, `aupr`, `aupr_ood` and `fpr95` under R weightings.

    Args:
        positives, negatives (`np.ndarray` of shape `[R, G]`): From [`Ranking.sums`].
        names (`tuple[str, ...]`): Which of the four to compute.

    Returns:
        `dict[str, np.ndarray]`: `[R]` by name; NaN where a resample lacks positives or negatives.
    """
    if not positives.shape[1]:  # no rows at all
        return {name: np.full(len(positives), np.nan) for name in names}
    all_positives, all_negatives = positives[:, -1], negatives[:, -1]
    new_positives, new_negatives = _steps(positives), _steps(negatives)
    defined = (all_positives > 0) & (all_negatives > 0)
    values: Values = {}
    if "auroc" in names:
        pairs = np.einsum("rg,rg->r", new_negatives, positives)
        pairs -= np.einsum("rg,rg->r", new_negatives, new_positives) / 2
        values["auroc"] = pairs / (all_positives * all_negatives)
    if "aupr" in names:
        precision = _divide(positives, positives + negatives)
        values["aupr"] = np.einsum("rg,rg->r", new_positives, precision) / all_positives
    if "aupr_ood" in names:  # the precision-recall curve from the most uncertain row on
        found = all_negatives[:, None] - negatives + new_negatives
        flagged = found + all_positives[:, None] - positives + new_positives
        values["aupr_ood"] = np.einsum("rg,rg->r", new_negatives, _divide(found, flagged)) / all_negatives
    if "fpr95" in names:
        first = np.argmax(positives >= (ranking_metrics.TPR - 1e-12) * all_positives[:, None], axis=1)
        values["fpr95"] = negatives[np.arange(len(first)), first] / all_negatives
    return {name: np.where(defined, value, np.nan) for name, value in values.items()}


@np.errstate(invalid="ignore", divide="ignore")
def selective(right: np.ndarray, wrong: np.ndarray) -> Values:
    """
    `aurc`, `excess_aurc`, `risk_at_coverage_80` and `coverage_at_risk_5` under R weightings, `[R]` each.

    Args:
        right, wrong (`np.ndarray` of shape `[R, G]`): Cumulative weights of correct and wrong rows, from
            [`Ranking.sums`].
    """
    size = right + wrong
    total, mistakes = size[:, -1], wrong[:, -1]
    harmonic = np.append(0, np.cumsum(1 / np.arange(1, total.max() + 1)))
    reached = harmonic[size.astype(np.int64)]
    new_size, new_wrong = _steps(size), _steps(wrong)
    # A group of m tied rows with e errors, after a rows with E errors, adds the sum over j = 1..m of
    # (E + e j/m) / (a + j) to the area; harmonic numbers give it in closed form.
    before = (wrong - new_wrong) - _divide(new_wrong, new_size) * (size - new_size)
    area = (new_wrong + before * _steps(reached)).sum(axis=1) / total
    perfect = total - mistakes
    best = mistakes - perfect * (harmonic[total.astype(np.int64)] - harmonic[perfect.astype(np.int64)])
    first = np.argmax(size >= (ranking_metrics.COVERAGE - 1e-12) * total[:, None], axis=1)
    rows = np.arange(len(first))
    allowed = wrong <= (ranking_metrics.RISK + 1e-12) * size
    return {
        "aurc": area,
        "excess_aurc": area - best / total,
        "risk_at_coverage_80": wrong[rows, first] / size[rows, first],
        "coverage_at_risk_5": np.where(allowed, size, 0).max(axis=1) / total,
    }


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
            values["mce"] = _divide(gaps, (self.bins @ weights.T).T).max(axis=1)
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


class Evaluation:
    """
    All metrics of a results file under R row weightings.

    Args:
        id_table ([`PredictionTable`]): Predictions for the task the model was trained on.
        ood_tables (`dict[str, PredictionTable]`): Predictions for the other tasks, by name.
        score (`str`, *optional*, defaults to `"epistemic"`): Which uncertainty ranks the items.
        wanted (`tuple[Metric, ...]`, *optional*): Metrics of the answers in distribution; by default all.
    """

    def __init__(
        self,
        id_table: PredictionTable,
        ood_tables: dict[str, PredictionTable],
        score: str = "epistemic",
        wanted: tuple[Metric, ...] = ANSWERS,
    ) -> None:
        self.answers = Answers(id_table, wanted)
        self.shifted = {task: Answers(table, SHIFTED) for task, table in ood_tables.items()}
        self.rankings: dict[str, dict[str, Ranking]] = {}
        for task, table in ood_tables.items():
            is_id = np.arange(len(id_table) + len(table)) < len(id_table)
            self.rankings[task] = {
                suffix: Ranking(np.concatenate(sides), is_id)
                for suffix, sides in detection_sides(id_table, table, score).items()
            }

    def __call__(self, id_weights: np.ndarray, ood_weights: dict[str, np.ndarray]) -> Values:
        """Values `[R]` by key, from weights `[R, N]` of the ID rows and `[R, M]` of the rows of each OOD task."""
        values = {f"id/{name}": value for name, value in self.answers(id_weights).items()}
        for task, weights in ood_weights.items():
            both = np.concatenate([id_weights, weights], axis=1)
            for suffix, ranking in self.rankings[task].items():
                found = detection(*ranking.sums(both), detection_keys(suffix))
                values |= {f"ood/{task}/{name}{suffix}": value for name, value in found.items()}
            values |= {f"ood/{task}/{name}": value for name, value in self.shifted[task](weights).items()}
        return values


def _steps(sums: np.ndarray) -> np.ndarray:
    """The increments of cumulative sums `[R, G]`."""
    return np.diff(sums, axis=1, prepend=0)


def _divide(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """`one / other`, and 0 where `other` is 0."""
    return np.divide(one, other, out=np.zeros_like(one), where=other > 0)


def _sparse(values: np.ndarray, row: np.ndarray, column: np.ndarray, shape: tuple[int, int]) -> csr_array:
    from scipy.sparse import csr_array

    return csr_array((values, (row, column)), shape=shape)


def _groups(index: np.ndarray, count: int) -> csr_array:
    """Indicator matrix `[count, N]` of the group that each row belongs to; `@ weights.T` sums weights per group."""
    return _sparse(np.ones(len(index)), index, np.arange(len(index)), (count, len(index)))
