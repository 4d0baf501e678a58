"""Samplers whose order depends on seed and epoch only: the same after a resume and on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from .config import DAPPrConfig

_POOL = 50  # batches whose rows are sorted together, at most; transformers' own value


class FixedOrder(Sampler):
    """A sampler with a fixed order; accelerate shards it over ranks like any other."""

    def __init__(self, order: list[int]):
        self.order = order

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class LengthGrouped(Sampler):
    """
    Batches of rows with similar lengths, shuffled by seed and epoch, with the expected gradient of a random order.

    transformers' own sampler begins each stretch of batches with its longest rows and leaves its shortest ones for the
    incomplete last batch, where a row counts more: the gradient to expect of a step then depends on where the step
    stands. Here batches are shuffled after they were made, and the rows of an incomplete one are drawn before, so
    every row is as likely to be in every step as in a random order. (It also draws from the global random state,
    which is another one in the middle of a resumed epoch: some rows would be seen twice and others never.)

    Args:
        batch_size (`int`):
            Rows that should be of similar length: those of one optimizer step, in all processes.
        lengths (`Sequence[int]`):
            Length of each row.
        seed (`int`):
            Decides the order.
        epoch (`Callable`):
            Returns the current epoch, fractions allowed.
    """

    def __init__(self, batch_size: int, lengths: Sequence[int], seed: int, epoch: Callable[[], float | None]):
        self.batch_size, self.lengths = batch_size, torch.as_tensor(lengths)
        self.seed, self.epoch = seed, epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + math.floor((self.epoch() or 0.0) + 1e-9))
        order = torch.randperm(len(self), generator=generator)
        whole, rest = order.split([len(self) - len(self) % self.batch_size, len(self) % self.batch_size])
        pool = self.batch_size * max(1, min(_POOL, len(self) // (4 * self.batch_size)))
        batches = [batch for part in whole.split(pool) for batch in self._sorted(part).split(self.batch_size)]
        for number in torch.randperm(len(batches), generator=generator).tolist():
            yield from batches[number].tolist()
        yield from rest.tolist()

    def _sorted(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self.lengths[rows].argsort(stable=True)]

    def __len__(self) -> int:
        return len(self.lengths)


def train_sampler(dataset: Any, args: DAPPrConfig, epoch: Callable[[], float | None]) -> LengthGrouped | None:
    """The sampler of `train_sampling_strategy: group_by_length`; `None` for any other strategy."""
    if args.train_sampling_strategy != "group_by_length" or "length" not in getattr(dataset, "column_names", ()):
        return None
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    return LengthGrouped(batch, dataset["length"], args.data_seed or args.seed, epoch)


def eval_sampler(dataset: Any) -> FixedOrder | None:
    """
    Longest rows first: little padding, and a batch that does not fit fails at once. Rows are put back in order later.

    `None` for rows without a length.
    """
    if "length" not in getattr(dataset, "column_names", ()):
        return None
    return FixedOrder(np.argsort(-np.asarray(dataset["length"]), kind="stable").tolist())
