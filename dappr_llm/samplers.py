"""Orders of rows that do not depend on what happened before: the same after a resume, the same on every process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler


class FixedOrder(Sampler):
    """A given order of rows; accelerate shards it over processes like any sampler."""

    def __init__(self, order: list[int]):
        self.order = order

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class LengthGrouped(LengthGroupedSampler):
    """
    Rows of similar length together, in an order that seed and epoch decide.

    transformers' own sampler draws from the global random state, which is another one in the middle of a resumed
    epoch: some rows would be seen twice and others never.

    Args:
        batch_size (`int`):
            Rows that should be of similar length.
        lengths (`list[int]`):
            Length of each row.
        seed (`int`):
            Decides the order.
        epoch (`Callable`):
            Returns the current epoch, fractions allowed.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: int, epoch: Callable[[], float | None]):
        super().__init__(batch_size, lengths=list(lengths))
        self.seed, self.epoch = seed, epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + math.floor((self.epoch() or 0.0) + 1e-9))
        return super().__iter__()
