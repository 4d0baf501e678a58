"""
Familiarity: a density as a conformal p-value on held-out rows of the training distribution.

A row with familiarity 0.005 is "as unusual as 1 in 200 of your questions". Of new rows of the same distribution a
share of at most `a` (and about `a`) has a familiarity of at most `a`, whatever the density: it is the possibility that
a row belongs to the distribution. The p-value of a row that is far from all others is 1/(n+1) at the least, so
detection is always measured on the raw density.

The variance of a mean over tokens falls with their number. Rows are therefore compared with calibration rows of
similar length, where these are enough for several bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.errors import UserError

LEAST_BIN = 250  # calibration rows of a bin of lengths
MOST_BINS = 4
LEAST_ROWS = 50  # below, the smallest p-value would be above 2 %


@dataclass(frozen=True)
class Familiarity:
    """
    Calibration densities, by bins of length.

    Args:
        edges (`tuple[int, ...]`):
            The longest length of every bin but the last one, which takes all longer rows.
        densities (`tuple[np.ndarray, ...]`):
            The sorted densities of each bin's calibration rows.
    """

    edges: tuple[int, ...]
    densities: tuple[np.ndarray, ...]

    @classmethod
    def fit(cls, densities: Sequence[float] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> Familiarity:
        """
        Args:
            densities (`Sequence[float]`):
                Of the calibration rows, on which nothing was fitted or chosen.
            lengths (`Sequence[int]`):
                Their lengths; all 0 where rows have none.
        """
        values, sizes = np.asarray(densities, dtype=np.float64), np.asarray(lengths)
        if not np.isfinite(values).all():
            raise UserError("The densities of the calibration rows hold NaN or Inf")
        if len(values) < LEAST_ROWS:
            raise UserError(f"Familiarity needs at least {LEAST_ROWS} calibration rows, found {len(values)}")
        edges = bin_edges(sizes)
        places = np.searchsorted(np.asarray(edges), sizes)
        return cls(edges, tuple(np.sort(values[places == number]) for number in range(len(edges) + 1)))

    @property
    def count(self) -> int:
        """Calibration rows."""
        return sum(map(len, self.densities))

    def p_values(self, densities: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """
        `(1 + #{calibration <= x}) / (n + 1)` of each row, `[N]`, among the calibration rows of its bin.

        Args:
            densities (`np.ndarray` of shape `[N]`):
                Densities of the same gate.
            lengths (`np.ndarray` of shape `[N]`):
                Lengths of the rows.
        """
        values = np.asarray(densities, dtype=np.float64)
        places = np.searchsorted(np.asarray(self.edges), np.asarray(lengths))
        found = np.empty(len(values))
        for number, known in enumerate(self.densities):
            own = places == number
            found[own] = (1 + np.searchsorted(known, values[own], side="right")) / (len(known) + 1)
        return np.where(np.isnan(values), np.nan, found)


def bin_edges(lengths: np.ndarray) -> tuple[int, ...]:
    """Ends of bins of about as many rows each, at least `LEAST_BIN`; equal lengths share a bin."""
    ordered = np.sort(lengths)
    bins = min(MOST_BINS, len(ordered) // LEAST_BIN)
    edges: list[int] = []
    for number in range(1, bins):
        edge = int(ordered[len(ordered) * number // bins - 1])
        start = np.searchsorted(ordered, edges[-1], side="right") if edges else 0
        end = np.searchsorted(ordered, edge, side="right")
        if end - start >= LEAST_BIN and len(ordered) - end >= LEAST_BIN:
            edges.append(edge)
    return tuple(edges)


def one_in(familiarity: float) -> str:
    """A familiarity in words: "as unusual as 1 in 200 of your questions"."""
    if familiarity >= 0.5:
        return "as usual as your questions are"
    return f"as unusual as 1 in {round(1 / max(familiarity, 1e-9)):,} of your questions"
