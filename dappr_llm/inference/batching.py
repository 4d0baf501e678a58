"""Rows before they meet a model: which are predicted together, equal ones once, batches by tokens. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RowSet:
    """
    Rows that become one prediction table.

    Args:
        rows (`Dataset` or `list[dict]`):
            Rows of any layout that training accepts.
        task, split (`str`, *optional*):
            Written into the table.
        meta (`dict`, *optional*):
            More entries for the table's meta data.
    """

    rows: Any
    task: str = ""
    split: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_task(cls, rows: Any, task: Any, split: str, checkpoint: str) -> RowSet:
        """Rows of a declared task, with what their table says of it; `checkpoint` is the name of the run."""
        choices = getattr(task, "num_choices", None)  # tasks of images have none of their own
        return cls(rows, task.name, split, {"checkpoint": checkpoint, "task_num_choices": choices})


class JoinedRows:
    """
    The different rows of several prepared sets, in the order in which they are computed.

    Args:
        sets (`Sequence`):
            Prepared datasets.
        keys (`Sequence[Sequence[bytes]]`):
            What each row says; decides the order.
        lengths (`Sequence[Sequence[int]]`):
            Tokens of each row.
        join (`bool`, *optional*, defaults to `True`):
            Compute rows with equal keys once.
        longest_first (`bool`, *optional*, defaults to `False`):
            Sort by length, which saves padding, instead of by key, which puts rows with the same beginning together.
    """

    def __init__(
        self,
        sets: Sequence[Any],
        keys: Sequence[Sequence[bytes]],
        lengths: Sequence[Sequence[int]],
        join: bool = True,
        longest_first: bool = False,
    ):
        self.sets = sets
        places = [(number, row) for number, rows in enumerate(sets) for row in range(len(rows))]
        flat = [key for part in keys for key in part]
        sizes = [size for part in lengths for size in part]
        names: list[Any] = flat if join else list(range(len(places)))
        first: dict[Any, int] = {}
        for index, name in enumerate(names):
            first.setdefault(name, index)
        order = sorted(first.values(), key=lambda index: (-sizes[index] * longest_first, flat[index]))
        self.places = [places[index] for index in order]
        self.lengths = [sizes[index] for index in order]
        where = {index: row for row, index in enumerate(order)}
        # For every row of every set, one after the other: which of ours it is.
        self.inverse = [where[first[name]] for name in names]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        number, row = self.places[index]
        return {**self.sets[number][row], "row": index}


def token_batches(lengths: Sequence[int], tokens: int, rows: int | None = None) -> list[list[int]]:
    """
    Consecutive rows in batches of at most so many tokens (and rows); a longer row gets a batch of its own.

    Args:
        lengths (`Sequence[int]`):
            Tokens of each row, in the order of the batches.
        tokens (`int`):
            Tokens of a batch.
        rows (`int`, *optional*):
            Rows of a batch, at the most.
    """
    found: list[list[int]] = []
    used = 0
    for index, length in enumerate(lengths):
        if not found or used + length > tokens or (rows is not None and len(found[-1]) >= rows):
            found.append([])
            used = 0
        found[-1].append(index)
        used += length
    return found
