"""
Calibration errors and reliability diagrams, on plain numpy arrays: expected calibration error (ECE) and its variants.

Undefined cases (no rows) are NaN, never an exception.
"""

from __future__ import annotations

import numpy as np

from .classification_metrics import as_labelled

NUM_BINS = 15
_EXACT_ROWS = 64  # `ece_floor`: bins up to this size are computed exactly, larger ones by the normal approximation


def ece(confidence: np.ndarray, correct: np.ndarray, bins: int = NUM_BINS) -> float:
    """
    Expected calibration error: the mean gap between confidence and accuracy over equal-width bins.

    As in torchmetrics >= 1.0, bins are closed on the left and confidence 1.0 has a bin of its own.

    Args:
        confidence (`np.ndarray` of shape `[N]`): Probability of the predicted option.
        correct (`np.ndarray` of shape `[N]`): Whether the prediction is right.
        bins (`int`, *optional*, defaults to 15): Number of bins on [0, 1].
    """
    count, confidence_sum, correct_sum = _bin_sums(confidence, correct, bins)
    return float(np.abs(confidence_sum - correct_sum).sum() / count.sum()) if count.sum() else float("nan")


def mce(confidence: np.ndarray, correct: np.ndarray, bins: int = NUM_BINS) -> float:
    """Maximum calibration error: the largest gap among the bins of [`ece`] that hold a row."""
    count, confidence_sum, correct_sum = _bin_sums(confidence, correct, bins)
    full = count > 0
    return float((np.abs(confidence_sum - correct_sum)[full] / count[full]).max()) if full.any() else float("nan")


def equal_mass_ece(confidence: np.ndarray, correct: np.ndarray, bins: int = NUM_BINS) -> float:
    """
    Calibration error over bins of equal mass (adaptive ECE): each bin holds N / `bins` rows.

    A row on the border of two bins is split between them in proportion, and rows of equal confidence are split alike;
    so the value depends neither on the order of the rows nor on whether `bins` divides N.

    Args:
        confidence (`np.ndarray` of shape `[N]`): Probability of the predicted option.
        correct (`np.ndarray` of shape `[N]`): Whether the prediction is right.
        bins (`int`, *optional*, defaults to 15): Number of bins.
    """
    confidence, correct = _as_pair("confidence", confidence, "correct", correct)
    if not len(confidence):
        return float("nan")
    _, group, size = np.unique(confidence, return_inverse=True, return_counts=True)
    gap = np.append(0, np.bincount(group, confidence - correct).cumsum())
    borders = np.interp(np.linspace(0, len(confidence), bins + 1), np.append(0, size.cumsum()), gap)
    return float(np.abs(np.diff(borders)).sum() / len(confidence))


def classwise_ece(
    probs: np.ndarray, labels: np.ndarray, num_options: np.ndarray | None = None, bins: int = NUM_BINS
) -> float:
    """
    Class-wise ECE: the ECE of each option's own probability, averaged over the options.

    Args:
        probs (`np.ndarray` of shape `[N, K]`): Probabilities.
        labels (`np.ndarray` of shape `[N]`): Correct options, all known.
        num_options (`np.ndarray` of shape `[N]`, *optional*):
            How many options each row offers, by default K. Option k is evaluated on the rows that offer it.
        bins (`int`, *optional*, defaults to 15): Number of bins on [0, 1].
    """
    probs, labels = as_labelled(probs, labels)
    counts = np.full(len(labels), probs.shape[1]) if num_options is None else np.asarray(num_options)
    if not len(labels):
        return float("nan")
    errors = [
        ece(probs[counts > k, k], labels[counts > k] == k, bins) for k in range(min(probs.shape[1], counts.max()))
    ]
    return float(np.mean(errors))


def ece_floor(confidence: np.ndarray, bins: int = NUM_BINS) -> float:
    """
    Expected [`ece`] of a perfectly calibrated model with these confidences: what sampling noise alone produces.

    An ECE near this floor is no evidence of miscalibration; the floor falls like 1/sqrt(N). Bins of up to 64 rows are
    computed exactly (mean absolute deviation of a Poisson binomial distribution), larger ones with the normal
    approximation.

    Args:
        confidence (`np.ndarray` of shape `[N]`): Probability of the predicted option.
        bins (`int`, *optional*, defaults to 15): Number of bins on [0, 1].
    """
    confidence = np.clip(np.asarray(confidence, dtype=np.float64), 0, 1)
    if not len(confidence):
        return float("nan")
    index = bin_index(confidence, bins)
    expected = 0.0
    for b in np.unique(index):
        inside = confidence[index == b]
        if len(inside) > _EXACT_ROWS:
            expected += float(np.sqrt(2 * (inside * (1 - inside)).sum() / np.pi))
            continue
        chance = np.ones(1)  # probability of 0, 1, 2, ... correct answers in this bin
        for p in inside:
            chance = np.append(chance * (1 - p), 0) + np.append(0, chance * p)
        expected += float(np.abs(np.arange(len(chance)) - inside.sum()) @ chance)
    return expected / len(confidence)


def reliability_bins(
    confidence: np.ndarray, correct: np.ndarray, bins: int = NUM_BINS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Data of a reliability diagram, over the bins of [`ece`]; rows with confidence 1.0 are counted in the last bin.

    Args:
        confidence (`np.ndarray` of shape `[N]`): Probability of the predicted option.
        correct (`np.ndarray` of shape `[N]`): Whether the prediction is right.
        bins (`int`, *optional*, defaults to 15): Number of bins on [0, 1].

    Returns:
        `tuple`: `(count, confidence, accuracy)`, each of shape `[bins]`; the means of an empty bin are NaN.
    """
    sums = _bin_sums(confidence, correct, bins)
    count, confidence_sum, correct_sum = (np.append(total[:-2], total[-2] + total[-1]) for total in sums)
    with np.errstate(invalid="ignore"):
        return count, confidence_sum / count, correct_sum / count


def bin_index(confidence: np.ndarray, bins: int = NUM_BINS) -> np.ndarray:
    """Index `[N]` of the bin of [`ece`] of each confidence; bins are closed on the left, 1.0 has one of its own."""
    index = np.searchsorted(np.linspace(0, 1, bins + 1), confidence, side="right") - 1
    return index.clip(0, bins)  # rounding may put a probability slightly outside [0, 1]


def _bin_sums(confidence: np.ndarray, correct: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per bin, `[bins + 1]` each: number of rows, sum of confidences, number of correct rows."""
    confidence, correct = _as_pair("confidence", confidence, "correct", correct)
    index = bin_index(confidence, bins)
    count, *sums = (np.bincount(index, weights, bins + 1) for weights in (None, confidence, correct))
    return count, sums[0], sums[1]


def _as_pair(first: str, one: np.ndarray, second: str, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    one, other = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if one.ndim != 1 or one.shape != other.shape:
        raise ValueError(f"{first} and {second} must both be [N], not {one.shape} and {other.shape}")
    return one, other
