"""
Scores for conformal prediction sets, on plain arrays. Smaller means that an option fits better.

A row is read on its own options, which are its first `num_options` columns; columns beyond them score infinity and are
in no set. With n calibration rows, the set of all options that score at most the k-th smallest score of the right
answers, k = ceil((n + 1)(1 - alpha)), holds the right answer with probability 1 - alpha or a little more (at the most
1/(n + 1), as long as scores do not tie), whatever the model is worth.
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
    The score of every option.

    Args:
        kind (`str`):
            `"lac"`: `1 - p`, which gives the smallest sets on average. `"aps"`: the probability of all options that
            are more probable, plus a random share of the option's own; sets grow where the model is unsure.
            `"possibility"`: see [`possibility_scores`]; needs Dirichlet parameters.
        probs (`np.ndarray` of shape `[N, W]`):
            Probabilities; 0 beyond a row's options.
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
        # Without the random share the least probable option always scores 1, and where it is right too often the only
        # honest set would be all options.
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
    How possible it is that option k is the most probable one, as a logarithm.

    The Dirichlet possibility function `g(p) = prod (p_k/m_k)^alpha_k` is 1 at its mode `m = alpha/alpha0`. The
    possibility of an event is the largest `g` inside it. Where k is not already on top, that is reached by levelling k
    with the options S above the common level, `a = mean of alpha over S`, and leaving the others alone:
    `log Pi(k) = sum over S of alpha_i log(a/alpha_i)`. It is 0 for the top option, and close to 0 for all of them
    where there is little evidence.

    Args:
        alpha (`np.ndarray` of shape `[N, W]`): Positive on each row's own options.
        num_options (`np.ndarray` of shape `[N]`): Options of each row; the columns beyond them get -inf.
    """
    alpha = np.asarray(alpha, dtype=np.float64)
    own = np.arange(alpha.shape[1]) < np.asarray(num_options)[:, None]
    order = np.argsort(-np.where(own, alpha, -1.0), axis=1, kind="stable")
    ranked = np.where(np.take_along_axis(own, order, axis=1), np.take_along_axis(alpha, order, axis=1), np.nan)
    found = np.full_like(ranked, -np.inf)
    found[:, 0] = 0.0
    weight = ranked * np.log(ranked)
    for rank in range(1, ranked.shape[1]):
        done = np.isnan(ranked[:, rank])
        for above in range(rank + 1):  # how many of the top options are levelled with this one
            level = (ranked[:, :above].sum(axis=1) + ranked[:, rank]) / (above + 1)
            fits = ~done & (np.full(len(level), above == rank) | (ranked[:, above] <= level))
            total = ranked[:, :above].sum(axis=1) + ranked[:, rank]
            value = total * np.log(level) - weight[:, :above].sum(axis=1) - weight[:, rank]
            found[fits, rank] = np.minimum(value[fits], 0.0)
            done |= fits
    result = np.empty_like(found)
    np.put_along_axis(result, order, found, axis=1)
    return result


def possibility_scores(alpha: np.ndarray, num_options: np.ndarray) -> np.ndarray:
    """
    How much more possible the alternatives of an option are than the option itself.

    `max over j != k of log Pi(j), minus log Pi(k)` with `Pi` of [`log_possibility`]. For an option below the top this
    is `-log Pi(k)`, at least 0; for the top option it is `log Pi` of the runner-up, at most 0, the logarithm of one
    minus its necessity. Unlike `-log Pi` alone it does not tie at 0 for every top option, so coverage is as asked for.
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
    """The largest score that enters a set: the ceil((n + 1)(1 - alpha))-th smallest, or infinity if n is too small."""
    count = len(scores)
    place = math.ceil((count + 1) * (1 - alpha) - 1e-9)
    return float(np.sort(scores)[place - 1]) if 1 <= place <= count else math.inf


def uniform_numbers(keys: Iterable[str]) -> np.ndarray:
    """A number in [0, 1) that depends on the key alone, so that neither batch nor order nor process changes a set."""
    draws = [int.from_bytes(hashlib.sha256(f"uniform/{key}".encode()).digest()[:8], "big") for key in keys]
    return np.array(draws, dtype=np.float64) / 2.0**64
