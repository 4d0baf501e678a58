"""Tokenising map-style datasets of any accepted column layout."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from ...core.errors import UserError
from ..prompt import tokenize_items
from .items import Columns, parse_item
from .tasks import ItemRows, _as_dataset

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

_ITEM = {"id", "question", "options", "label"}


def prepare_rows(
    dataset: Dataset | ItemRows | list[dict[str, Any]], num_labels: int | None, labelled: bool, name: str, **how: Any
) -> Dataset:
    """
    Parse and tokenise a dataset; the part of `TextBackend.prepare` for map-style datasets (streams: `prepare_stream`).

    Args:
        dataset (`Dataset`, `ItemRows` or `list[dict]`):
            Raw rows, parsed items, or tokenised rows (with `input_ids`), which only get their missing columns.
        num_labels (`int`, *optional*):
            K, the number of trained options, if it is known yet.
        labelled (`bool`):
            Raise a `UserError` for rows without a label.
        name (`str`):
            Name of the dataset in error messages.
        how:
            `tokenizer`, `prompt` and `max_length`, see `tokenize_items`.

    Returns:
        `Dataset` with the columns `input_ids`, `labels`, `num_options`, `length`, `id` and `row`.
    """
    from datasets import Dataset, disable_progress_bars, enable_progress_bars
    from datasets.utils.logging import is_progress_bar_enabled

    if isinstance(dataset, ItemRows):
        dataset = dataset.to_dataset()
    elif isinstance(dataset, list):
        dataset = Dataset.from_list(dataset)
    if "input_ids" in dataset.column_names:
        return _with_defaults(dataset, num_labels)
    if len(dataset) == 0:
        raise UserError(f"{name} has no rows")
    if not set(dataset.column_names) >= _ITEM:
        dataset = _parse_rows(dataset, labelled, name)
    # No progress bar for what takes less than a second.
    quiet = len(dataset) < 20_000 and is_progress_bar_enabled()
    if quiet:
        disable_progress_bars()
    try:
        prepared = dataset.map(
            tokenize_items, batched=True, fn_kwargs=how, remove_columns=dataset.column_names, desc="Tokenising"
        )
    finally:
        if quiet:
            enable_progress_bars()
    truncated = sum(prepared["truncated"])
    if truncated:
        logger.warning(
            f"{name}: {truncated} of {len(prepared)} prompts were longer than max_length={how['max_length']}; "
            "the start of their question was cut, options and ending kept"
        )
    prepared = prepared.remove_columns("truncated").add_column("id", dataset["id"])
    return _with_defaults(prepared, num_labels)


def _with_defaults(dataset: Dataset, num_labels: int | None) -> Dataset:
    missing: dict[str, list[Any]] = {}
    size = len(dataset)
    columns = set(dataset.column_names)
    if "labels" not in columns:
        missing["labels"] = [-1] * size
    if "num_options" not in columns:
        if num_labels is None:
            raise UserError("Prepared rows need a num_options column, or set num_choices in DAPPrConfig")
        missing["num_options"] = [num_labels] * size
    if "length" not in columns:
        missing["length"] = [len(ids) for ids in dataset["input_ids"]]
    if "id" not in columns:
        missing["id"] = [str(i) for i in range(size)]
    for key, values in missing.items():
        dataset = dataset.add_column(key, values)
    if "row" in columns:
        dataset = dataset.remove_columns("row")
    return dataset.add_column("row", list(range(size)))


def _parse_rows(dataset: Dataset, labelled: bool, name: str) -> Dataset:
    items = []
    for number, row in enumerate(dataset):
        item = parse_item(row, Columns(), f"{name}, row {number}", default_id=str(number))
        if labelled and item.label < 0:
            raise UserError(f"{name}, row {number}: the row has no answer, which training and evaluation need")
        items.append(dataclasses.asdict(item))
    return _as_dataset(items)
