"""Datasets for prediction: several row sets joined without duplicate rows; batches by number of tokens. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..core.backend import PreparedRows
    from .modality import Task


class Rows(Protocol):
    """Rows of a task: a `datasets.Dataset`, `ItemRows`, `ImageRows`, or a list of mappings."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class RowSet:
    """
    The rows of one prediction table.

    Args:
        rows (`Dataset`, `ItemRows`, `ImageRows` or `list[dict]`):
            Rows in any layout that training accepts.
        task, split (`str`, *optional*):
            Names of task and split, for the table's meta data.
        meta (`dict`, *optional*):
            Further meta data of the table.
    """

    rows: Rows
    task: str = ""
    split: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_task(cls, rows: Rows, task: Task, split: str, checkpoint: str) -> RowSet:
        """
        Rows of a declared task.

        Args:
            rows:
                From `modality.load_rows`.
            task (`MCQTask` or `ImageTask`):
                The task; name and number of options go into the table's meta data.
            split (`str`):
                Name of the split.
            checkpoint (`str`):
                Name of the run, for the meta data.
        """
        choices = getattr(task, "num_choices", None)  # image tasks have none: all items have the model's classes
        return cls(rows, task.name, split, {"checkpoint": checkpoint, "task_num_choices": choices})


class JoinedRows:
    """
    The distinct rows of several prepared datasets as one map-style dataset, sorted for prediction.

    `inverse[i]` is the index, in this dataset, of the i-th row of all sets one after the other.

    Args:
        sets (`Sequence`):
            Prepared datasets.
        keys (`Sequence[Sequence[bytes]]`):
            A key per row of each set, equal for rows with equal inputs; see `Backend.row_keys`.
        lengths (`Sequence[Sequence[int]]`):
            Number of tokens per row of each set.
        join (`bool`, *optional*, defaults to `True`):
            Keep one of several rows with equal keys.
        longest_first (`bool`, *optional*, defaults to `False`):
            Sort by descending length, which saves padding, instead of by key, which places rows with a common prefix
            next to each other.
    """

    def __init__(
        self,
        sets: Sequence[PreparedRows],
        keys: Sequence[Sequence[bytes]],
        lengths: Sequence[Sequence[int]],
        join: bool = True,
        longest_first: bool = False,
    ):
        self.sets = sets
        places = [(number, row) for number, rows in enumerate(sets) for row in range(len(rows))]
        flat = [key for part in keys for key in part]
        sizes = [size for part in lengths for size in part]
        names: Sequence[Hashable] = flat if join else range(len(places))
        first: dict[Hashable, int] = {}
        for index, name in enumerate(names):
            first.setdefault(name, index)
        order = sorted(first.values(), key=lambda index: (-sizes[index] * longest_first, flat[index]))
        self.places = [places[index] for index in order]
        self.lengths = [sizes[index] for index in order]
        where = {index: row for row, index in enumerate(order)}
        self.inverse = [where[first[name]] for name in names]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        number, row = self.places[index]
        return {**self.sets[number][row], "row": index}


def token_batches(lengths: Sequence[int], tokens: int, rows: int | None = None) -> list[list[int]]:
    """
    Indices of consecutive rows, in batches of at most `tokens` tokens; a longer row gets a batch of its own.

    Args:
        lengths (`Sequence[int]`):
            Number of tokens of each row.
        tokens (`int`):
            Maximal number of tokens per batch, without padding.
        rows (`int`, *optional*):
            Maximal number of rows per batch.
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
