"""
Ranking metrics, on plain numpy arrays: AUROC, AUPR and FPR95; risk-coverage curves; out-of-distribution detection.

Undefined cases (no rows, a single class) are NaN, never an exception. scikit-learn computes the same curves but takes
longer to import than an evaluation takes to run; the tests compare the two.
"""

from __future__ import annotations

import numpy as np

COVERAGE, RISK, TPR = 0.8, 0.05, 0.95  # operating points at which a results file reports the curves


def aupr(positive: np.ndarray, score: np.ndarray) -> float:
    """
    Area under the precision-recall curve as a step-wise sum (average precision).

    Args:
        positive (`np.ndarray` of shape `[N]`): Whether each row is a positive.
        score (`np.ndarray` of shape `[N]`): Larger means more likely positive; NaN ranks last.

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
    new = np.diff(found, prepend=0)  # pairs with equal scores count half
    return float(np.diff(false, prepend=0) @ (found - new / 2) / (found[-1] * false[-1]))


def confidence_aupr(correct: np.ndarray, aleatoric: np.ndarray) -> float:
    """AUPR of correct (positives) against wrong answers `[N]`, ranked by minus the aleatoric uncertainty `[N]`."""
    return aupr(correct, -np.asarray(aleatoric, dtype=np.float64))


def confidence_auroc(correct: np.ndarray, aleatoric: np.ndarray) -> float:
    """AUROC of correct (positives) against wrong answers `[N]`, ranked by minus the aleatoric uncertainty `[N]`."""
    return auroc(correct, -np.asarray(aleatoric, dtype=np.float64))


def failure_auroc(correct: np.ndarray, uncertainty: np.ndarray) -> float:
    """AUROC of correct (positives) against wrong answers `[N]`, ranked by minus any uncertainty `[N]`; NaN is last."""
    return auroc(correct, -np.asarray(uncertainty, dtype=np.float64))


def risk(correct: np.ndarray, uncertainty: np.ndarray | None = None) -> float:
    """Share of wrong answers among all rows."""
    return float(1 - np.asarray(correct, dtype=np.float64).mean()) if len(correct) else float("nan")


def fpr_at_tpr(positive: np.ndarray, score: np.ndarray, tpr: float = TPR) -> float:
    """
    False positive rate at the strictest threshold whose true positive rate is at least `tpr`.

    Args:
        positive (`np.ndarray` of shape `[N]`): Whether each row is a positive.
        score (`np.ndarray` of shape `[N]`): Larger means more likely positive; NaN ranks last.
        tpr (`float`, *optional*, defaults to 0.95): The required true positive rate.
    """
    found, false = _let_through(positive, score)
    if not _has_both(found, false):
        return float("nan")
    return float(false[np.argmax(found >= (tpr - 1e-12) * found[-1])] / false[-1])


def ood_scores(uncertainty_id: np.ndarray, uncertainty_ood: np.ndarray) -> dict[str, float]:
    """
    OOD detection metrics of an uncertainty; in-distribution items are the positives.

    Args:
        uncertainty_id (`np.ndarray` of shape `[N]`): Larger means more uncertain; NaN ranks as most uncertain.
        uncertainty_ood (`np.ndarray` of shape `[M]`): The same for the out-of-distribution items.

    Returns:
        `dict[str, float]`: `auroc`; `aupr` (in-distribution items positive, as in the paper; chance level
        N / (N + M)); `aupr_ood` (out-of-distribution items positive; chance level M / (N + M)); `fpr95`, the share of
        out-of-distribution items accepted at the threshold that accepts 95 % of the in-distribution ones.
    """
    uncertainty = np.concatenate([np.asarray(uncertainty_id), np.asarray(uncertainty_ood)]).astype(np.float64)
    is_id = np.arange(len(uncertainty)) < len(uncertainty_id)
    # With OOD items as positives the score is the uncertainty itself, in which NaN must rank first instead of last.
    ood_score = np.where(np.isnan(uncertainty), np.inf, uncertainty)
    return {
        "auroc": auroc(is_id, -uncertainty),
        "aupr": aupr(is_id, -uncertainty),
        "aupr_ood": aupr(~is_id, ood_score),
        "fpr95": fpr_at_tpr(is_id, -uncertainty),
    }


def risk_curve(correct: np.ndarray, uncertainty: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    The risk-coverage curve of selective prediction: answer the least uncertain rows, abstain on the rest.

    Args:
        correct (`np.ndarray` of shape `[N]`): Whether each answer is right.
        uncertainty (`np.ndarray` of shape `[N]`): NaN ranks as most uncertain.

    Returns:
        `tuple`: `(coverage, risk)`, one entry per distinct uncertainty: the share of rows answered, and the share of
        these that is wrong.
    """
    right, wrong = _let_through(correct, -np.asarray(uncertainty, dtype=np.float64))
    size = right + wrong
    return size / max(len(correct), 1), wrong / size


def aurc(correct: np.ndarray, uncertainty: np.ndarray) -> float:
    """
    Area under the risk-coverage curve: the mean, over k = 1..N, of the risk among the k least uncertain rows.

    Ties count with their mean risk, which is the expectation over all orders of the tied rows.

    Args:
        correct (`np.ndarray` of shape `[N]`): Whether each answer is right.
        uncertainty (`np.ndarray` of shape `[N]`): NaN ranks as most uncertain.
    """
    correct, ranks = _as_ranking(correct, -np.asarray(uncertainty, dtype=np.float64))
    if not len(correct):
        return float("nan")
    size = np.bincount(ranks)
    wrong = np.repeat((np.bincount(ranks, ~correct) / size)[::-1], size[::-1])
    return float((wrong.cumsum() / np.arange(1, len(wrong) + 1)).mean())


def excess_aurc(correct: np.ndarray, uncertainty: np.ndarray) -> float:
    """[`aurc`] minus the AURC of a perfect ranking (all correct answers first) of the same answers."""
    correct = np.asarray(correct, dtype=bool)
    return aurc(correct, uncertainty) - aurc(correct, ~correct)


def risk_at_coverage(correct: np.ndarray, uncertainty: np.ndarray, coverage: float = COVERAGE) -> float:
    """Risk (share of wrong answers) at the strictest threshold that answers at least `coverage` of the rows."""
    answered, risk = risk_curve(correct, uncertainty)
    return float(risk[np.argmax(answered >= coverage - 1e-12)]) if len(risk) else float("nan")


def coverage_at_risk(correct: np.ndarray, uncertainty: np.ndarray, risk: float = RISK) -> float:
    """Largest coverage of a threshold whose share of wrong answers is at most `risk`; 0 if there is none."""
    answered, wrong = risk_curve(correct, uncertainty)
    return float(answered[wrong <= risk + 1e-12].max(initial=0)) if len(wrong) else float("nan")


def _let_through(positive: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of positives and of negatives accepted at each threshold, `[T]` each, from the strictest on."""
    positive, ranks = _as_ranking(positive, score)
    return np.bincount(ranks, positive)[::-1].cumsum(), np.bincount(ranks, ~positive)[::-1].cumsum()


def _has_both(positives: np.ndarray, negatives: np.ndarray) -> bool:
    """Whether the area under a curve is defined: there is at least one positive and one negative."""
    return len(positives) > 0 and positives[-1] > 0 and negatives[-1] > 0


def _as_ranking(positive: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`positive` `[N]` as booleans, and the rank `[N]` of each score from 0 up; equal scores have equal ranks."""
    positive, score = np.asarray(positive, dtype=bool), np.asarray(score, dtype=np.float64)
    if positive.ndim != 1 or positive.shape != score.shape:
        raise ValueError(f"positive and score must both be [N], not {positive.shape} and {score.shape}")
    # Every curve depends on the order alone, so NaN and Inf only need a place in it.
    score = np.where(np.isnan(score), -np.inf, score)
    return positive, np.unique(score, return_inverse=True)[1]
