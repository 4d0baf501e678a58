"""
Confidence intervals: of metrics over test items (bootstrap), of proportions (Wilson) and over seeds (t-interval).

`bootstrap` resamples the items of one model's tables; `paired_bootstrap` compares two models on the same items;
`wilson` is for single proportions, such as the recall of a class; `over_seeds` summarises one metric over runs that
differ in their seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ..core.errors import UserError
from .bootstrap_metrics import Evaluation
from .metric_columns import ANSWERS, Metric, is_binned
from .ood_baselines import TrivialSides
from .prediction_table import PredictionTable
from .weighted_rankings import Values

RESAMPLES = 1000
LEVEL = 0.95
# Rows times resamples per chunk: fits the CPU cache and bounds memory.
_CHUNK = 200_000

Tables = tuple[PredictionTable, Mapping[str, PredictionTable]]


@dataclass(frozen=True)
class Paired:
    """
    Difference of one metric between two models on the same items.

    Args:
        difference (`float`): Second model minus first, averaged over seeds.
        low, high (`float`): Confidence interval of the difference.
        p_value (`float`): Two-sided, for the hypothesis of no difference; at least 2 / (resamples + 1).
    """

    difference: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation (n - 1) and t-interval of a metric over `n` seeds; NaN but for the mean if n = 1."""

    mean: float
    std: float
    low: float
    high: float
    n: int


def bootstrap(
    id_table: PredictionTable,
    ood_tables: Mapping[str, PredictionTable],
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
    score: str = "epistemic",
    wanted: tuple[Metric, ...] = ANSWERS,
    trivial: TrivialSides | None = None,
) -> dict[str, tuple[float, float]]:
    """
    Confidence intervals of every metric of [`evaluate_tables`], by resampling the items of each table.

    Percentile intervals. Those of binned calibration errors are shifted so that the mean over resamples equals the
    measured value: a resample repeats rows, which biases these errors upwards.

    Args:
        id_table ([`PredictionTable`]): Predictions for the task the model was trained on.
        ood_tables (`Mapping[str, PredictionTable]`): Predictions for the other tasks, by name.
        resamples (`int`, *optional*, defaults to 1000): Number of bootstrap resamples.
        seed (`int`, *optional*, defaults to 0): The same seed gives the same intervals.
        level (`float`, *optional*, defaults to 0.95): The nominal coverage.
        score (`str`, *optional*, defaults to `"epistemic"`): Which uncertainty ranks the items; see [`evaluate_ood`].
        wanted (`tuple[Metric, ...]`, *optional*): Metrics of the answers in distribution; by default all.
        trivial (`Mapping`, *optional*): From [`trivial_sides`]; by default from the tables alone, without texts.

    Returns:
        `dict[str, tuple[float, float]]`: Lower and upper bound by key; NaN where the metric is undefined. Counts and
        `ece_floor` have no interval.
    """
    _check(resamples, level)
    ood_tables = dict(ood_tables)
    evaluation = Evaluation(id_table, ood_tables, score, wanted, trivial)
    measured = evaluation(*_ones(id_table, ood_tables))
    drawn = _gather(evaluation(*weights) for weights in _resample(id_table, ood_tables, resamples, seed))
    return {key: _interval(key, float(value[0]), drawn[key], level) for key, value in measured.items()}


def paired_bootstrap(
    first: Sequence[Tables],
    second: Sequence[Tables],
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
    score: str = "epistemic",
    wanted: tuple[Metric, ...] = ANSWERS,
) -> dict[str, Paired]:
    """
    Differences between two models, or between two methods over several seeds, on the same items.

    Every table is evaluated on the same resampled items, so the difficulty of an item, which both models share,
    cancels out of the difference. Seeds are not resampled: the interval covers the choice of test items for the given
    runs, not the choice of seeds.

    Args:
        first, second (`Sequence`):
            Equally many entries `(id_table, {task: ood_table})`, one per seed; one seed is enough.
        resamples, seed, level, score, wanted:
            As in [`bootstrap`].

    Returns:
        `dict[str, Paired]`: By key, for every metric that is computed for all tables.
    """
    _check(resamples, level)
    if not first or len(first) != len(second):
        raise UserError(f"Both sides of a comparison need equally many seeds, not {len(first)} and {len(second)}.")
    runs = [*first, *second]
    for number, run in enumerate(runs[1:], start=2):
        _same_items(runs[0], run, number)
    evaluations = [Evaluation(id_table, dict(ood), score, wanted) for id_table, ood in runs]
    id_table, ood = runs[0][0], dict(runs[0][1])

    def differences(weights: tuple[np.ndarray, dict[str, np.ndarray]]) -> Values:
        values = [evaluation(*weights) for evaluation in evaluations]
        half = len(first)
        shared = [key for key in values[0] if all(key in other for other in values)]
        return {key: np.mean([values[half + i][key] - values[i][key] for i in range(half)], axis=0) for key in shared}

    measured = differences(_ones(id_table, ood))
    drawn = _gather(differences(weights) for weights in _resample(id_table, ood, resamples, seed))
    return {key: _paired(key, float(value[0]), drawn[key], level) for key, value in measured.items()}


def wilson(successes: ArrayLike, count: ArrayLike, level: float = LEVEL) -> tuple[np.ndarray, np.ndarray]:
    """
    Wilson's score interval of proportions, which is valid near 0 and 1 and for few items; NaN where `count` is 0.

    Args:
        successes, count (`ArrayLike`): Numbers of successes and of trials, of the same shape.
        level (`float`, *optional*, defaults to 0.95): The nominal coverage.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: Lower and upper bounds, of that shape.
    """
    from scipy.special import ndtri

    successes, count = np.rint(successes).astype(np.float64), np.rint(count).astype(np.float64)
    squared = float(ndtri((1 + level) / 2)) ** 2
    with np.errstate(invalid="ignore", divide="ignore"):
        share = successes / count
        middle = (share + squared / (2 * count)) / (1 + squared / count)
        spread = np.sqrt(squared * (share * (1 - share) / count + squared / (4 * count**2))) / (1 + squared / count)
    # Rounding would put the end of 0 or of n successes slightly beside 0 or 1.
    low = np.where(successes == 0, 0.0, middle - spread)
    high = np.where(successes == count, 1.0, middle + spread)
    return np.where(count > 0, low, np.nan), np.where(count > 0, high, np.nan)


def over_seeds(values: Sequence[float], level: float = LEVEL) -> Summary:
    """
    Mean, standard deviation and t-interval of one metric over runs with different seeds.

    Args:
        values (`Sequence[float]`): One value per seed.
        level (`float`, *optional*, defaults to 0.95): The nominal coverage.
    """
    array = np.asarray(list(values), dtype=np.float64)
    if not len(array):
        raise UserError("A summary over seeds needs at least one value.")
    mean, nan = float(array.mean()), float("nan")
    if len(array) == 1:
        return Summary(mean, nan, nan, nan, 1)
    from scipy.stats import t

    std = float(array.std(ddof=1))
    half = float(t.ppf((1 + level) / 2, len(array) - 1)) * std / len(array) ** 0.5
    return Summary(mean, std, mean - half, mean + half, len(array))


def _check(resamples: int, level: float) -> None:
    if resamples < 1 or not 0 < level < 1:
        raise UserError(f"Intervals need resamples >= 1 and a level between 0 and 1, not {resamples} and {level}.")


def _ones(id_table: PredictionTable, ood: Mapping[str, PredictionTable]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Weights of a single "resample" that draws every row once, for the measured values."""
    return np.ones((1, len(id_table))), {task: np.ones((1, len(table))) for task, table in ood.items()}


def _resample(
    id_table: PredictionTable, ood: Mapping[str, PredictionTable], resamples: int, seed: int
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """
    Row weights `[R, N]` of the ID table and `[R, M]` of each OOD table, in chunks of R resamples.

    Each table has its own random stream, so its weights depend neither on the chunk size nor on the other tables.
    """
    sizes = [len(id_table), *map(len, ood.values())]
    streams = [np.random.default_rng([seed, number]) for number in range(len(sizes))]
    step = max(1, _CHUNK // max(1, sum(sizes)))
    for start in range(0, resamples, step):
        count = min(step, resamples - start)
        weights = [draw_weights(stream, size, count) for stream, size in zip(streams, sizes, strict=True)]
        yield weights[0], dict(zip(ood, weights[1:], strict=True))


def draw_weights(stream: np.random.Generator, size: int, count: int) -> np.ndarray:
    """Row weights `[count, size]`: how often each of `size` items is drawn in each of `count` resamples."""
    if not size:
        return np.zeros((count, 0))
    rows = stream.integers(size, size=(count, size)) + size * np.arange(count)[:, None]
    return np.bincount(rows.ravel(), minlength=count * size).reshape(count, size).astype(np.float64)


def _gather(chunks: Iterable[Values]) -> Values:
    """Concatenate the values of all chunks, per metric."""
    found: dict[str, list[np.ndarray]] = {}
    for values in chunks:
        for key, value in values.items():
            found.setdefault(key, []).append(value)
    return {key: np.concatenate(parts) for key, parts in found.items()}


def _defined(key: str, measured: float, drawn: np.ndarray) -> np.ndarray:
    # Resamples in which the metric is undefined are left out, such as an AUROC of a resample without any wrong answer.
    drawn = drawn[np.isfinite(drawn)] if np.isfinite(measured) else drawn[:0]
    return drawn + (measured - drawn.mean()) if len(drawn) and is_binned(key) else drawn


def _interval(key: str, measured: float, drawn: np.ndarray, level: float) -> tuple[float, float]:
    drawn = _defined(key, measured, drawn)
    if not len(drawn):
        return float("nan"), float("nan")
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return (max(0.0, float(low)), float(high)) if is_binned(key) else (float(low), float(high))


def _paired(key: str, measured: float, drawn: np.ndarray, level: float) -> Paired:
    drawn, nan = _defined(key, measured, drawn), float("nan")
    if not len(drawn):
        return Paired(measured, nan, nan, nan)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    # Counting the measured sample as one of the resamples keeps the p-value above 0.
    tail = min((drawn <= 0).sum(), (drawn >= 0).sum()) + 1
    return Paired(measured, float(low), float(high), min(1.0, 2 * float(tail) / (len(drawn) + 1)))


def _same_items(reference: Tables, other: Tables, number: int) -> None:
    """`UserError` unless both runs were tested on the same tasks and items in the same order."""
    pairs = [("in distribution", reference[0], other[0])]
    if list(reference[1]) != list(other[1]):
        raise UserError(f"Run {number} was tested on {list(other[1])}, the first on {list(reference[1])}.")
    pairs += [(task, table, other[1][task]) for task, table in reference[1].items()]
    for where, mine, its in pairs:
        if len(mine) != len(its):
            raise UserError(f"Run {number} has {len(its)} items {where}, the first has {len(mine)}.")
        for name in ("ids", "labels"):
            a, b = getattr(mine, name), getattr(its, name)
            if (a != b).any():
                row = int(np.argmax(a != b))
                raise UserError(
                    f"Run {number} differs {where} in {name}[{row}]: {b[row]} against {a[row]} in the first."
                )
