"""Metrics on plain arrays. Undefined cases (no rows, a single class) are NaN, never an exception."""

from __future__ import annotations

import numpy as np

NUM_BINS = 15
_SMALLEST_PROB = 1e-10


def is_correct(probs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """
    Whether the most probable option of each row is the right one.

    Args:
        probs (`np.ndarray` of shape `[N, K]`): Probabilities. A row with NaN counts as wrong.
        labels (`np.ndarray` of shape `[N]`): Correct options, all known.

    Returns:
        `np.ndarray` of shape `[N]`: Booleans.
    """
    probs, labels = _as_labelled(probs, labels)
    # `argmax` takes NaN for the largest number, so a broken row could be "right" by accident.
    return (probs.argmax(axis=1) == labels) & ~np.isnan(probs).any(axis=1)


def accuracy(probs: np.ndarray, labels: np.ndarray) -> float:
    """Share of rows whose most probable option is the label; see [`is_correct`]."""
    return _mean(is_correct(probs, labels))


def nll(probs: np.ndarray, labels: np.ndarray) -> float:
    """Mean negative log-likelihood of the labels in nats, with probabilities clamped at 1e-10."""
    probs, labels = _as_labelled(probs, labels)
    return _mean(-np.log(np.maximum(probs[np.arange(len(labels)), labels], _SMALLEST_PROB)))


def brier(probs: np.ndarray, labels: np.ndarray) -> float:
    """Mean squared distance between the probabilities and the one-hot labels, summed over options (0 to 2)."""
    probs, labels = _as_labelled(probs, labels)
    one_hot = labels[:, None] == np.arange(probs.shape[1])
    return _mean(((probs - one_hot) ** 2).sum(axis=1))


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


def reliability_bins(
    confidence: np.ndarray, correct: np.ndarray, bins: int = NUM_BINS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    The bars of a reliability diagram, over the bins of [`ece`]; confidence 1.0 is drawn in the last bin.

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


def aupr(positive: np.ndarray, score: np.ndarray) -> float:
    """
    Area under the precision-recall curve as a step-wise sum (average precision).

    Args:
        positive (`np.ndarray` of shape `[N]`): Whether each row is a positive.
        score (`np.ndarray` of shape `[N]`): Larger means more surely positive; NaN ranks last.

    Returns:
        `float`: NaN unless there are both positives and negatives.
    """
    from sklearn.metrics import average_precision_score  # takes a second to import: not for `dappr train typo.yaml`

    positive, ranks = _as_ranking(positive, score)
    return float(average_precision_score(positive, ranks)) if 0 < positive.sum() < len(positive) else float("nan")


def auroc(positive: np.ndarray, score: np.ndarray) -> float:
    """Area under the ROC curve, with the arguments and the undefined cases of [`aupr`]."""
    from sklearn.metrics import roc_auc_score

    positive, ranks = _as_ranking(positive, score)
    return float(roc_auc_score(positive, ranks)) if 0 < positive.sum() < len(positive) else float("nan")


def confidence_aupr(correct: np.ndarray, aleatoric: np.ndarray) -> float:
    """AUPR of telling right answers (positives) from wrong ones by minus the aleatoric uncertainty."""
    return aupr(correct, -np.asarray(aleatoric, dtype=np.float64))


def ood_scores(uncertainty_id: np.ndarray, uncertainty_ood: np.ndarray) -> dict[str, float]:
    """
    How well an uncertainty tells in-distribution items (positives) from out-of-distribution ones.

    Args:
        uncertainty_id (`np.ndarray` of shape `[N]`): Larger means more uncertain; NaN ranks as most uncertain.
        uncertainty_ood (`np.ndarray` of shape `[M]`): The same for the out-of-distribution items.

    Returns:
        `dict[str, float]`: `auroc` and `aupr`. Chance level of the AUPR is N / (N + M).
    """
    uncertainty = np.concatenate([np.asarray(uncertainty_id), np.asarray(uncertainty_ood)]).astype(np.float64)
    is_id = np.arange(len(uncertainty)) < len(uncertainty_id)
    return {"auroc": auroc(is_id, -uncertainty), "aupr": aupr(is_id, -uncertainty)}


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _as_labelled(probs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    probs, labels = np.asarray(probs, dtype=np.float64), np.asarray(labels)
    if probs.ndim != 2 or labels.shape != probs.shape[:1]:
        raise ValueError(f"probs must be [N, K] and labels [N], not {probs.shape} and {labels.shape}")
    # An unknown label, -1, would silently index the last option.
    if len(labels) and not 0 <= labels.min() <= labels.max() < probs.shape[1]:
        raise ValueError(f"labels must lie in [0, {probs.shape[1]}); leave rows of unknown label out")
    return probs, labels.astype(np.int64)


def _as_ranking(positive: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    positive, score = np.asarray(positive, dtype=bool), np.asarray(score, dtype=np.float64)
    if positive.ndim != 1 or positive.shape != score.shape:
        raise ValueError(f"positive and score must both be [N], not {positive.shape} and {score.shape}")
    # Both areas depend on the order alone; ranks keep ties and let NaN and Inf past scikit-learn's finiteness check.
    score = np.where(np.isnan(score), -np.inf, score)
    return positive, np.unique(score, return_inverse=True)[1]


def _bin_sums(confidence: np.ndarray, correct: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    confidence, correct = np.asarray(confidence, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    if confidence.ndim != 1 or confidence.shape != correct.shape:
        raise ValueError(f"confidence and correct must both be [N], not {confidence.shape} and {correct.shape}")
    index = np.searchsorted(np.linspace(0, 1, bins + 1), confidence, side="right") - 1
    index = index.clip(0, bins)  # rounding may carry a probability a hair beyond [0, 1]
    count, *sums = (np.bincount(index, weights, bins + 1) for weights in (None, confidence, correct))
    return count, sums[0], sums[1]
