"""
The texts of a table's items, in a JSONL file beside the table: `obqa-test.npz` → `obqa-test.items.jsonl`.

Prediction tables hold ids and numbers only. Reports show questions and options where this file exists, and ids where
it does not, as for images.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.files import PathLike, parse_json, write_text
from ..core.schemas import check
from ..core.schemas.answers import ItemRecord


@dataclass(frozen=True)
class ItemText:
    """Question and options of one item."""

    question: str
    options: tuple[str, ...]


def item_texts_path(table_path: PathLike) -> Path:
    """The file with the item texts of a table: `x.npz` → `x.items.jsonl`."""
    return Path(table_path).with_suffix(".items.jsonl")


def save_item_texts(rows: Iterable[Mapping[str, Any]], table_path: PathLike) -> None:
    """
    Writes the item texts of a table beside it, one JSON object per line.

    Options that rows do not repeat, since they share many labels, are not written: the table names its classes.

    Args:
        rows (`Iterable[Mapping]`): Items with `id`, `question` and mostly `options`, as [`load_task`] returns them.
        table_path (`str` or `os.PathLike`): The table they belong to.
    """
    lines = (
        json.dumps(
            {"id": row["id"], "question": row["question"], "options": list(row.get("options", ()))},
            ensure_ascii=False,
            allow_nan=False,
        )
        for row in rows
    )
    write_text(item_texts_path(table_path), "".join(line + "\n" for line in lines))


def options_of(rows: Any) -> Sequence[Sequence[str]] | None:
    """The options of each row; those of labels that all rows share may be the names of its `label` alone."""
    if "options" in (getattr(rows, "column_names", None) or ()):
        return rows["options"]
    names = getattr((getattr(rows, "features", None) or {}).get("label"), "names", None)
    return None if names is None else [names] * len(rows)


def load_item_texts(table_path: PathLike) -> dict[str, ItemText]:
    """The item texts of a table by id; empty if there is no such file."""
    path = item_texts_path(table_path)
    if not path.is_file():
        return {}
    found = {}
    with open(path, "rb") as handle:
        for number, line in enumerate(handle, start=1):
            where = f"{path}, line {number}"
            try:
                row = parse_json(line)
            except ValueError as error:  # also of UTF-8
                raise UserError(f"{where}: not an item with id, question, options ({error}).") from None
            check(ItemRecord, row, where)
            found[row["id"]] = ItemText(row["question"], tuple(row["options"]))
    return found
