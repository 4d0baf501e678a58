"""Was fine-tuning worth it? Metrics of a run's baselines, and the run minus each of them on the same rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core import checkpoint
from ..core.errors import UserError
from ..core.names import safe_name
from .bootstrap import RESAMPLES, bootstrap, paired_bootstrap
from .evaluators import evaluate_id
from .metric_columns import BY_KEY
from .prediction_table import PredictionTable
from .results import Intervals

OWN, DIFFERENCE = "baseline", "minus_baseline"  # first parts of the keys in a results file
COMPARED = tuple(BY_KEY[key] for key in ("accuracy", "balanced_accuracy", "macro_f1", "nll", "brier", "ece"))
_NAME = re.compile(r"\w[\w.-]{0,99}")
_TITLES = {
    "majority": "majority class",
    "majority_letter": "most frequent letter",
    "longest_option": "longest option",
    "tfidf": "TF-IDF + logistic regression",
    "tfidf_options": "TF-IDF of question and options",
    "features": "frozen features + logistic regression",
    "zero_shot": "zero-shot",
}


def title(name: str) -> str:
    """What a baseline is called in tables and sentences."""
    return _TITLES.get(name, name)


def baseline_results(
    table: PredictionTable, baselines: Mapping[str, PredictionTable], resamples: int = RESAMPLES, seed: int = 0
) -> tuple[dict[str, float], Intervals]:
    """
    Metrics of every baseline and the paired differences, with intervals.

    Args:
        table ([`PredictionTable`]): The run's predictions.
        baselines (`Mapping[str, PredictionTable]`): Predictions for the same rows, by name; from
            [`class_baselines`], [`choice_baselines`], or of any other model.
        resamples, seed: As in [`bootstrap`]; 0 resamples for no intervals.

    Returns:
        `tuple`: Results and intervals by key: `baseline/<name>/<metric>`, and `minus_baseline/<name>/<metric>`, the
        run's value minus the baseline's.
    """
    results: dict[str, float] = {}
    intervals: Intervals = {}
    own = evaluate_id(table)
    for name, other in baselines.items():
        if not _NAME.fullmatch(name):
            raise UserError(f"A baseline must have a name of letters, digits, . - and _, not {name!r}.")
        if not same_rows(table, other):
            raise UserError(f"The baseline {name!r} was not tested on the same rows as the run.")
        found = evaluate_id(other)
        keys = [metric.key for metric in COMPARED if metric.key in own]
        results |= {f"{OWN}/{name}/{key}": found[key] for key in keys}
        results |= {f"{DIFFERENCE}/{name}/{key}": own[key] - found[key] for key in keys}
        if not resamples:
            continue
        drawn = bootstrap(other, {}, resamples, seed, wanted=COMPARED)
        intervals |= {f"{OWN}/{name}/{key}": drawn[f"id/{key}"] for key in keys}
        paired = paired_bootstrap([(other, {})], [(table, {})], resamples, seed, wanted=COMPARED)
        pairs = {key: paired[f"id/{key}"] for key in keys}
        intervals |= {f"{DIFFERENCE}/{name}/{key}": (pair.low, pair.high) for key, pair in pairs.items()}
    return results, intervals


def baseline_facts(baselines: Mapping[str, PredictionTable]) -> dict[str, Any]:
    """What a results file says about its baselines beside their metrics: rows they were fitted on, and the like."""
    return {name: table.meta.get("baseline") or {} for name, table in baselines.items()}


def same_rows(table: PredictionTable, other: PredictionTable) -> bool:
    """Whether two tables are of the same items with the same labels, in the same order."""
    return np.array_equal(table.ids, other.ids) and np.array_equal(table.labels, other.labels)


def save_baselines(folder: Path, baselines: Mapping[str, PredictionTable]) -> None:
    """Write the tables of baselines to `baselines/` of a run's folder."""
    for name, table in baselines.items():
        table.save(folder / checkpoint.BASELINES / f"{safe_name(name)}.npz")


def load_baselines(folder: Path, table: PredictionTable) -> dict[str, PredictionTable]:
    """The baselines in a run's folder that were tested on the rows of a table, by name."""
    found = {path.stem: PredictionTable.load(path) for path in sorted((folder / checkpoint.BASELINES).glob("*.npz"))}
    kept = {name: other for name, other in found.items() if same_rows(table, other)}
    return {name: kept[name] for name in sorted(kept, key=lambda n: ([*_TITLES, n].index(n), n))}
