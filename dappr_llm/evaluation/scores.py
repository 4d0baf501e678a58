"""
Uncertainty scores of prediction tables: one number per item, larger means more uncertain.

To add a score, write one function here, add it to `_FUNCTIONS`, and give it a header in `metric_columns.SCORES`.
Results files, intervals, reports and `--score` read the rest from these two lists.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..core.errors import UserError
from .metric_columns import SCORES
from .prediction_table import PredictionTable, Reading, entropy, renormalise

# A score needs one of these arrays; those without an entry are read from any table.
_NEEDS = {
    "mutual_information": ("alpha", "members"),
    "evidence": ("alpha",),
    "max_evidence": ("alpha",),
    "energy": ("logits",),
    "max_logit": ("logits",),
    "density": ("density",),
}


def has_score(table: PredictionTable, score: str) -> bool:
    """Whether a table holds what a score is computed from."""
    needed = _NEEDS.get(score, ())
    return not needed or any(getattr(table, name) is not None for name in needed)


def uncertainty(table: PredictionTable, slots: str | int, score: str) -> np.ndarray:
    """
    One uncertainty per item, `[N]`, larger means more uncertain; NaN for rows that hold NaN or Inf.

    Args:
        table ([`PredictionTable`]): The predictions.
        slots (`str` or `int`): Which answer letters are read, as in [`PredictionTable.reading`].
        score (`str`): One of `metric_columns.SCORES`; see [`evaluate_ood`].
    """
    if score not in SCORES:
        raise UserError(f"score must be one of {', '.join(SCORES)}, not {score!r}.")
    if not has_score(table, score):
        hint = "; fit a gate with `dappr gate`, and predict again" if score == "density" else ""
        raise UserError(
            f"The score {score!r} needs {' or '.join(_NEEDS[score])}, which the table of {table.meta.get('task')!r} "
            f"lacks{hint}."
        )
    values = _FUNCTIONS[score](table, table.reading(slots))
    # An infinite alpha0 would count as perfectly certain.
    return np.where(table.nan_rows, np.nan, values)


def _epistemic(table: PredictionTable, reading: Reading) -> np.ndarray:
    return reading.epistemic


def _aleatoric(table: PredictionTable, reading: Reading) -> np.ndarray:
    return reading.aleatoric


def _entropy(table: PredictionTable, reading: Reading) -> np.ndarray:
    return entropy(reading.probs)


def _max_prob(table: PredictionTable, reading: Reading) -> np.ndarray:
    """Summing the other options keeps resolution where 1 - max p rounds to 0 in float32."""
    probs = reading.probs.astype(np.float64)
    return probs.sum(axis=1) - probs.max(axis=1)


@np.errstate(invalid="ignore")
def _mutual_information(table: PredictionTable, reading: Reading) -> np.ndarray:
    """Of the Dirichlet distribution, or of the members."""
    if reading.alpha is not None:
        from scipy.special import digamma

        alpha = reading.alpha.astype(np.float64)
        alpha0 = alpha.sum(axis=1, keepdims=True)
        mean = alpha / alpha0
        return entropy(mean) + (mean * (digamma(alpha + 1) - digamma(alpha0 + 1))).sum(axis=1)
    assert table.members is not None
    members = renormalise(table.members, np.arange(table.width) < reading.num_options[:, None])
    return np.maximum(entropy(members.mean(axis=0)) - entropy(members).mean(axis=0), 0.0)


def _evidence(table: PredictionTable, reading: Reading) -> np.ndarray:
    """Minus the total evidence, alpha0 - K."""
    assert reading.alpha is not None
    return reading.num_options - reading.alpha.sum(axis=1, dtype=np.float64)


def _max_evidence(table: PredictionTable, reading: Reading) -> np.ndarray:
    """Minus the evidence of the option that has most, max alpha - 1."""
    assert reading.alpha is not None
    return 1 - reading.alpha.max(axis=1).astype(np.float64)


def _energy(table: PredictionTable, reading: Reading) -> np.ndarray:
    """Minus logsumexp of the logits (Liu et al. 2020, at temperature 1)."""
    assert reading.logits is not None
    return -np.logaddexp.reduce(reading.logits.astype(np.float64), axis=1)


def _max_logit(table: PredictionTable, reading: Reading) -> np.ndarray:
    assert reading.logits is not None
    return -reading.logits.max(axis=1).astype(np.float64)


def _density(table: PredictionTable, reading: Reading) -> np.ndarray:
    """Of the input, so the letters read play no part. Raw: p-values of far rows would all be equal."""
    assert table.density is not None
    return -table.density.astype(np.float64)


_FUNCTIONS: dict[str, Callable[[PredictionTable, Reading], np.ndarray]] = {
    "epistemic": _epistemic,
    "aleatoric": _aleatoric,
    "entropy": _entropy,
    "max_prob": _max_prob,
    "mutual_information": _mutual_information,
    "evidence": _evidence,
    "max_evidence": _max_evidence,
    "energy": _energy,
    "max_logit": _max_logit,
    "density": _density,
}
