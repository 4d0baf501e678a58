"""
When to abstain: a threshold on an uncertainty, and what can be promised about the answers below it.

Plain arrays: the rows that settle choices (`fit_rows`) and those that prove them are told apart by a mask.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.errors import UserError, nearest
from ..evaluation import metrics

ABSTAIN_ON = ("aleatoric", "epistemic")
_LEVELS = 20  # thresholds that the rule chooses from


def abstention_score(name: str, probs: np.ndarray, epistemic: np.ndarray) -> np.ndarray:
    """The uncertainty that abstention looks at: `"aleatoric"` (1 - max p, calibrated) or `"epistemic"`."""
    if name == "epistemic":
        return np.asarray(epistemic, dtype=np.float64)
    if name == "aleatoric":
        return probs.sum(axis=1) - probs.max(axis=1)
    raise UserError(f"Unknown abstention score {name!r}; {nearest(name, ABSTAIN_ON)}")


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
    """A threshold and what can be promised about it; see [`choose_level`] for how it keeps its promise."""
    name = abstain_on
    if name == "auto":
        areas = {
            k: metrics.auroc(~correct[fit_rows], abstention_score(k, probs, epistemic)[fit_rows]) for k in ABSTAIN_ON
        }
        # Without a wrong answer among the fit rows the areas are NaN, and the first one serves as well as any.
        name = max(ABSTAIN_ON, key=lambda k: np.nan_to_num(areas[k], nan=0.5))
    values = abstention_score(name, probs, epistemic)
    # float32 through JSON and back must not move a row across the line, hence the hair of room.
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
            f"A risk of at most {wanted:.1%} can be promised for {facts['coverage']:.1%} of the questions only, less "
            f"than the {min_coverage:.1%} asked for; raise --max-risk or lower --min-coverage"
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
    The loosest threshold whose risk is proven to be at most `max_risk`, by Learn-then-Test with a fixed sequence.

    The fit rows say where on the grid a proof is most likely; from there thresholds are tested one by one, each looser
    than the last, with an exact binomial test on the other rows, and the first failure ends the walk. As the order was
    fixed beforehand, all tests together err with probability `1 - confidence` at the most.
    """
    from scipy.stats import binom

    rest = ~fit_rows

    def p_value(limit: float) -> float:
        answered = rest & (values <= limit)
        count, errors = int(answered.sum()), int((answered & ~correct).sum())
        return float(binom.cdf(errors, count, max_risk)) if count else 1.0

    def expected_p_value(limit: float) -> float:
        answered = fit_rows & (values <= limit)
        # Half a wrong and half a right answer more, or a handful of right ones would look like certainty.
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
