"""
Fitting a decision rule on held-out predictions.

A fifth of the calibration rows (the *fit* rows) is used to fit the temperature, to choose the uncertainty and to order
the thresholds; the guarantees are computed on the other rows, on which these choices do not depend. Input and output
are prediction tables and arrays: no torch, no model.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np

from ..core.errors import UserError, nearest
from ..evaluation import calibration_metrics, classification_metrics
from ..evaluation.prediction_table import PredictionTable
from . import conformal
from .risk_control import fit_abstention
from .rule import ABSTAIN_ON, Decision, scale
from .temperature import fit_temperature

MIN_ROWS = 100
MIN_GROUP = 100  # rows with the same number of options from which on they get their own conformal threshold
_FIT_SHARE = 0.2


def calibrate(
    table: PredictionTable,
    alpha: float = 0.1,
    max_risk: float | None = None,
    min_coverage: float | None = None,
    confidence: float = 0.95,
    score: str = "lac",
    abstain_on: str = "auto",
) -> Decision:
    """
    Fit a decision rule on held-out predictions.

    Args:
        table (`PredictionTable`):
            Predictions of labelled rows that the model was not trained on.
        alpha (`float`, *optional*, defaults to 0.1):
            Error rate of the prediction sets: they miss the right option with this probability.
        max_risk (`float`, *optional*):
            Largest allowed error rate among answered rows. Defaults to 0.05 unless `min_coverage` is given alone.
        min_coverage (`float`, *optional*):
            Smallest allowed fraction of answered rows. Alone, it determines the threshold; with `max_risk`, a
            `UserError` is raised if both cannot be met.
        confidence (`float`, *optional*, defaults to 0.95):
            Confidence level of the bound on the risk.
        score (`str`, *optional*, defaults to `"lac"`):
            Default conformal score: `"lac"`, `"aps"` or `"possibility"`. All applicable scores get thresholds.
        abstain_on (`str`, *optional*, defaults to `"auto"`):
            `"aleatoric"`, `"epistemic"`, or `"auto"`: the one with the larger AUROC for errors on the fit rows.
    """
    _check_wishes(alpha, max_risk, min_coverage, confidence, abstain_on)
    usable = (table.labels >= 0) & ~table.nan_rows
    if usable.sum() < MIN_ROWS:
        raise UserError(f"Calibration needs at least {MIN_ROWS} rows with answers, got {usable.sum()}")
    table = table.select(usable)
    reading = table.reading("own")
    labels, counts = table.labels, table.num_options
    fit_rows = _fit_rows(table.ids)
    rest = ~fit_rows
    temperature = fit_temperature(reading.probs[fit_rows], counts[fit_rows], labels[fit_rows])
    probs, alphas = scale(reading.probs, reading.alpha, counts, temperature)
    thresholds = _thresholds(probs[rest], alphas, counts[rest], labels[rest], table.ids[rest], rest, alpha)
    if score not in thresholds:
        raise UserError(f"The conformal score {score!r} does not apply here; {nearest(score, thresholds)}")
    correct = classification_metrics.is_correct(probs, labels)
    return Decision(
        temperature=temperature,
        conformal={"alpha": alpha, "score": score, "thresholds": thresholds},
        abstention=fit_abstention(
            probs, reading.epistemic, correct, fit_rows, max_risk, min_coverage, confidence, abstain_on
        ),
        calibration_set=_describe_set(table, fit_rows),
        fit=_describe_fit(reading.probs[rest], probs[rest], labels[rest]),
    )


def _describe_set(table: PredictionTable, fit_rows: np.ndarray) -> dict[str, Any]:
    facts = {"task": table.meta.get("task"), "split": table.meta.get("split")}
    return {**facts, "n": len(table), "n_fit": int(fit_rows.sum()), "hash": table_hash(table)}


def _describe_fit(before: np.ndarray, after: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    correct = classification_metrics.is_correct(after, labels)
    return {
        "nll_before": classification_metrics.nll(before, labels),
        "nll_after": classification_metrics.nll(after, labels),
        "ece_before": calibration_metrics.ece(before.max(axis=1), correct),
        "ece_after": calibration_metrics.ece(after.max(axis=1), correct),
        "accuracy": float(correct.mean()),
    }


def _check_wishes(
    alpha: float, max_risk: float | None, min_coverage: float | None, confidence: float, abstain_on: str
) -> None:
    wishes = {"alpha": alpha, "max_risk": max_risk, "min_coverage": min_coverage, "confidence": confidence}
    for name, value in wishes.items():
        if value is not None and not 0 < value < 1:
            raise UserError(f"{name} must lie between 0 and 1, got {value:g}")
    if abstain_on not in (*ABSTAIN_ON, "auto"):
        raise UserError(f"Unknown abstention score {abstain_on!r}; {nearest(abstain_on, (*ABSTAIN_ON, 'auto'))}")


def _fit_rows(ids: np.ndarray) -> np.ndarray:
    """Mask `[N]` of the fit rows, a fifth chosen by a hash of the ids, so that the order of rows does not matter."""
    order = np.argsort(conformal.uniform_numbers(f"fit/{name}" for name in ids), kind="stable")
    mask = np.zeros(len(ids), dtype=bool)
    mask[order[: round(_FIT_SHARE * len(ids))]] = True
    return mask


def table_hash(table: PredictionTable) -> str:
    """SHA-256 of the sorted ids and labels: identifies a calibration set regardless of its order."""
    rows = sorted(zip(table.ids.tolist(), table.labels.tolist(), strict=True))
    return hashlib.sha256(json.dumps(rows, allow_nan=False).encode()).hexdigest()


def _thresholds(
    probs: np.ndarray,
    alphas: np.ndarray | None,
    counts: np.ndarray,
    labels: np.ndarray,
    ids: np.ndarray,
    rows: np.ndarray,
    alpha: float,
) -> dict[str, dict[str, float | None]]:
    """Conformal thresholds of each applicable score: for all rows, and per number of options with enough rows."""
    found: dict[str, dict[str, float | None]] = {}
    for kind in conformal.SCORES:
        if kind == "possibility" and alphas is None:
            continue
        own_alpha = None if alphas is None else alphas[rows]
        scores = conformal.option_scores(kind, probs, own_alpha, counts, conformal.uniform_numbers(ids))
        right = scores[np.arange(len(labels)), labels]
        limits = {"all": conformal.threshold(right, alpha)}
        for count in np.unique(counts):
            mask = counts == count
            if mask.sum() >= max(MIN_GROUP, 2 / alpha) and not mask.all():
                limits[str(count)] = conformal.threshold(right[mask], alpha)
        found[kind] = {name: limit if math.isfinite(limit) else None for name, limit in limits.items()}
    return found
