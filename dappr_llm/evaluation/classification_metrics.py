"""
Accuracy, balanced accuracy, macro F1, NLL and Brier score of predicted probabilities, on plain numpy arrays.

Undefined cases (no rows) are NaN, never an exception; so are those of `calibration_metrics.py` and
`ranking_metrics.py`. `metric_columns.py` declares every metric and names the function that computes it;
`bootstrap_metrics.py` computes the same values for many bootstrap resamples at once.
"""

from __future__ import annotations

import numpy as np

_SMALLEST_PROB = 1e-10


def is_correct(probs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """
    Whether the most probable option of each row is the label.

    Args:
        probs (`np.ndarray` of shape `[N, K]`): Probabilities. A row with NaN counts as wrong.
        labels (`np.ndarray` of shape `[N]`): Correct options, all known.

    Returns:
        `np.ndarray` of shape `[N]`: Booleans.
    """
    probs, labels = as_labelled(probs, labels)
    # `argmax` treats NaN as the largest value, so a row with NaN could count as correct by accident.
    return (probs.argmax(axis=1) == labels) & ~np.isnan(probs).any(axis=1)


def accuracy(probs: np.ndarray, labels: np.ndarray) -> float:
    """Share of rows whose most probable option is the label; see [`is_correct`]."""
    return _mean(is_correct(probs, labels))


def chance(num_options: np.ndarray) -> float:
    """Expected accuracy of a uniform guess among each row's own options `[N]`."""
    return _mean(1 / np.asarray(num_options, dtype=np.float64))


def balanced_accuracy(probs: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float | np.ndarray:
    """
    Recall of each class, averaged (unweighted) over the classes that occur among the labels.

    The arguments are those of [`macro_f1`].
    """
    right, support, _ = _class_counts(probs, labels, weights)
    return _mean_over_classes(right, support, weights)


def macro_f1(probs: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float | np.ndarray:
    """
    F1 score of each class, averaged (unweighted) over the classes that occur among labels or predictions.

    For multiple choice the classes are the answer letters: a low value with a high accuracy means that some letters
    are rarely correct or rarely predicted. A row with NaN predicts no class.

    Args:
        probs (`np.ndarray` of shape `[N, K]`): Probabilities.
        labels (`np.ndarray` of shape `[N]`): Correct options, all known.
        weights (`np.ndarray` of shape `[R, N]`, *optional*): How often each row was drawn in each of R resamples.

    Returns:
        `float`, or with weights `np.ndarray` of shape `[R]`.
    """
    right, support, predicted = _class_counts(probs, labels, weights)
    return _mean_over_classes(2 * right, support + predicted, weights)


def predicted_classes(probs: np.ndarray) -> np.ndarray:
    """The most probable class of each row of probabilities `[N, K]`; K, which is no class, for a row with NaN."""
    return np.where(np.isnan(probs).any(axis=1), probs.shape[1], probs.argmax(axis=1))


def _class_counts(
    probs: np.ndarray, labels: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Right predictions, labels and predictions of each class, `[R, K]` each; R = 1 without weights."""
    probs, labels = as_labelled(probs, labels)
    drawn = np.ones((1, len(labels))) if weights is None else np.asarray(weights, dtype=np.float64)
    # One bin per resample and class, plus one per resample for rows that predict no class.
    classes = probs.shape[1] + 1
    predicted = predicted_classes(probs)
    offset = classes * np.arange(len(drawn))[:, None]

    def per_class(index: np.ndarray, counts: np.ndarray) -> np.ndarray:
        found = np.bincount((index + offset).ravel(), counts.ravel(), classes * len(drawn))
        return found.reshape(len(drawn), classes)[:, :-1]

    return per_class(labels, drawn * (predicted == labels)), per_class(labels, drawn), per_class(predicted, drawn)


def _mean_over_classes(one: np.ndarray, other: np.ndarray, weights: np.ndarray | None) -> float | np.ndarray:
    """Mean of `one / other` `[R, K]` over the classes whose denominator is not 0; NaN without any."""
    ratios = np.divide(one, other, out=np.zeros(one.shape), where=other > 0)
    present = (other > 0).sum(axis=1)
    means = np.divide(ratios.sum(axis=1), present, out=np.full(len(one), np.nan), where=present > 0)
    return float(means[0]) if weights is None else means


def nll(probs: np.ndarray, labels: np.ndarray) -> float:
    """Mean negative log-likelihood of the labels in nats, with probabilities clamped at 1e-10."""
    return _mean(nll_rows(probs, labels))


def nll_rows(probs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Negative log-likelihood of each row, `[N]`; see [`nll`]."""
    probs, labels = as_labelled(probs, labels)
    return -np.log(np.maximum(probs[np.arange(len(labels)), labels], _SMALLEST_PROB))


def brier(probs: np.ndarray, labels: np.ndarray) -> float:
    """Mean squared distance between the probabilities and the one-hot labels, summed over options (0 to 2)."""
    return _mean(brier_rows(probs, labels))


def brier_rows(probs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Brier score of each row, `[N]`; see [`brier`]."""
    probs, labels = as_labelled(probs, labels)
    one_hot = labels[:, None] == np.arange(probs.shape[1])
    return ((probs - one_hot) ** 2).sum(axis=1)


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def as_labelled(probs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`probs` `[N, K]` as float64 and `labels` `[N]` as int64; `ValueError` if shapes or labels do not fit."""
    probs, labels = np.asarray(probs, dtype=np.float64), np.asarray(labels)
    if probs.ndim != 2 or labels.shape != probs.shape[:1]:
        raise ValueError(f"probs must be [N, K] and labels [N], not {probs.shape} and {labels.shape}")
    # The label -1 (unknown) would silently index the last option.
    if len(labels) and not 0 <= labels.min() <= labels.max() < probs.shape[1]:
        raise ValueError(f"labels must lie in [0, {probs.shape[1]}); leave rows of unknown label out")
    return probs, labels.astype(np.int64)
