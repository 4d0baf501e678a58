"""
Random numbers that depend on seed, epoch and row alone.

A row is cropped and flipped in the same way whichever worker or process reads it and whether or not the run was
resumed; a split is the same with every version of every library.
"""

from __future__ import annotations

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _hashed(rows: np.ndarray, *keys: int) -> np.ndarray:
    state = np.zeros(1, dtype=np.uint64)
    for key in keys:
        state = _mixed(state + _STEP + np.array([key % 2**64], dtype=np.uint64))
    return _mixed(_mixed(state + rows.astype(np.uint64) * _STEP) + _STEP)


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
    columns = [_hashed(np.asarray(rows), seed, epoch, column) for column in range(count)]
    return (np.stack(columns, axis=-1) >> np.uint64(11)).astype(np.float64) * 2.0**-53


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
    return np.argsort(_hashed(np.arange(count), seed, stream, -1), kind="stable")
