"""
Random numbers that depend on seed, epoch and row alone.

A row is cropped and flipped in the same way whichever worker or process reads it and whether or not the run was
resumed; a split is the same with every version of every library.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_STEP = 0x9E3779B97F4A7C15
_FULL = 2**64 - 1


def _mixed(values: Any) -> Any:
    """The finaliser of SplitMix64 on an integer or on uint64 values: every input bit reaches every output bit."""
    one, two, down = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, (30, 27, 31)
    if isinstance(values, int):
        values = ((values ^ (values >> down[0])) * one) & _FULL
        values = ((values ^ (values >> down[1])) * two) & _FULL
        return values ^ (values >> down[2])
    values = (values ^ (values >> np.uint64(down[0]))) * np.uint64(one)
    values = (values ^ (values >> np.uint64(down[1]))) * np.uint64(two)
    return values ^ (values >> np.uint64(down[2]))


def _key(*numbers: int) -> int:
    state = 0
    for number in numbers:
        state = _mixed((state + _STEP + number) & _FULL)
    return state


def _hashed(rows: np.ndarray, *keys: int) -> np.ndarray:
    """uint64 `[rows, keys]`, one column per key."""
    steps = rows.astype(np.uint64) * np.uint64(_STEP)
    return _mixed(_mixed(steps[:, None] + np.array(keys, dtype=np.uint64)) + np.uint64(_STEP))


def draws(rows: np.ndarray, count: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    """
    Uniform numbers in [0, 1), `count` for each row.

    Args:
        rows (`np.ndarray`):
            Row numbers, `[B]`.
        count (`int`):
            Numbers per row.
        seed (`int`, *optional*, defaults to 0):
            Seed of the run.
        epoch (`int`, *optional*, defaults to 0):
            A row gets other numbers in every epoch.
    """
    numbers = _hashed(np.asarray(rows), *(_key(seed, epoch, column) for column in range(count)))
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def shuffled(count: int, seed: int = 0, stream: int = 0) -> np.ndarray:
    """
    A permutation of `count` rows; its first rows are a random sample, and a longer sample contains a shorter one.

    Args:
        count (`int`):
            How many rows.
        seed (`int`, *optional*, defaults to 0):
            Seed of the split.
        stream (`int`, *optional*, defaults to 0):
            Tells apart permutations for different purposes under one seed.
    """
    return np.argsort(_hashed(np.arange(count), _key(seed, stream, -1))[:, 0], kind="stable")
