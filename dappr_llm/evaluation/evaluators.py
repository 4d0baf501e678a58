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
from .length_matching import match_lengths, weighted_auroc
from .metric_columns import (
    ANSWERS,
    MATCHED,
    PUBLISHED,
    SCORES,
    SHIFTED,
    TRIVIAL_READINGS,
    Metric,
    detection_keys,
    length_matched,
    mixture_metrics,
)
from .ood_baselines import Sides, TrivialSides, trivial_sides
from .prediction_table import PredictionTable
from .scores import has_score, uncertainty

SLOTS = ("train", "task")
# The chosen score and every score by its name, all on the training letters: what lengths are matched for, and what
# ranks the mixture of ID and OOD items.
MIXTURE_READINGS = (MATCHED, *(f"_{name}" for name in SCORES))


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
            `"mutual_information"` (of the Dirichlet distribution or of the members), `"evidence"` and
            `"max_evidence"` (minus the total evidence alpha0 - K, or that of the best option), `"energy"` (minus
            logsumexp of the logits), `"max_logit"` or `"density"` (minus the density of the input).
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
    id_table: PredictionTable,
    ood_tables: dict[str, PredictionTable],
    score: str = "epistemic",
    trivial: TrivialSides | None = None,
) -> dict[str, float]:
    """
    Every number of a results file, under flat keys.

    Args:
        id_table ([`PredictionTable`]): Predictions for the task the model was trained on.
        ood_tables (`dict[str, PredictionTable]`): Predictions for the other tasks, by name.
        score (`str`, *optional*, defaults to `"epistemic"`): Which uncertainty ranks the items; see [`evaluate_ood`].
        trivial (`Mapping`, *optional*): From [`trivial_sides`]; by default from the tables alone, without texts.

    Returns:
        `dict[str, float]`: `id/<metric>` of [`evaluate_id`]; per task `ood/<task>/<metric>` of [`detection_values`]
        and [`mixture_values`], `n`, and where labels are known `accuracy`, `nll`, `brier`, `ece`, `ece_floor`; numbers
        of items by number of options as `id/options/4`.
    """
    results = {f"id/{name}": value for name, value in evaluate_id(id_table).items()}
    results |= {f"id/{name}": value for name, value in _option_counts(id_table).items()}
    trivial = trivial_sides(id_table, ood_tables) if trivial is None else trivial
    shifted = [metric.key for metric in SHIFTED]
    for task, table in ood_tables.items():
        answers = evaluate_id(table)
        sides = detection_sides(id_table, table, score, trivial.get(task))
        values = detection_values(id_table, table, sides)
        values |= {name: answers[name] for name in shifted if name in answers}
        values |= mixture_values(id_table, table, sides)
        values["n"] = len(table)
        values |= {name: answers[name] for name in ("n_unlabelled", "n_nan") if name in answers}
        values |= _option_counts(table)
        results |= {f"ood/{task}/{name}": value for name, value in values.items()}
    return results


def detection_values(
    id_table: PredictionTable, ood_table: PredictionTable, sides: Mapping[str, Sides]
) -> dict[str, float]:
    """
    Detection between two tasks, as a results file has it.

    Args:
        id_table, ood_table ([`PredictionTable`]): Predictions of one model.
        sides (`Mapping`): From [`detection_sides`].

    Returns:
        `dict[str, float]`: `auroc`, `aupr`, `aupr_ood`, `fpr95` (matched reading), the same with the suffix
        `_published`; `auroc_<score>` by every score that the tables have; `auroc_trivial_<name>` of the detectors
        that see no model and `auroc_minus_trivial_<name>`, the chosen score's AUROC minus theirs; where lengths are
        known `auroc_length_matched`, `auroc_<score>_length_matched` (NaN where lengths could not be matched) and the
        facts of the [`Matching`].
    """
    values: dict[str, float] = {}
    for suffix, pair in sides.items():
        areas = ranking_metrics.ood_scores(*pair)
        values |= {f"{name}{suffix}": areas[name] for name in detection_keys(suffix)}
    for suffix in TRIVIAL_READINGS:
        if suffix in sides:
            values[f"auroc_minus{suffix}"] = values["auroc"] - values[f"auroc{suffix}"]
    matching = match_lengths(id_table, ood_table)
    if matching is None:
        return values
    for suffix in MIXTURE_READINGS:
        if suffix in sides:
            usable = matching.usable
            values[f"auroc{length_matched(suffix)}"] = (
                weighted_auroc(*sides[suffix], matching) if usable else float("nan")
            )
    facts = {"id": matching.id_rows, "ood": matching.ood_rows}
    return {
        **values,
        **{f"matched_n_{side}": rows for side, rows in facts.items()},
        "matched_length_auroc": matching.length_auroc,
    }


def mixture_answers(id_table: PredictionTable, ood_table: PredictionTable) -> tuple[np.ndarray, np.ndarray]:
    """
    Which answers are right where the questions of both tasks are asked together.

    ID items without a label are left out. OOD items are right or wrong by their labels, and wrong where they have
    none: no answer to them can be right.

    Returns:
        `tuple`: `(rows, correct)`: the rows that are kept, of ID and OOD items one after the other, and whether the
        answer to each of them is right.
    """
    known = np.concatenate([id_table.labels >= 0, ood_table.labels >= 0])
    correct = np.zeros(len(known), dtype=bool)
    correct[known] = np.concatenate([answer_rows(table)["correct"] for table in (id_table, ood_table)])
    rows = np.flatnonzero(known | (np.arange(len(known)) >= len(id_table)))
    return rows, correct[rows]


def mixture_values(
    id_table: PredictionTable, ood_table: PredictionTable, sides: Mapping[str, Sides]
) -> dict[str, float]:
    """
    Of ID and OOD items asked together, which answers are wrong? By every score, on the training letters.

    The arguments are those of [`detection_values`].

    Returns:
        `dict[str, float]`: `mixture_risk` (share of wrong answers), `mixture_failure_auroc`, `mixture_aurc`,
        `mixture_risk_at_coverage_80` and `mixture_coverage_at_risk_5` by the chosen score, and
        `mixture_failure_auroc_<score>` and `mixture_aurc_<score>` by every other.
    """
    rows, correct = mixture_answers(id_table, ood_table)
    values: dict[str, float] = {}
    for suffix in MIXTURE_READINGS:
        if suffix not in sides:
            continue
        ranked = np.concatenate(sides[suffix])[rows]
        for metric in mixture_metrics(suffix):
            values[f"{metric.key}{suffix}"] = function_of(metric)(correct, ranked)
    return values


def detection_sides(
    id_table: PredictionTable,
    ood_table: PredictionTable,
    score: str = "epistemic",
    trivial: Mapping[str, Sides] | None = None,
) -> dict[str, Sides]:
    """
    Uncertainties `[N]` and `[M]` of both tables for each reading in a results file, by the suffix of its keys.

    Args:
        id_table, ood_table, score: As in [`evaluate_ood`].
        trivial (`Mapping`, *optional*): Those of the trivial detectors, from [`trivial_sides`].
    """
    sides = {
        MATCHED: ood_uncertainties(id_table, ood_table, score),
        PUBLISHED: ood_uncertainties(id_table, ood_table, score, slots="task"),
    }
    for other in SCORES:
        if all(has_score(table, other) for table in (id_table, ood_table)):
            sides[f"_{other}"] = ood_uncertainties(id_table, ood_table, other)
    return {**sides, **(trivial or {})}


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


def _option_counts(table: PredictionTable) -> dict[str, float]:
    options, counts = np.unique(table.num_options, return_counts=True)
    return {f"options/{option}": int(count) for option, count in zip(options, counts, strict=True)}
