"""
Metrics on plain arrays. Undefined cases (no rows, a single class) are NaN, never an exception.

`bootstrap_metrics.py` computes the same numbers for many resamples at once; a test holds the two together. What tables
call a metric, and which of these functions it is, stands in `metric_columns.py`.
"""

from __future__ import annotations

import numpy as np

NUM_BINS = 15
COVERAGE, RISK, TPR = 0.8, 0.05, 0.95  # where the curves of the results file are read
_EXACT_ROWS = 64  # bins up to this size get the exact noise floor, larger ones its normal limit
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


def macro_f1(probs: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float | np.ndarray:
    """
    F1 score of each class, meant over the classes that occur among labels or predictions.

    For multiple choice the classes are the options' positions: a low value beside a high accuracy says that some
    letters are hardly ever right, or hardly ever chosen. A row with NaN predicts no class.

    Args:
        probs (`np.ndarray` of shape `[N, K]`): Probabilities.
        labels (`np.ndarray` of shape `[N]`): Correct options, all known.
        weights (`np.ndarray` of shape `[R, N]`, *optional*): How often each row counts, for R resamples at once.

    Returns:
        `float`, or with weights `np.ndarray` of shape `[R]`.
    """
    probs, labels = _as_labelled(probs, labels)
    drawn = np.ones((1, len(labels))) if weights is None else np.asarray(weights, dtype=np.float64)
    # Each resample has its own run of classes, and one more for rows that predict none.
    classes = probs.shape[1] + 1
    predicted = np.where(np.isnan(probs).any(axis=1), classes - 1, probs.argmax(axis=1))
    offset = classes * np.arange(len(drawn))[:, None]

    def per_class(index: np.ndarray, counts: np.ndarray) -> np.ndarray:
        found = np.bincount((index + offset).ravel(), counts.ravel(), classes * len(drawn))
        return found.reshape(len(drawn), classes)[:, :-1]

    right = per_class(labels, drawn * (predicted == labels))
    occurs = per_class(labels, drawn) + per_class(predicted, drawn)
    f1 = np.divide(2 * right, occurs, out=np.zeros(right.shape), where=occurs > 0)
    present = (occurs > 0).sum(axis=1)
    means = np.divide(f1.sum(axis=1), present, out=np.full(len(drawn), np.nan), where=present > 0)
    return float(means[0]) if weights is None else means


def nll(probs: np.ndarray, labels: np.ndarray) -> float:
    """Mean negative log-likelihood of the labels in nats, with probabilities clamped at 1e-10."""
    return _mean(nll_rows(probs, labels))


def nll_rows(probs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The terms of [`nll`], one per row."""
    probs, labels = _as_labelled(probs, labels)
    return -np.log(np.maximum(probs[np.arange(len(labels)), labels], _SMALLEST_PROB))


def brier(probs: np.ndarray, labels: np.ndarray) -> float:
    """Mean squared distance between the probabilities and the one-hot labels, summed over options (0 to 2)."""
    return _mean(brier_rows(probs, labels))


def brier_rows(probs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The terms of [`brier`], one per row."""
    probs, labels = _as_labelled(probs, labels)
    one_hot = labels[:, None] == np.arange(probs.shape[1])
    return ((probs - one_hot) ** 2).sum(axis=1)


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
    Calibration error over bins that hold equally many rows (adaptive ECE).

    A row on the border of two bins counts for both in proportion, and rows of equal confidence share one gap; so the
    number depends neither on the order of the rows nor on whether `bins` divides their number.

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
    Mean over the options of the calibration error of that option's own probability.

    Args:
        probs (`np.ndarray` of shape `[N, K]`): Probabilities.
        labels (`np.ndarray` of shape `[N]`): Correct options, all known.
        num_options (`np.ndarray` of shape `[N]`, *optional*):
            How many options each row offers. An option is judged on the rows that offer it.
        bins (`int`, *optional*, defaults to 15): Number of bins on [0, 1].
    """
    probs, labels = _as_labelled(probs, labels)
    counts = np.full(len(labels), probs.shape[1]) if num_options is None else np.asarray(num_options)
    if not len(labels):
        return float("nan")
    errors = [
        ece(probs[counts > k, k], labels[counts > k] == k, bins) for k in range(min(probs.shape[1], counts.max()))
    ]
    return float(np.mean(errors))


def ece_floor(confidence: np.ndarray, bins: int = NUM_BINS) -> float:
    """
    The [`ece`] that a perfectly calibrated model with these confidences would show on average, from chance alone.

    An ECE near this floor says nothing against the model; the floor falls like 1/sqrt(N). Bins of up to 64 rows are
    exact (the mean absolute deviation of a sum of independent coins), larger ones take the normal limit.

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
        chance = np.ones(1)  # of 0, 1, 2, ... right answers
        for p in inside:
            chance = np.append(chance * (1 - p), 0) + np.append(0, chance * p)
        expected += float(np.abs(np.arange(len(chance)) - inside.sum()) @ chance)
    return expected / len(confidence)


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
    found, false = _let_through(positive, score)
    if not _has_both(found, false):
        return float("nan")
    return float(np.diff(found, prepend=0) @ (found / (found + false)) / found[-1])


def auroc(positive: np.ndarray, score: np.ndarray) -> float:
    """Area under the ROC curve, with the arguments and the undefined cases of [`aupr`]."""
    found, false = _let_through(positive, score)
    if not _has_both(found, false):
        return float("nan")
    new = np.diff(found, prepend=0)  # equal scores count half
    return float(np.diff(false, prepend=0) @ (found - new / 2) / (found[-1] * false[-1]))


def confidence_aupr(correct: np.ndarray, aleatoric: np.ndarray) -> float:
    """AUPR of telling right answers (positives) from wrong ones by minus the aleatoric uncertainty."""
    return aupr(correct, -np.asarray(aleatoric, dtype=np.float64))


def confidence_auroc(correct: np.ndarray, aleatoric: np.ndarray) -> float:
    """AUROC of telling right answers (positives) from wrong ones by minus the aleatoric uncertainty."""
    return auroc(correct, -np.asarray(aleatoric, dtype=np.float64))


def fpr_at_tpr(positive: np.ndarray, score: np.ndarray, tpr: float = TPR) -> float:
    """
    The share of negatives let through by the strictest threshold that lets at least `tpr` of the positives through.

    Args:
        positive (`np.ndarray` of shape `[N]`): Whether each row is a positive.
        score (`np.ndarray` of shape `[N]`): Larger means more surely positive; NaN ranks last.
        tpr (`float`, *optional*, defaults to 0.95): The share of positives.
    """
    found, false = _let_through(positive, score)
    if not _has_both(found, false):
        return float("nan")
    return float(false[np.argmax(found >= (tpr - 1e-12) * found[-1])] / false[-1])


def _let_through(positive: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Positives and negatives above each threshold, the strictest first.

    scikit-learn has these curves, but takes seconds to import: more than a second evaluation takes. The tests compare.
    """
    positive, ranks = _as_ranking(positive, score)
    return np.bincount(ranks, positive)[::-1].cumsum(), np.bincount(ranks, ~positive)[::-1].cumsum()


def _has_both(positives: np.ndarray, negatives: np.ndarray) -> bool:
    """Whether an area is defined: there are positives and negatives."""
    return len(positives) > 0 and positives[-1] > 0 and negatives[-1] > 0


def risk_curve(correct: np.ndarray, uncertainty: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    The risk-coverage curve: answer the surest rows, leave the rest.

    Args:
        correct (`np.ndarray` of shape `[N]`): Whether each answer is right.
        uncertainty (`np.ndarray` of shape `[N]`): Larger means less sure; NaN is the least sure.

    Returns:
        `tuple`: `(coverage, risk)`, one point per threshold: the share answered and the share of it that is wrong.
    """
    right, wrong = _let_through(correct, -np.asarray(uncertainty, dtype=np.float64))
    size = right + wrong
    return size / max(len(correct), 1), wrong / size


def aurc(correct: np.ndarray, uncertainty: np.ndarray) -> float:
    """
    Area under the risk-coverage curve: the mean, over k = 1..N, of the risk among the k surest rows.

    Rows of equal uncertainty count with their mean risk, which is the mean over all orders of them.

    Args:
        correct (`np.ndarray` of shape `[N]`): Whether each answer is right.
        uncertainty (`np.ndarray` of shape `[N]`): Larger means less sure; NaN is the least sure.
    """
    correct, ranks = _as_ranking(correct, -np.asarray(uncertainty, dtype=np.float64))
    if not len(correct):
        return float("nan")
    size = np.bincount(ranks)
    wrong = np.repeat((np.bincount(ranks, ~correct) / size)[::-1], size[::-1])
    return float((wrong.cumsum() / np.arange(1, len(wrong) + 1)).mean())


def excess_aurc(correct: np.ndarray, uncertainty: np.ndarray) -> float:
    """[`aurc`] minus that of a perfect ranking (all right answers first) with as many mistakes."""
    correct = np.asarray(correct, dtype=bool)
    return aurc(correct, uncertainty) - aurc(correct, ~correct)


def risk_at_coverage(correct: np.ndarray, uncertainty: np.ndarray, coverage: float = COVERAGE) -> float:
    """Share of wrong answers under the strictest threshold that answers at least `coverage` of the rows."""
    answered, risk = risk_curve(correct, uncertainty)
    return float(risk[np.argmax(answered >= coverage - 1e-12)]) if len(risk) else float("nan")


def coverage_at_risk(correct: np.ndarray, uncertainty: np.ndarray, risk: float = RISK) -> float:
    """The largest share of rows that a threshold can answer with at most `risk` of them wrong; 0 if there is none."""
    answered, wrong = risk_curve(correct, uncertainty)
    return float(answered[wrong <= risk + 1e-12].max(initial=0)) if len(wrong) else float("nan")


def ood_scores(uncertainty_id: np.ndarray, uncertainty_ood: np.ndarray) -> dict[str, float]:
    """
    How well an uncertainty tells in-distribution items (positives) from out-of-distribution ones.

    Args:
        uncertainty_id (`np.ndarray` of shape `[N]`): Larger means more uncertain; NaN ranks as most uncertain.
        uncertainty_ood (`np.ndarray` of shape `[M]`): The same for the out-of-distribution items.

    Returns:
        `dict[str, float]`: `auroc`; `aupr` (in-distribution items positive, as the paper; chance level N / (N + M));
        `aupr_ood` (the others positive; chance level M / (N + M)); `fpr95`, the share of out-of-distribution items
        taken for in-distribution ones when 95 % of the latter are.
    """
    uncertainty = np.concatenate([np.asarray(uncertainty_id), np.asarray(uncertainty_ood)]).astype(np.float64)
    is_id = np.arange(len(uncertainty)) < len(uncertainty_id)
    # The flipped ranking needs the flipped order, so NaN, the most uncertain, becomes the surest out-of-distribution.
    foreign = np.where(np.isnan(uncertainty), np.inf, uncertainty)
    return {
        "auroc": auroc(is_id, -uncertainty),
        "aupr": aupr(is_id, -uncertainty),
        "aupr_ood": aupr(~is_id, foreign),
        "fpr95": fpr_at_tpr(is_id, -uncertainty),
    }


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
    # Every curve depends on the order alone, so NaN and Inf have a place too; equal scores stay one step.
    score = np.where(np.isnan(score), -np.inf, score)
    return positive, np.unique(score, return_inverse=True)[1]


def bin_index(confidence: np.ndarray, bins: int = NUM_BINS) -> np.ndarray:
    """The bin of [`ece`] that each confidence lies in: closed on the left, exactly 1.0 in a bin of its own."""
    index = np.searchsorted(np.linspace(0, 1, bins + 1), confidence, side="right") - 1
    return index.clip(0, bins)  # rounding may carry a probability a hair beyond [0, 1]


def _as_pair(first: str, one: np.ndarray, second: str, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    one, other = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if one.ndim != 1 or one.shape != other.shape:
        raise ValueError(f"{first} and {second} must both be [N], not {one.shape} and {other.shape}")
    return one, other


def _bin_sums(confidence: np.ndarray, correct: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    confidence, correct = _as_pair("confidence", confidence, "correct", correct)
    index = bin_index(confidence, bins)
    count, *sums = (np.bincount(index, weights, bins + 1) for weights in (None, confidence, correct))
    return count, sums[0], sums[1]
