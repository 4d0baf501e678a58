"""
Ranking metrics under R weightings of the rows at once: AUROC, AUPR, FPR95, and risk against coverage.

Rows are sorted once, in O(N log N); each weighting then costs a few cumulative sums, O(N). `ranking_metrics.py` has
the plain definitions; a test requires that the values equal theirs on repeated rows.
"""

from __future__ import annotations

import numpy as np

from . import ranking_metrics

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
        precision = divide(positives, positives + negatives)
        values["aupr"] = np.einsum("rg,rg->r", new_positives, precision) / all_positives
    if "aupr_ood" in names:  # the precision-recall curve from the most uncertain row on
        found = all_negatives[:, None] - negatives + new_negatives
        flagged = found + all_positives[:, None] - positives + new_positives
        values["aupr_ood"] = np.einsum("rg,rg->r", new_negatives, divide(found, flagged)) / all_negatives
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
    before = (wrong - new_wrong) - divide(new_wrong, new_size) * (size - new_size)
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


def _steps(sums: np.ndarray) -> np.ndarray:
    """The increments of cumulative sums `[R, G]`."""
    return np.diff(sums, axis=1, prepend=0)


def divide(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """`one / other`, and 0 where `other` is 0."""
    return np.divide(one, other, out=np.zeros_like(one), where=other > 0)
