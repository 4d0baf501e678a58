"""
Nonconformity scores and thresholds for split-conformal prediction sets, on plain arrays.

Rows may have different numbers of options: a row's options are its first `num_options` columns; the padding columns
score infinity and are in no set. With n calibration rows, the prediction set of all options with a score of at most
the k-th smallest score of the right answers, k = ceil((n + 1)(1 - alpha)), contains the right answer with a
probability between 1 - alpha and 1 - alpha + 1/(n + 1) (for scores without ties), whatever the accuracy of the model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import numpy as np

from ..core.errors import UserError, nearest

SCORES = ("lac", "aps", "possibility")


def option_scores(
    kind: str,
    probs: np.ndarray,
    alpha: np.ndarray | None,
    num_options: np.ndarray,
    uniform: np.ndarray,
) -> np.ndarray:
    """
    The nonconformity score `[N, W]` of every option; the smaller, the better the option fits.

    Args:
        kind (`str`):
            `"lac"`: `1 - p`, which gives the smallest sets on average. `"aps"`: the total probability of the more
            probable options plus a random fraction of the option's own; its sets adapt to the uncertainty of a row.
            `"possibility"`: see [`possibility_scores`]; needs Dirichlet parameters.
        probs (`np.ndarray` of shape `[N, W]`):
            Probabilities, 0 in the padding columns.
        alpha (`np.ndarray` of shape `[N, W]`, *optional*):
            Dirichlet parameters.
        num_options (`np.ndarray` of shape `[N]`):
            Options of each row.
        uniform (`np.ndarray` of shape `[N]`):
            A number in [0, 1) for each row, see [`uniform_numbers`]. Only `"aps"` uses it.
    """
    probs = np.asarray(probs, dtype=np.float64)
    own = np.arange(probs.shape[1]) < np.asarray(num_options)[:, None]
    if kind == "lac":
        scores = 1 - probs
    elif kind == "aps":
        order = np.argsort(-np.where(own, probs, -1.0), axis=1, kind="stable")
        ranked = np.take_along_axis(probs, order, axis=1)
        # Without the random fraction the least probable option always scores 1, and for a weak model the threshold
        # would be 1 and every set all options.
        before = np.cumsum(ranked, axis=1) - ranked + uniform[:, None] * ranked
        scores = np.empty_like(probs)
        np.put_along_axis(scores, order, before, axis=1)
    elif kind == "possibility":
        if alpha is None:
            raise UserError("The possibility score needs Dirichlet parameters, which this method does not give")
        scores = possibility_scores(alpha, num_options)
    else:
        raise UserError(f"Unknown conformal score {kind!r}; {nearest(kind, SCORES)}")
    return np.where(own, scores, np.inf)


def log_possibility(alpha: np.ndarray, num_options: np.ndarray) -> np.ndarray:
    """
    The log-possibility `[N, W]` that option k is the most probable one.

    The Dirichlet possibility function `g(p) = prod (p_k/m_k)^alpha_k` is 1 at its mode `m = alpha/alpha0`, and the
    possibility of an event is the supremum of `g` over it. For the event that `p_k` is the largest probability, it is
    attained where k and the set S of options above the common level share that level, `a = mean of alpha over S, k`,
    and all others keep their mode: `log Pi(k) = sum over S, k of alpha_i log(a/alpha_i)`. It is 0 for the top
    option, and close to 0 for every option where there is little evidence.

    Args:
        alpha (`np.ndarray` of shape `[N, W]`):
            Dirichlet parameters, positive for each row's options.
        num_options (`np.ndarray` of shape `[N]`):
            Options of each row; the padding columns get -inf.
    """
    alpha = np.asarray(alpha, dtype=np.float64)
    own = np.arange(alpha.shape[1]) < np.asarray(num_options)[:, None]
    order = np.argsort(-np.where(own, alpha, -1.0), axis=1, kind="stable")
    ranked = np.where(np.take_along_axis(own, order, axis=1), np.take_along_axis(alpha, order, axis=1), np.nan)
    weight = ranked * np.log(ranked)
    # Sums over the options above each rank.
    sums, weights = (np.cumsum(values, axis=1) - values for values in (ranked, weight))
    # S are the first m options, m being the smallest for which the next one is not above the level, that is
    # alpha_m <= (sum of S + alpha_k)/(m + 1), solved for alpha_k. The bound falls with m, and m = rank always fits.
    ranks = np.arange(ranked.shape[1])
    bounds = np.minimum.accumulate((ranks + 1) * ranked - sums, axis=1)
    shared = np.zeros(ranked.shape, dtype=np.int64)
    for row, count in enumerate(np.asarray(num_options)):
        shared[row, :count] = np.searchsorted(-bounds[row, :count], -ranked[row, :count])
    shared = np.minimum(shared, ranks)  # whatever rounding says
    total = np.take_along_axis(sums, shared, axis=1) + ranked
    value = total * np.log(total / (shared + 1)) - np.take_along_axis(weights, shared, axis=1) - weight
    found = np.where(np.isnan(ranked), -np.inf, np.minimum(value, 0.0))
    found[:, 0] = 0.0
    result = np.empty_like(found)
    np.put_along_axis(result, order, found, axis=1)
    return result


def possibility_scores(alpha: np.ndarray, num_options: np.ndarray) -> np.ndarray:
    """
    The log-possibility of an option's best alternative minus its own: `max over j != k of log Pi(j) - log Pi(k)`.

    `Pi` is that of [`log_possibility`]. For the top option the score is `log Pi` of the runner-up, at most 0 (the
    logarithm of one minus the top option's necessity); for any other option it is `-log Pi(k)`, at least 0. Unlike
    `-log Pi` alone it is not 0 for every top option: without these ties the coverage is close to `1 - alpha`.
    """
    log_pi = log_possibility(alpha, num_options)
    top = log_pi.argmax(axis=1)
    rows = np.arange(len(log_pi))
    others = log_pi.copy()
    others[rows, top] = -np.inf
    scores = -log_pi
    scores[rows, top] = others.max(axis=1)
    return scores


def threshold(scores: np.ndarray, alpha: float) -> float:
    """Conformal quantile of scores `[n]`: the ceil((n + 1)(1 - alpha))-th smallest, or infinity if n is too small."""
    count = len(scores)
    place = math.ceil((count + 1) * (1 - alpha) - 1e-9)
    return float(np.sort(scores)[place - 1]) if 1 <= place <= count else math.inf


def uniform_numbers(keys: Iterable[str]) -> np.ndarray:
    """Pseudo-random numbers `[N]` in [0, 1), each a hash of its key: the same in any batch, order or process."""
    draws = [int.from_bytes(hashlib.sha256(f"uniform/{key}".encode()).digest()[:8], "big") for key in keys]
    return np.array(draws, dtype=np.float64) / 2.0**64
