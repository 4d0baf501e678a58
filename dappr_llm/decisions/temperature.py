"""Temperature scaling (Guo et al. 2017, https://arxiv.org/abs/1706.04599) with a number of options per row."""

from __future__ import annotations

import math

import numpy as np

from ..evaluation import metrics

_TEMPERATURES = (0.05, 20.0)  # bounds of the search


def scale(
    probs: np.ndarray, alpha: np.ndarray | None, num_options: np.ndarray, temperature: float
) -> tuple[np.ndarray, np.ndarray | None]:
    """
    Apply a temperature to predicted probabilities.

    For cross-entropy this equals dividing the logits by `temperature`. Of a Dirichlet it changes the mean only:
    labels say whether probabilities are calibrated, but not how much evidence there should be, so `alpha0` (and with
    it `K/alpha0`) is kept.

    Args:
        probs (`np.ndarray` of shape `[N, W]`):
            Probabilities, padded to the largest number of options W.
        alpha (`np.ndarray` of shape `[N, W]`, *optional*):
            Dirichlet parameters, for methods that have them.
        num_options (`np.ndarray` of shape `[N]`):
            Options of each row: its first `num_options` columns.
        temperature (`float`):
            T. Above 1 it flattens the distribution, below 1 it sharpens it.

    Returns:
        `p^(1/T)` normalised over each row's options, and `alpha0` times these probabilities (`None` without `alpha`);
        both 0 in the padding columns.
    """
    own = np.arange(probs.shape[1]) < np.asarray(num_options)[:, None]
    logs = np.where(own, np.log(np.maximum(np.asarray(probs, dtype=np.float64), 1e-300)) / temperature, -np.inf)
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    scaled = weights / weights.sum(axis=1, keepdims=True)
    if alpha is None:
        return scaled, None
    alpha0 = np.where(own, np.asarray(alpha, dtype=np.float64), 0.0).sum(axis=1, keepdims=True)
    # alpha must stay positive for the row's options, even where the power underflows.
    return scaled, np.where(own, np.maximum(alpha0 * scaled, 1e-12), 0.0)


def fit_temperature(probs: np.ndarray, num_options: np.ndarray, labels: np.ndarray) -> float:
    """
    The temperature in [0.05, 20] with the lowest NLL.

    Args:
        probs (`np.ndarray` of shape `[N, W]`):
            Uncalibrated probabilities.
        num_options (`np.ndarray` of shape `[N]`):
            Options of each row.
        labels (`np.ndarray` of shape `[N]`):
            Index of the right option.
    """
    from scipy.optimize import minimize_scalar

    def nll(log_temperature: float) -> float:
        return metrics.nll(scale(probs, None, num_options, math.exp(log_temperature))[0], labels)

    low, high = map(math.log, _TEMPERATURES)
    return math.exp(minimize_scalar(nll, bounds=(low, high), method="bounded", options={"xatol": 1e-4}).x)
