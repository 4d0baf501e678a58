"""
Weights under which the items of two tasks are equally long, so that a detector cannot live on length.

Items are put into cells: bins of question length, bins of option length, and the exact number of options. Within a
cell, the items of each task get equal weights whose sums are equal for both tasks (overlap weights: a cell counts by
the harmonic mean of its two shares, which keeps most rows for a given balance). Cells that only one task has get
weight 0. The bins are the coarsest under which length itself no longer separates the tasks; scores and labels play no
part in the choice. Weights are fixed before any row is resampled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .prediction_table import PredictionTable

BALANCED = (0.48, 0.52)  # where the AUROC of every length must lie under the weights
MIN_ROWS = 50  # effective rows on each side: below, no figure is given
_GRIDS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 1_000_000)  # bins of each length; the last: every value by itself


@dataclass(frozen=True)
class Matching:
    """
    Weights of the items of two tasks.

    Args:
        id_weights, ood_weights (`np.ndarray` of shape `[N]` and `[M]`): Each sums to 1, or is 0 throughout where no
            cell holds items of both tasks.
        id_rows, ood_rows (`float`): Effective numbers of rows (Kish): the sum of weights squared over the sum of
            squared weights.
        length_auroc (`float`): Of the AUROCs of the lengths under these weights, the one farthest from 0.5; NaN where
            nothing is matched.
        bins (`int`): Bins per length.
    """

    id_weights: np.ndarray
    ood_weights: np.ndarray
    id_rows: float
    ood_rows: float
    length_auroc: float
    bins: int

    @property
    def enough(self) -> bool:
        """Whether enough rows overlap for a figure."""
        return min(self.id_rows, self.ood_rows) >= MIN_ROWS

    @property
    def balanced(self) -> bool:
        """Whether no length separates the tasks under these weights."""
        return BALANCED[0] <= self.length_auroc <= BALANCED[1]

    @property
    def usable(self) -> bool:
        """Whether a length-matched figure may be given."""
        return self.enough and self.balanced

    @property
    def weights(self) -> np.ndarray:
        """Of the rows of both tasks, ID first, `[N + M]`."""
        return np.concatenate([self.id_weights, self.ood_weights])


def match_lengths(id_table: PredictionTable, ood_table: PredictionTable) -> Matching | None:
    """
    Weights under which both tasks have the same lengths and numbers of options.

    Args:
        id_table, ood_table ([`PredictionTable`]): Predictions of one model for two tasks.

    Returns:
        [`Matching`]: With the coarsest bins that balance all lengths. If none does, or only with too few rows, the
        best there is, which then is not `usable`. `None` where a table holds no lengths, as for images.
    """
    if any(table.lengths is None or not len(table) for table in (id_table, ood_table)):
        return None
    sides = [_features(table) for table in (id_table, ood_table)]
    found: list[Matching] = []
    for bins in _GRIDS:
        cells = _cells(np.concatenate(sides), len(id_table), bins)
        found.append(_match(cells, sides, bins))
        if found[-1].balanced or not found[-1].id_rows:
            break
    if found[-1].balanced or not found[-1].id_rows:
        return found[-1]
    large = [each for each in found if each.enough] or found
    return min(large, key=lambda each: abs(each.length_auroc - 0.5))


def effective_rows(weights: np.ndarray) -> float:
    """Kish's effective number of rows; 0 for weights that are all 0."""
    squares = float((weights**2).sum())
    return float(weights.sum()) ** 2 / squares if squares else 0.0


def weighted_auroc(id_score: np.ndarray, ood_score: np.ndarray, matching: Matching) -> float:
    """
    AUROC of an uncertainty under the weights of a matching.

    Args:
        id_score, ood_score (`np.ndarray` of shape `[N]` and `[M]`): Larger means more uncertain; NaN ranks as most
            uncertain.
        matching ([`Matching`]): The weights.
    """
    score = np.concatenate([id_score, ood_score]).astype(np.float64)
    ranks = np.unique(np.where(np.isnan(score), np.inf, score), return_inverse=True)[1]
    size = len(id_score)
    inside = np.bincount(ranks[:size], matching.id_weights, minlength=ranks.max(initial=0) + 1)
    outside = np.bincount(ranks[size:], matching.ood_weights, minlength=len(inside))
    total = inside.sum() * outside.sum()
    # Pairs with equal scores count half.
    return float(outside @ (inside.cumsum() - inside / 2) / total) if total else float("nan")


def _features(table: PredictionTable) -> np.ndarray:
    """Question length, option length and number of options, `[N, 3]`."""
    assert table.lengths is not None
    options = np.zeros(len(table), dtype=np.int64) if table.option_lengths is None else table.option_lengths
    return np.stack([table.lengths, options, table.num_options], axis=1)


def _cells(features: np.ndarray, num_id: int, bins: int) -> np.ndarray:
    """The cell of each row `[N + M]`, from 0 up."""
    # Both tasks count alike in the borders, whichever has more rows.
    share = np.where(np.arange(len(features)) < num_id, 1 / num_id, 1 / max(1, len(features) - num_id))
    binned = [_quantile_bins(features[:, i], share, bins) for i in (0, 1)]
    return np.unique(np.stack([*binned, features[:, 2]], axis=1), axis=0, return_inverse=True)[1].reshape(-1)


def _quantile_bins(values: np.ndarray, share: np.ndarray, bins: int) -> np.ndarray:
    """Bins of about equal share; equal values are always in the same bin."""
    distinct, place = np.unique(values, return_inverse=True)
    if len(distinct) <= bins:
        return place
    below = np.bincount(place, share).cumsum()
    middle = below - np.diff(below, prepend=0) / 2
    return np.minimum((middle / below[-1] * bins).astype(np.int64), bins - 1)[place]


def _match(cells: np.ndarray, sides: list[np.ndarray], bins: int) -> Matching:
    size = len(sides[0])
    counts = [np.bincount(part, minlength=cells.max() + 1) for part in (cells[:size], cells[size:])]
    shares = [count / count.sum() for count in counts]
    wanted = np.divide(shares[0] * shares[1], shares[0] + shares[1], out=np.zeros(len(shares[0])), where=counts[0] > 0)
    wanted = wanted / wanted.sum() if wanted.any() else wanted
    one, other = (
        np.divide(wanted, count, out=np.zeros(len(wanted)), where=count > 0)[part]
        for count, part in zip(counts, (cells[:size], cells[size:]), strict=True)
    )
    found = Matching(one, other, effective_rows(one), effective_rows(other), float("nan"), bins)
    if not wanted.any():
        return found
    checks = [weighted_auroc(*pair, found) for pair in _length_scores(sides)]
    return replace(found, length_auroc=max(checks, key=lambda value: abs(value - 0.5)))


def _length_scores(sides: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """What must not separate the tasks: each length, and its distance from the median of the ID items."""
    found = []
    for column in (0, 1):
        one, other = (side[:, column].astype(np.float64) for side in sides)
        found.append((one, other))
        found.append((np.abs(one - np.median(one)), np.abs(other - np.median(one))))
    return found
