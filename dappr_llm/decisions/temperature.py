"""Temperature scaling (Guo et al. 2017, https://arxiv.org/abs/1706.04599) with a number of options per row."""

from __future__ import annotations

import math

import numpy as np

from ..evaluation import classification_metrics
from .rule import scale

_TEMPERATURES = (0.05, 20.0)  # bounds of the search


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
        return classification_metrics.nll(scale(probs, None, num_options, math.exp(log_temperature))[0], labels)

    low, high = map(math.log, _TEMPERATURES)
    return math.exp(minimize_scalar(nll, bounds=(low, high), method="bounded", options={"xatol": 1e-4}).x)
