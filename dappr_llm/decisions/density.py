"""
Densities of hidden states: how typical a row is of those that were trained on, whatever its answer.

Features `[N, G, D]` are L2-normalised vectors, one per group (a layer and a pooling). A density is fitted to each
group from streaming moments, scores of groups are standardised on rows that the moments have not seen, and their mean
is the density of a row: larger is more typical. There is nothing to tune: rank, neighbours and shares are constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core.errors import UserError

KINDS = ("gaussian", "class_gaussian", "knn")
RANK = 256  # directions of a covariance that are kept; the others share one variance
NEIGHBOURS = 10
MOST_NEIGHBOURS = 2000  # rows that a kNN density keeps
MOST_CLASSES = 1000  # beyond, one Gaussian is fitted whatever the labels
LEAST_ROWS = 50
_CONSTANT = 1e-12  # variance of L2-normalised features below which they do not vary


def normalised(features: np.ndarray, names: Sequence[str] | None = None) -> np.ndarray:
    """
    Features `[N, G, D]` of length 1, in float64; a `UserError` for NaN and Inf.

    Args:
        features (`np.ndarray`):
            As they come from the model.
        names (`Sequence[str]`, *optional*):
            What errors call the rows; by default their numbers.
    """
    features = np.asarray(features, dtype=np.float64)
    bad = ~np.isfinite(features).all(axis=(1, 2))
    if bad.any():
        row = int(bad.argmax())
        raise UserError(
            f"The hidden states of row {names[row] if names else row} hold NaN or Inf ({int(bad.sum())} of {len(bad)} "
            "rows), so no density can be fitted to them: the weights are damaged or diverged in training; train again "
            "with a lower train.learning_rate, or load the model in a wider dtype"
        )
    lengths = np.linalg.norm(features, axis=-1, keepdims=True)
    return features / np.where(lengths > 0, lengths, 1.0)


@dataclass
class Moments:
    """
    Count, sum and second moment of features, in float64: added to batch by batch, and merged over processes.

    Args:
        counts (`np.ndarray` of shape `[C]`):
            Rows of each class; one class where labels do not matter.
        sums (`np.ndarray` of shape `[G, C, D]`):
            Sums of features by class.
        second (`np.ndarray` of shape `[G, D, D]`):
            Sums of outer products.
    """

    counts: np.ndarray
    sums: np.ndarray
    second: np.ndarray

    @classmethod
    def empty(cls, groups: int, dimensions: int, classes: int = 1) -> Moments:
        """Moments of no rows."""
        return cls(
            np.zeros(classes, dtype=np.int64),
            np.zeros((groups, classes, dimensions)),
            np.zeros((groups, dimensions, dimensions)),
        )

    def add(self, features: np.ndarray, labels: np.ndarray | None = None) -> None:
        """
        Count in a batch.

        Args:
            features (`np.ndarray` of shape `[N, G, D]`):
                From [`normalised`].
            labels (`np.ndarray` of shape `[N]`, *optional*):
                Class of each row; by default all are of the first.
        """
        labels = np.zeros(len(features), dtype=np.int64) if labels is None else np.asarray(labels)
        np.add.at(self.counts, labels, 1)
        for group in range(features.shape[1]):
            own = np.ascontiguousarray(features[:, group])
            np.add.at(self.sums[group], labels, own)
            self.second[group] += own.T @ own

    def merge(self, other: Moments) -> None:
        """Count in the rows of another process."""
        self.counts = self.counts + other.counts
        self.sums = self.sums + other.sums
        self.second = self.second + other.second

    def covariance(self, group: int) -> np.ndarray:
        """The covariance `[D, D]` of a group around the means of the classes."""
        count = self.counts.sum()
        shares = np.where(self.counts > 0, self.counts, 1)[:, None]
        found = self.second[group] / count - (self.sums[group] / shares).T @ self.sums[group] / count
        return (found + found.T) / 2


def oas_shrinkage(covariance: np.ndarray, count: int) -> float:
    """
    How much of a covariance the oracle approximating shrinkage replaces by a multiple of the identity; as
    scikit-learn's `OAS`, whose covariance is that of all rows in memory.

    Args:
        covariance (`np.ndarray` of shape `[D, D]`):
            Of the rows, divided by their number.
        count (`int`):
            Number of rows.
    """
    size = len(covariance)
    square, scale = float(np.mean(covariance**2)), (np.trace(covariance) / size) ** 2
    below = (count + 1) * (square - scale / size)
    return 1.0 if below == 0 else min(float((square + scale) / below), 1.0)


@dataclass(frozen=True)
class Gaussian:
    """
    One Gaussian per class with a covariance shared by all, of low rank plus an isotropic rest.

    Args:
        means (`np.ndarray` of shape `[C, D]`):
            Mean of each class that has rows.
        components (`np.ndarray` of shape `[D, R]`):
            Orthonormal directions of the largest variances.
        variances (`np.ndarray` of shape `[R]`):
            Variances along these.
        rest (`float`):
            Variance along every other direction.
    """

    means: np.ndarray
    components: np.ndarray
    variances: np.ndarray
    rest: float

    @classmethod
    def fit(cls, moments: Moments, group: int = 0, rank: int = RANK, name: str = "") -> Gaussian:
        """
        The Gaussian of one group.

        Args:
            moments (`Moments`):
                Of the training rows.
            group (`int`, *optional*, defaults to 0):
                Which group.
            rank (`int`, *optional*, defaults to 256):
                Directions that are kept.
            name (`str`, *optional*):
                What errors call the group.
        """
        from scipy.linalg import eigh

        count, size = int(moments.counts.sum()), moments.second.shape[-1]
        if count < LEAST_ROWS:
            raise UserError(f"A density needs at least {LEAST_ROWS} rows, found {count}; give more training rows")
        covariance = moments.covariance(group)
        total = float(np.trace(covariance))
        if not total / size > _CONSTANT:
            raise UserError(
                f"The hidden states {name or group} are the same in all {count} rows, so they say nothing of a row: "
                "the rows are all alike, or the model is damaged"
            )
        shrinkage, mean = oas_shrinkage(covariance, count), total / size
        rank = min(rank, size)
        found, components = eigh(covariance, subset_by_index=[size - rank, size - 1])
        left = max(total - float(found.sum()), 0.0) / (size - rank) if rank < size else mean
        variances = (1 - shrinkage) * np.maximum(found, 0.0) + shrinkage * mean
        rest = (1 - shrinkage) * left + shrinkage * mean
        # Exactly dependent directions (features of length 1 have one) would be divided by zero without shrinkage.
        floor = _CONSTANT * mean
        own = moments.counts > 0
        means = moments.sums[group][own] / moments.counts[own][:, None]
        return cls(means, components, np.maximum(variances, floor), max(rest, floor))

    def score(self, features: np.ndarray) -> np.ndarray:
        """
        Minus half the squared Mahalanobis distance to the nearest class `[N]`: the log-density up to a constant.

        Args:
            features (`np.ndarray` of shape `[N, D]`):
                Of this group, normalised.
        """
        nearest = np.full(len(features), np.inf)
        for mean in self.means:
            centred = features - mean
            inside = centred @ self.components
            outside = centred - inside @ self.components.T
            distance = (inside**2 / self.variances).sum(axis=-1) + (outside**2).sum(axis=-1) / self.rest
            nearest = np.minimum(nearest, distance)
        return -nearest / 2


@dataclass
class KeptRows:
    """The rows of a kNN density: those with the smallest keys, so that neither order nor processes matter."""

    most: int = MOST_NEIGHBOURS
    rows: dict[bytes, np.ndarray] = field(default_factory=dict)

    def add(self, keys: Sequence[bytes], features: np.ndarray) -> None:
        """Offer rows `[N, G, D]`; those beyond `most` with the largest keys are dropped."""
        self.rows |= {key: row.astype(np.float32) for key, row in zip(keys, features, strict=True)}
        self.rows = {key: self.rows[key] for key in sorted(self.rows)[: self.most]}

    def merge(self, other: KeptRows) -> None:
        """Take over the rows of another process."""
        self.rows |= other.rows
        self.rows = {key: self.rows[key] for key in sorted(self.rows)[: self.most]}

    def stacked(self) -> np.ndarray:
        """The rows `[G, R, D]`; a `UserError` if they are too few, or do not vary."""
        if len(self.rows) < LEAST_ROWS:
            raise UserError(f"A density needs at least {LEAST_ROWS} rows, found {len(self.rows)}")
        found = np.stack([self.rows[key] for key in sorted(self.rows)], axis=1)
        if (found.astype(np.float64).var(axis=1).mean(axis=-1) <= _CONSTANT).any():
            raise UserError("The hidden states are the same in all rows, so they say nothing of a row")
        return found


def neighbour_scores(rows: np.ndarray, features: np.ndarray, neighbours: int = NEIGHBOURS) -> np.ndarray:
    """
    Minus the cosine distance to the k-th nearest training row `[N]`, by scikit-learn.

    Args:
        rows (`np.ndarray` of shape `[R, D]`):
            Training rows of one group.
        features (`np.ndarray` of shape `[N, D]`):
            Rows to score.
        neighbours (`int`, *optional*, defaults to 10):
            k.
    """
    from sklearn.neighbors import NearestNeighbors

    search = NearestNeighbors(n_neighbors=min(neighbours, len(rows)), metric="cosine").fit(rows)
    return -search.kneighbors(features)[0][:, -1]


def standard(scores: np.ndarray, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """
    Mean and standard deviation of each group's scores, by which they are put on one scale.

    On the rows that moments were taken from a density is too high, by far where they are fewer than dimensions:
    hence scores `[N, G]` of other rows.

    Args:
        scores (`np.ndarray` of shape `[N, G]`):
            Scores of held-out training rows.
        names (`Sequence[str]`):
            The groups, for errors.
    """
    centre, spread = scores.mean(axis=0), scores.std(axis=0)
    flat = ~(spread > 0)
    if flat.any():
        raise UserError(
            f"The density of {names[int(flat.argmax())]} is the same for all {len(scores)} held-out rows, so it tells "
            "no rows apart: the rows are all alike, or too few"
        )
    return centre, spread


def combined(scores: np.ndarray, centre: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """The density `[N]` of rows from their scores `[N, G]`: the mean of the groups' standardised scores."""
    return ((scores - centre) / spread).mean(axis=-1)
