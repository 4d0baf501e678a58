"""From prediction tables to numbers, with fractions (never percent) as values.

Answers are read on each item's own options. Out-of-distribution scores are read on the same letters on both sides,
unless the published reading is asked for: K/alpha0 grows with K, so an idle fifth letter alone makes items foreign.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import metrics
from .errors import UserError
from .predictions import PredictionTable, Reading, entropy

SCORES = ("epistemic", "aleatoric", "entropy", "max_prob")
SLOTS = ("train", "task")

_SHIFTED = ("accuracy", "nll", "ece")


def evaluate_id(table: PredictionTable) -> dict[str, float]:
    """
    Quality and calibration of the answers, each item read on its own options.

    Args:
        table ([`PredictionTable`]): The predictions. Rows of unknown label (-1) are left out.

    Returns:
        `dict[str, float]`: `accuracy`, `nll`, `ece`, `brier`, `conf_aupr`, `n` (rows evaluated) and `n_unlabelled`
        (rows left out); `n_nan` if rows hold NaN. With no labelled row, the counts alone.
    """
    known = table.labels >= 0
    counts: dict[str, float] = {"n": int(known.sum()), "n_unlabelled": int((~known).sum())}
    if table.nan_rows.any():
        counts["n_nan"] = int(table.nan_rows.sum())
    if not known.any():
        return counts
    reading, labels = table.reading("own"), table.labels[known]
    probs = reading.probs[known]
    correct = metrics.is_correct(probs, labels)
    return {
        "accuracy": metrics.accuracy(probs, labels),
        "nll": metrics.nll(probs, labels),
        "ece": metrics.ece(probs.max(axis=1), correct),
        "brier": metrics.brier(probs, labels),
        "conf_aupr": metrics.confidence_aupr(correct, reading.aleatoric[known]),
        **counts,
    }


def evaluate_ood(
    id_table: PredictionTable, ood_table: PredictionTable, score: str = "epistemic", slots: str = "train"
) -> dict[str, float]:
    """
    How well one uncertainty tells in-distribution items from out-of-distribution ones.

    Args:
        id_table ([`PredictionTable`]):
            Predictions for the task the model was trained on: the positives.
        ood_table ([`PredictionTable`]):
            Predictions of the same model for another task. Labels play no part.
        score (`str`, *optional*, defaults to `"epistemic"`):
            What ranks the items: `"epistemic"`, `"aleatoric"`, `"entropy"` or `"max_prob"` (1 - max p).
        slots (`str`, *optional*, defaults to `"train"`):
            `"train"` reads both sides on the training letters. `"task"`, the published reading, reads each side on all
            letters of its own task; its numbers say as much about the number of options as about the model.

    Returns:
        `dict[str, float]`: `auroc`, `aupr`, `n_id` and `n_ood`.
    """
    if slots not in SLOTS:
        raise UserError(f"slots must be one of {', '.join(SLOTS)}, not {slots!r}.")
    trained = num_letters(id_table, "num_choices")
    if ood_table.meta.get("num_choices", trained) != trained:
        raise UserError(
            f"The tables come from different models: one was trained on {trained} options, the other on "
            f"{ood_table.meta['num_choices']}."
        )
    if slots == "train":
        widths = (trained, trained)
    else:
        widths = (num_letters(id_table, "task_num_choices"), num_letters(ood_table, "task_num_choices"))
    sides = [_uncertainty(table.reading(k), score) for table, k in zip((id_table, ood_table), widths, strict=True)]
    return {**metrics.ood_scores(*sides), "n_id": len(id_table), "n_ood": len(ood_table)}


def evaluate_tables(id_table: PredictionTable, ood_tables: dict[str, PredictionTable]) -> dict[str, float]:
    """
    Every number of a results file, under flat keys.

    Args:
        id_table ([`PredictionTable`]): Predictions for the task the model was trained on.
        ood_tables (`dict[str, PredictionTable]`): Predictions for the other tasks, by name.

    Returns:
        `dict[str, float]`: `id/<metric>` of [`evaluate_id`]; per task `ood/<task>/auroc` and `aupr` (matched letters),
        `auroc_published` and `aupr_published` (each side's own letters), `auroc_max_prob` (matched), `n`, and where
        labels are known `accuracy`, `nll`, `ece`; items by number of options as `id/options/4`.
    """
    results = {f"id/{name}": value for name, value in evaluate_id(id_table).items()}
    results |= {f"id/{name}": value for name, value in _option_counts(id_table).items()}
    for task, table in ood_tables.items():
        matched = evaluate_ood(id_table, table)
        published = evaluate_ood(id_table, table, slots="task")
        answers = evaluate_id(table)
        values = {
            "auroc": matched["auroc"],
            "aupr": matched["aupr"],
            "auroc_published": published["auroc"],
            "aupr_published": published["aupr"],
            "auroc_max_prob": evaluate_ood(id_table, table, score="max_prob")["auroc"],
            **{name: answers[name] for name in _SHIFTED if name in answers},
            "n": len(table),
            **{name: answers[name] for name in ("n_unlabelled", "n_nan") if name in answers},
            **_option_counts(table),
        }
        results |= {f"ood/{task}/{name}": value for name, value in values.items()}
    return results


def num_letters(table: PredictionTable, name: str) -> int:
    """
    A number of letters that the table's `meta` states.

    Args:
        table ([`PredictionTable`]): The predictions.
        name (`str`): `"num_choices"` (what the model was trained on) or `"task_num_choices"` (what its task offers).
    """
    value: Any = table.meta.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        task = table.meta.get("task", "unknown")
        raise UserError(f"The prediction table of task {task!r} must state {name} in its meta, but says {value!r}.")
    return value


def _uncertainty(reading: Reading, score: str) -> np.ndarray:
    if score == "epistemic":
        return reading.epistemic
    if score == "aleatoric":
        return reading.aleatoric
    if score == "entropy":
        return entropy(reading.probs)
    if score == "max_prob":
        # The mass of the others keeps its resolution where 1 - max p in float32 is 0 for every confident row.
        probs = reading.probs.astype(np.float64)
        return probs.sum(axis=1) - probs.max(axis=1)
    raise UserError(f"score must be one of {', '.join(SCORES)}, not {score!r}.")


def _option_counts(table: PredictionTable) -> dict[str, float]:
    options, counts = np.unique(table.num_options, return_counts=True)
    return {f"options/{option}": int(count) for option, count in zip(options, counts, strict=True)}
