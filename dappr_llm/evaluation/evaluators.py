"""From prediction tables to numbers, with fractions (never percent) as values.

Answers are read on each item's own options. Out-of-distribution scores are read on the same letters on both sides,
unless the published reading is asked for: K/alpha0 grows with K, so an idle fifth letter alone makes items foreign.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..core.errors import UserError
from . import metrics
from .metric_columns import ANSWERS, MATCHED, PUBLISHED, READINGS, SHIFTED, Metric, detection_keys
from .prediction_table import PredictionTable, Reading, entropy, renormalise

SCORES = ("epistemic", "aleatoric", "entropy", "max_prob", "mutual_information", "evidence")
SLOTS = ("train", "task")

# Ranked beside the headline score, on matched letters.
OTHER_SCORES = tuple(suffix.removeprefix("_") for suffix in READINGS if suffix not in (MATCHED, PUBLISHED))


def answer_rows(table: PredictionTable) -> dict[str, np.ndarray]:
    """
    What metrics of the answers are computed from, for the rows of known label.

    Args:
        table ([`PredictionTable`]): The predictions, each item read on its own options.

    Returns:
        `dict[str, np.ndarray]`: `probs` `[N, W]`; `labels`, `num_options`, `aleatoric`, `confidence` (of the most
        probable option) and `correct` (whether that one is right), `[N]` each.
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
        "correct": metrics.is_correct(probs, labels),
    }


def function_of(metric: Metric) -> Callable[..., Any]:
    """The function in `metrics.py` that computes a metric of the answers."""
    return getattr(metrics, metric.function or metric.key)


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
    How well one uncertainty tells in-distribution items from out-of-distribution ones.

    Args:
        id_table ([`PredictionTable`]):
            Predictions for the task the model was trained on: the positives.
        ood_table ([`PredictionTable`]):
            Predictions of the same model for another task. Labels play no part.
        score (`str`, *optional*, defaults to `"epistemic"`):
            What ranks the items: `"epistemic"`, `"aleatoric"`, `"entropy"`, `"max_prob"` (1 - max p),
            `"mutual_information"` (of the Dirichlet distribution or of the members) or `"evidence"` (minus the total
            evidence, alpha0 - K).
        slots (`str`, *optional*, defaults to `"train"`):
            `"train"` reads both sides on the training letters. `"task"`, the published reading, reads each side on all
            letters of its own task; its numbers say as much about the number of options as about the model.

    Returns:
        `dict[str, float]`: `auroc`, `aupr`, `aupr_ood` and `fpr95` of [`metrics.ood_scores`], `n_id` and `n_ood`.
    """
    sides = ood_uncertainties(id_table, ood_table, score, slots)
    return {**metrics.ood_scores(*sides), "n_id": len(id_table), "n_ood": len(ood_table)}


def ood_uncertainties(
    id_table: PredictionTable, ood_table: PredictionTable, score: str = "epistemic", slots: str = "train"
) -> tuple[np.ndarray, np.ndarray]:
    """The uncertainty of every item of both tables, with the arguments of [`evaluate_ood`]; NaN for broken rows."""
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
        score (`str`, *optional*, defaults to `"epistemic"`): What ranks the items; see [`evaluate_ood`].

    Returns:
        `dict[str, float]`: `id/<metric>` of [`evaluate_id`]; per task `ood/<task>/auroc`, `aupr`, `aupr_ood`, `fpr95`
        (matched letters), the same with `_published` (each side's own letters), `auroc_max_prob`, `auroc_entropy` and,
        where the tables allow it, `auroc_mutual_information` (matched), `n`, and where labels are known `accuracy`,
        `nll`, `brier`, `ece`, `ece_floor`; items by number of options as `id/options/4`.
    """
    results = {f"id/{name}": value for name, value in evaluate_id(id_table).items()}
    results |= {f"id/{name}": value for name, value in _option_counts(id_table).items()}
    shifted = [metric.key for metric in SHIFTED]
    for task, table in ood_tables.items():
        answers = evaluate_id(table)
        values: dict[str, float] = {}
        for suffix, sides in detection_sides(id_table, table, score).items():
            areas = metrics.ood_scores(*sides)
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
    """The uncertainties behind each ranking of a results file, by the suffix of its keys."""
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
    Whether the matched and the published reading coincide throughout, so that showing both would say one thing twice.

    So it is where all tasks have as many options as the model was trained on, as image classifiers always do.

    Args:
        results (`Mapping`): What [`evaluate_tables`] returned or [`load_results`] read.
    """
    published = [key for key in results if key.endswith(PUBLISHED)]
    pairs = [(results[key], results.get(key.removesuffix(PUBLISHED))) for key in published]
    return all(one == other or (one != one and other != other) for one, other in pairs)


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


def has_spread(table: PredictionTable) -> bool:
    """Whether the table tells how far apart its plausible answers lie: a Dirichlet distribution, or members."""
    return table.alpha is not None or table.members is not None


def uncertainty(table: PredictionTable, slots: str | int, score: str) -> np.ndarray:
    """
    One number per item, larger for the less certain; NaN for rows that hold NaN or Inf.

    Args:
        table ([`PredictionTable`]): The predictions.
        slots (`str` or `int`): The letters to read, as in [`PredictionTable.reading`].
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
        # The mass of the others keeps its resolution where 1 - max p in float32 is 0 for every confident row.
        probs = reading.probs.astype(np.float64)
        values = probs.sum(axis=1) - probs.max(axis=1)
    elif score == "mutual_information":
        values = _mutual_information(table, reading)
    elif reading.alpha is None:
        raise UserError(f"The score 'evidence' needs alpha, which the table of {table.meta.get('task')!r} lacks.")
    else:
        values = reading.num_options - reading.alpha.sum(axis=1, dtype=np.float64)
    # An infinite alpha0 would read as perfectly certain.
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
