"""
Selective prediction with a controlled risk: the threshold on an uncertainty above which a model abstains.

Works on plain arrays. The mask `fit_rows` separates the rows used for choices (which uncertainty, which threshold to
test first) from the held-out rows that the statistical guarantee is computed on.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.errors import UserError
from ..evaluation import ranking_metrics
from .rule import ABSTAIN_ON, abstention_score

_LEVELS = 20  # size of the grid of thresholds


def fit_abstention(
    probs: np.ndarray,
    epistemic: np.ndarray,
    correct: np.ndarray,
    fit_rows: np.ndarray,
    max_risk: float | None,
    min_coverage: float | None,
    confidence: float,
    abstain_on: str,
) -> dict[str, Any]:
    """
    Choose the threshold of the abstention rule.

    Args:
        probs (`np.ndarray` of shape `[N, W]`):
            Calibrated probabilities.
        epistemic (`np.ndarray` of shape `[N]`):
            Epistemic uncertainty.
        correct (`np.ndarray` of shape `[N]`):
            Whether the most probable option is right.
        fit_rows (`np.ndarray` of shape `[N]`):
            Mask of the rows for model choices; the guarantee is computed on the others.
        max_risk (`float`, *optional*):
            Largest allowed error rate among answered rows; 0.05 if neither this nor `min_coverage` is given.
        min_coverage (`float`, *optional*):
            Smallest allowed fraction of answered rows. Without `max_risk` it alone determines the threshold.
        confidence (`float`):
            Confidence level of the risk bound.
        abstain_on (`str`):
            `"aleatoric"`, `"epistemic"`, or `"auto"`: the one with the larger AUROC for errors on the fit rows.

    Returns:
        The `abstention` section of `decision.json`: score, threshold (`None`: always abstain), coverage, risk and its
        upper bound on the held-out rows, and the requested limits. See [`choose_level`] for the guarantee.
    """
    name = abstain_on
    if name == "auto":
        areas = {
            k: ranking_metrics.auroc(~correct[fit_rows], abstention_score(k, probs, epistemic)[fit_rows])
            for k in ABSTAIN_ON
        }
        # Without an error among the fit rows both AUROCs are NaN, and the first score is taken.
        name = max(ABSTAIN_ON, key=lambda k: np.nan_to_num(areas[k], nan=0.5))
    values = abstention_score(name, probs, epistemic)
    # A small margin, so that rounding (float32, JSON) does not move a row across the threshold.
    grid = np.quantile(values[fit_rows], np.arange(1, _LEVELS + 1) / _LEVELS) * (1 + 1e-6)
    rest = ~fit_rows
    wanted = max_risk if max_risk is not None or min_coverage is not None else 0.05
    if wanted is None:
        shares = [(values[rest] <= limit).mean() for limit in grid]
        level: int | None = next((i for i, share in enumerate(shares) if share >= (min_coverage or 0)), _LEVELS - 1)
    else:
        level = choose_level(values, correct, fit_rows, grid, wanted, confidence)
    facts = _describe(values[rest], correct[rest], None if level is None else float(grid[level]), confidence)
    if wanted is not None and min_coverage is not None and facts["coverage"] < min_coverage:
        raise UserError(
            f"A risk of at most {wanted:.1%} can be guaranteed for only {facts['coverage']:.1%} of the questions, not "
            f"the {min_coverage:.1%} asked for; raise --max-risk or lower --min-coverage"
        )
    return {"score": name, **facts, "max_risk": wanted, "min_coverage": min_coverage, "confidence": confidence}


def choose_level(
    values: np.ndarray,
    correct: np.ndarray,
    fit_rows: np.ndarray,
    grid: np.ndarray,
    max_risk: float,
    confidence: float,
) -> int | None:
    """
    Index of the largest threshold with risk at most `max_risk`, by Learn-then-Test with fixed-sequence testing
    (Angelopoulos et al. 2021, https://arxiv.org/abs/2110.01052); `None` if no threshold passes.

    The fit rows determine the grid point with the smallest expected p-value. From there thresholds are tested in
    increasing order with an exact binomial test on the held-out rows, until the first one fails. As the order does not
    depend on the held-out rows, the family-wise error rate is at most `1 - confidence`.
    """
    from scipy.stats import binom

    rest = ~fit_rows

    def p_value(limit: float) -> float:
        answered = rest & (values <= limit)
        count, errors = int(answered.sum()), int((answered & ~correct).sum())
        return float(binom.cdf(errors, count, max_risk)) if count else 1.0

    def expected_p_value(limit: float) -> float:
        answered = fit_rows & (values <= limit)
        # Smoothed by half an error and half a right answer, or a few right answers would give an error rate of 0.
        rate = ((answered & ~correct).sum() + 0.5) / (answered.sum() + 1)
        count = round(answered.sum() * rest.sum() / fit_rows.sum())
        return float(binom.cdf(math.floor(rate * count), count, max_risk))

    start = int(np.argmin([expected_p_value(limit) for limit in grid]))
    chosen = None
    for level in range(start, len(grid)):
        if p_value(grid[level]) > 1 - confidence:
            break
        chosen = level
    return chosen


def _describe(values: np.ndarray, correct: np.ndarray, limit: float | None, confidence: float) -> dict[str, Any]:
    from scipy.stats import beta

    answered = np.zeros(len(values), dtype=bool) if limit is None else values <= limit
    count, errors = int(answered.sum()), int((answered & ~correct).sum())
    bound = float(beta.ppf(confidence, errors + 1, count - errors)) if errors < count else 1.0
    return {
        "threshold": limit,
        "coverage": count / len(values),
        "risk": errors / count if count else None,
        "risk_bound": bound if count else None,
        "n_answered": count,
        "n_errors": errors,
    }
