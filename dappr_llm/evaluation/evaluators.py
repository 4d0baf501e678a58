"""Metrics of prediction tables; all values are fractions, never percent.

Metrics of the answers read each item on its own options. OOD detection compares uncertainties of two tasks, so by
default both are read on the same answer letters, those the model was trained on (the *matched* reading). The
*published* reading takes all letters of each task instead. K/alpha0 grows with the number K of letters read, so there
a fifth option alone raises the uncertainty of a task, whatever the model knows about it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..core.errors import UserError
from . import classification_metrics, ranking_metrics
from .metric_columns import ANSWERS, MATCHED, PUBLISHED, READINGS, SHIFTED, Metric, detection_keys
from .prediction_table import PredictionTable, Reading, entropy, renormalise

SCORES = ("epistemic", "aleatoric", "entropy", "max_prob", "mutual_information", "evidence")
SLOTS = ("train", "task")

# Further scores whose AUROC is reported beside that of the chosen score, in the matched reading.
OTHER_SCORES = tuple(suffix.removeprefix("_") for suffix in READINGS if suffix not in (MATCHED, PUBLISHED))


def answer_rows(table: PredictionTable) -> dict[str, np.ndarray]:
    """
    Inputs of the metrics of the answers: one row per labelled item, read on its own options.

    Args:
        table ([`PredictionTable`]): The predictions; rows of unknown label (-1) are left out.

    Returns:
        `dict[str, np.ndarray]`: `probs` `[N, W]`; `labels`, `num_options`, `aleatoric`, `confidence` (probability of
        the predicted option) and `correct` (whether it is the label), `[N]` each.
    """
    known = table.labels >= 0
    reading, labels = table.reading("own"), table.labels[known]
    probs = reading.probs[known]
    return {
        "probs": probs,
        "labels": labels,
        "num_options": reading.num_options[known],
        "aleatoric": reading.aleatoric[known],
        "confidence": probs.max(axis=1),
        "correct": classification_metrics.is_correct(probs, labels),
    }


def function_of(metric: Metric) -> Callable[..., Any]:
    """The function that a declared metric of the answers names, e.g. `calibration_metrics.ece`."""
    module, _, name = metric.function.partition(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def evaluate_id(table: PredictionTable) -> dict[str, float]:
    """
    Quality and calibration of the answers, each item read on its own options.

    Args:
        table ([`PredictionTable`]): The predictions. Rows of unknown label (-1) are left out.

    Returns:
        `dict[str, float]`: Every metric of the answers by its key in `metric_columns.METRICS`; `n` (rows evaluated)
        and `n_unlabelled` (rows left out); `n_nan` if rows hold NaN. With no labelled row, the counts alone.
    """
    known = table.labels >= 0
    counts: dict[str, float] = {"n": int(known.sum()), "n_unlabelled": int((~known).sum())}
    if table.nan_rows.any():
        counts["n_nan"] = int(table.nan_rows.sum())
    if not known.any():
        return counts
    rows = answer_rows(table)
    values = {m.key: function_of(m)(*(rows[name] for name in m.inputs)) for m in ANSWERS}
    return values | counts


def evaluate_ood(
    id_table: PredictionTable, ood_table: PredictionTable, score: str = "epistemic", slots: str = "train"
) -> dict[str, float]:
    """
    Out-of-distribution detection between two tasks by one uncertainty score.

    Args:
        id_table ([`PredictionTable`]):
            Predictions for the task the model was trained on: the positives.
        ood_table ([`PredictionTable`]):
            Predictions of the same model for another task. Labels play no part.
        score (`str`, *optional*, defaults to `"epistemic"`):
            Which uncertainty ranks the items: `"epistemic"`, `"aleatoric"`, `"entropy"`, `"max_prob"` (1 - max p),
            `"mutual_information"` (of the Dirichlet distribution or of the members) or `"evidence"` (minus the total
            evidence, alpha0 - K).
        slots (`str`, *optional*, defaults to `"train"`):
            Which answer letters (or classes) are read. `"train"`: both tables on the letters the model was trained on
            (the matched reading). `"task"`: each table on all letters of its own task (the published reading), whose
            values depend on the numbers of options as much as on the model.

    Returns:
        `dict[str, float]`: `auroc`, `aupr`, `aupr_ood` and `fpr95` of [`ranking_metrics.ood_scores`], `n_id`, `n_ood`.
    """
    sides = ood_uncertainties(id_table, ood_table, score, slots)
    return {**ranking_metrics.ood_scores(*sides), "n_id": len(id_table), "n_ood": len(ood_table)}


def ood_uncertainties(
    id_table: PredictionTable, ood_table: PredictionTable, score: str = "epistemic", slots: str = "train"
) -> tuple[np.ndarray, np.ndarray]:
    """
    Uncertainties `[N]` and `[M]` of the items of both tables; NaN for rows that hold NaN or Inf.

    The arguments are those of [`evaluate_ood`].
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
    return uncertainty(id_table, widths[0], score), uncertainty(ood_table, widths[1], score)


def evaluate_tables(
    id_table: PredictionTable, ood_tables: dict[str, PredictionTable], score: str = "epistemic"
) -> dict[str, float]:
    """
    Every number of a results file, under flat keys.

    Args:
        id_table ([`PredictionTable`]): Predictions for the task the model was trained on.
        ood_tables (`dict[str, PredictionTable]`): Predictions for the other tasks, by name.
        score (`str`, *optional*, defaults to `"epistemic"`): Which uncertainty ranks the items; see [`evaluate_ood`].

    Returns:
        `dict[str, float]`: `id/<metric>` of [`evaluate_id`]; per task `ood/<task>/auroc`, `aupr`, `aupr_ood`, `fpr95`
        (matched reading), the same with the suffix `_published` (published reading), `auroc_max_prob`,
        `auroc_entropy` and, for tables with alpha or members, `auroc_mutual_information` (matched reading), `n`, and
        where labels are known `accuracy`, `nll`, `brier`, `ece`, `ece_floor`; numbers of items by number of options
        as `id/options/4`.
    """
    results = {f"id/{name}": value for name, value in evaluate_id(id_table).items()}
    results |= {f"id/{name}": value for name, value in _option_counts(id_table).items()}
    shifted = [metric.key for metric in SHIFTED]
    for task, table in ood_tables.items():
        answers = evaluate_id(table)
        values: dict[str, float] = {}
        for suffix, sides in detection_sides(id_table, table, score).items():
            areas = ranking_metrics.ood_scores(*sides)
            values |= {f"{name}{suffix}": areas[name] for name in detection_keys(suffix)}
        values |= {name: answers[name] for name in shifted if name in answers}
        values["n"] = len(table)
        values |= {name: answers[name] for name in ("n_unlabelled", "n_nan") if name in answers}
        values |= _option_counts(table)
        results |= {f"ood/{task}/{name}": value for name, value in values.items()}
    return results


def detection_sides(
    id_table: PredictionTable, ood_table: PredictionTable, score: str = "epistemic"
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Uncertainties `[N]` and `[M]` of both tables for each reading in a results file, by the suffix of its keys."""
    sides = {
        MATCHED: ood_uncertainties(id_table, ood_table, score),
        PUBLISHED: ood_uncertainties(id_table, ood_table, score, slots="task"),
    }
    for other in OTHER_SCORES:
        if other != "mutual_information" or all(has_spread(table) for table in (id_table, ood_table)):
            sides[f"_{other}"] = ood_uncertainties(id_table, ood_table, other)
    return sides


def one_reading(results: Mapping[str, Any]) -> bool:
    """
    Whether the matched and the published reading give equal values everywhere, so that only one need be shown.

    This is the case where all tasks have as many options as the model was trained on, as for image classifiers.

    Args:
        results (`Mapping`): What [`evaluate_tables`] returned or [`load_results`] read.
    """
    published = [key for key in results if key.endswith(PUBLISHED)]
    pairs = [(results[key], results.get(key.removesuffix(PUBLISHED))) for key in published]
    return all(one == other or (one != one and other != other) for one, other in pairs)


def num_letters(table: PredictionTable, name: str) -> int:
    """
    A number of answer letters (or classes) from the table's `meta`.

    Args:
        table ([`PredictionTable`]): The predictions.
        name (`str`): `"num_choices"` (K, the letters the model was trained on) or `"task_num_choices"` (the most
            options that an item of its task offers).
    """
    value = table.meta.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        task = table.meta.get("task", "unknown")
        raise UserError(f"The prediction table of task {task!r} must state {name} in its meta, but says {value!r}.")
    return value


def has_spread(table: PredictionTable) -> bool:
    """Whether mutual information is defined: the table has Dirichlet parameters (`alpha`) or `members`."""
    return table.alpha is not None or table.members is not None


def uncertainty(table: PredictionTable, slots: str | int, score: str) -> np.ndarray:
    """
    One uncertainty per item, `[N]`, larger means more uncertain; NaN for rows that hold NaN or Inf.

    Args:
        table ([`PredictionTable`]): The predictions.
        slots (`str` or `int`): Which answer letters are read, as in [`PredictionTable.reading`].
        score (`str`): One of `SCORES`; see [`evaluate_ood`].
    """
    if score not in SCORES:
        raise UserError(f"score must be one of {', '.join(SCORES)}, not {score!r}.")
    reading = table.reading(slots)
    if score in ("epistemic", "aleatoric"):
        return reading.epistemic if score == "epistemic" else reading.aleatoric
    if score == "entropy":
        values = entropy(reading.probs)
    elif score == "max_prob":
        # Summing the other options keeps resolution where 1 - max p rounds to 0 in float32.
        probs = reading.probs.astype(np.float64)
        values = probs.sum(axis=1) - probs.max(axis=1)
    elif score == "mutual_information":
        values = _mutual_information(table, reading)
    elif reading.alpha is None:
        raise UserError(f"The score 'evidence' needs alpha, which the table of {table.meta.get('task')!r} lacks.")
    else:
        values = reading.num_options - reading.alpha.sum(axis=1, dtype=np.float64)
    # An infinite alpha0 would count as perfectly certain.
    return np.where(table.nan_rows, np.nan, values)


@np.errstate(invalid="ignore")
def _mutual_information(table: PredictionTable, reading: Reading) -> np.ndarray:
    if reading.alpha is not None:
        from scipy.special import digamma

        alpha = reading.alpha.astype(np.float64)
        alpha0 = alpha.sum(axis=1, keepdims=True)
        mean = alpha / alpha0
        return entropy(mean) + (mean * (digamma(alpha + 1) - digamma(alpha0 + 1))).sum(axis=1)
    if table.members is None:
        raise UserError(
            "The score 'mutual_information' needs alpha or members, which the table of "
            f"{table.meta.get('task')!r} lacks."
        )
    members = renormalise(table.members, np.arange(table.width) < reading.num_options[:, None])
    return np.maximum(entropy(members.mean(axis=0)) - entropy(members).mean(axis=0), 0.0)


def _option_counts(table: PredictionTable) -> dict[str, float]:
    options, counts = np.unique(table.num_options, return_counts=True)
    return {f"options/{option}": int(count) for option, count in zip(options, counts, strict=True)}
