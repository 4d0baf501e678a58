"""Streamed training rows: `data.streaming: true` in a recipe, or an `IterableDataset` given to the trainer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import UserError
from ..tokenising import tokenize_items
from .items import Columns, ItemParser, parse_item
from .tasks import MCQTask, get_task, iter_items, settle

if TYPE_CHECKING:
    from datasets import IterableDataset

_PEEK = 200  # rows read ahead to find the number of options
_COLUMNS = ("input_ids", "labels", "num_options", "length")


def stream_task(
    task: str | Mapping[str, Any] | MCQTask,
    split: str,
    root: str | Path | None = None,
    limit: int | None = None,
    buffer: int = 1000,
    seed: int = 0,
) -> IterableDataset:
    """
    The items of one split as an `IterableDataset`, shuffled within a buffer.

    Args:
        task (`str`, `Mapping` or `MCQTask`):
            See `get_task`.
        split (`str`):
            The split.
        root (`str` or `Path`, *optional*):
            Local folder with copies of Hub datasets.
        limit (`int`, *optional*):
            Read only the first rows.
        buffer (`int`, *optional*, defaults to 1000):
            Size of the shuffle buffer; 0 keeps the order.
        seed (`int`, *optional*, defaults to 0):
            Seed of the shuffle, combined with the epoch.
    """
    from datasets import IterableDataset

    task = settle(get_task(task), root, split)  # once, not in every worker
    stream = IterableDataset.from_generator(
        _rows, gen_kwargs={"task": task, "split": split, "root": root, "limit": limit}
    )
    return stream.shuffle(seed=seed, buffer_size=buffer) if buffer else stream


def _rows(task: MCQTask, split: str, root: str | Path | None, limit: int | None) -> Iterator[dict[str, Any]]:
    for _, item in itertools.islice(iter_items(task, split, root, labelled=True), limit):
        yield {"id": item.id, "question": item.question, "options": list(item.options), "label": item.label}


def most_options(stream: Iterable[Mapping[str, Any]]) -> int:
    """The largest number of options among the first 200 rows; set `num_choices` if later rows have more."""
    counts = [_count(row) for row in itertools.islice(iter(stream), _PEEK)]
    if not counts:
        raise UserError("The stream has no rows")
    return max(counts)


def _count(row: Mapping[str, Any]) -> int:
    if "num_options" in row:
        return int(row["num_options"])
    if {"options", "label"} <= set(row):
        return len(row["options"])
    return len(parse_item(row, Columns(), "stream, first rows", "0").options)


def prepare_stream(
    stream: IterableDataset, name: str, num_labels: Callable[[], int | None], **how: Any
) -> IterableDataset:
    """
    Parse, check and tokenise a stream lazily.

    Args:
        stream (`IterableDataset`):
            Raw rows, items, or tokenised rows (with `input_ids`), which are returned unchanged.
        name (`str`):
            Name of the stream in error messages.
        num_labels (`Callable[[], int | None]`):
            Returns K, the number of trained options, or `None` while it is unknown.
        how:
            See `tokenize_items`.
    """
    first = next(iter(stream), None)
    if first is None:
        raise UserError(f"{name} has no rows")
    if "input_ids" in first:
        return stream

    def encode(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if not {"id", "question", "options", "label"} <= set(rows):
            rows = _parsed(rows, name, how.get("labels"))
        trained = num_labels()
        for item, options in zip(rows["id"], rows["options"], strict=True):
            if trained is not None and len(options) > trained:
                raise UserError(
                    f"{name}, row {item!r}: {len(options)} options, but only {trained} letters are trained"
                )
        encoded = tokenize_items(rows, **how)
        return {key: encoded[key] for key in _COLUMNS}

    return stream.map(encode, batched=True, batch_size=256, remove_columns=list(first))


def _parsed(rows: dict[str, list[Any]], name: str, labels: tuple[str, ...] | None = None) -> dict[str, list[Any]]:
    count, parse = len(next(iter(rows.values()))), ItemParser(Columns(options=labels))
    found = [
        parse({key: values[i] for key, values in rows.items()}, f"{name}, a row", str(i), True) for i in range(count)
    ]
    return {key: [getattr(item, key) for item in found] for key in ("id", "question", "options", "label")}
