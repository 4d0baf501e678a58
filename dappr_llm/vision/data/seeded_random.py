"""
Counter-based random numbers: a function of seed, epoch and row only.

Augmentation of a row is the same in any data-loader worker or process and after a resume, and a random split is the
same with every version of NumPy and torch.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

_STEP = 0x9E3779B97F4A7C15
_FULL = 2**64 - 1
_Numbers = TypeVar("_Numbers", int, np.ndarray)


def _mixed(values: _Numbers) -> _Numbers:
    """The finaliser of SplitMix64 on a Python integer or a uint64 array; every input bit affects every output bit."""
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
    Uniform random numbers `[B, count]` in [0, 1).

    Args:
        rows (`np.ndarray`):
            Row numbers, `[B]`.
        count (`int`):
            Numbers per row.
        seed (`int`, *optional*, defaults to 0):
            Seed of the run.
        epoch (`int`, *optional*, defaults to 0):
            Numbers of a row differ between epochs.
    """
    numbers = _hashed(np.asarray(rows), *(_key(seed, epoch, column) for column in range(count)))
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def shuffled(count: int, seed: int = 0, stream: int = 0) -> np.ndarray:
    """
    A random permutation of `count` row numbers. Its first n are a random sample; a larger n adds rows to it.

    Args:
        count (`int`):
            Number of rows.
        seed (`int`, *optional*, defaults to 0):
            Seed of the split.
        stream (`int`, *optional*, defaults to 0):
            Number of the stream, for independent permutations with one seed.
    """
    return np.argsort(_hashed(np.arange(count), _key(seed, stream, -1))[:, 0], kind="stable")
