"""Outputs of batches as arrays, from every process, in the order of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Part = tuple[list[list[int]], list[Any]]  # row numbers and outputs of each batch of a process


def as_numpy(value: Tensor) -> np.ndarray:
    """An output on the CPU, in float32 where it is in half precision."""
    return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).cpu().numpy()


def gather(part: Any, world: int) -> list[Any]:
    """What every process has."""
    if world == 1:
        return [part]
    parts: list[Any] = [None] * world
    torch.distributed.all_gather_object(parts, part)
    return parts


def in_order(parts: list[Part], count: int) -> Any:
    """Outputs of all batches joined, in the order of the rows; repeated batches count once."""
    rows = np.concatenate([row for own, _ in parts for row in own])
    outputs = [output for _, found in parts for output in found]
    order = np.unique(rows, return_index=True)[1]
    assert len(order) == count, "every row is in a batch"
    if isinstance(outputs[0], Mapping):
        return {key: np.concatenate([each[key] for each in outputs])[order] for key in outputs[0]}
    return np.concatenate(outputs)[order]
