"""
The questions beside a prediction table: `obqa-test.npz` has them in `obqa-test.items.jsonl`, if they are there at all.

Tables hold ids and numbers only. Reports show the texts where this file exists, and ids where it does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.files import PathLike, write_text


@dataclass(frozen=True)
class Question:
    """The words of one item."""

    question: str
    options: tuple[str, ...]


def questions_path(table_path: PathLike) -> Path:
    """Where the questions of a table are kept: `x.npz` → `x.items.jsonl`."""
    return Path(table_path).with_suffix(".items.jsonl")


def save_questions(rows: Iterable[Mapping[str, Any]], table_path: PathLike) -> None:
    """
    Writes the questions of a table beside it, one JSON object per line.

    Args:
        rows (`Iterable[Mapping]`): Items with `id`, `question` and `options`, as [`load_task`] returns them.
        table_path (`str` or `os.PathLike`): The table they belong to.
    """
    lines = (
        json.dumps({"id": row["id"], "question": row["question"], "options": list(row["options"])}, ensure_ascii=False)
        for row in rows
    )
    write_text(questions_path(table_path), "".join(line + "\n" for line in lines))


def load_questions(table_path: PathLike) -> dict[str, Question]:
    """The questions of a table by id; empty if none were kept."""
    path = questions_path(table_path)
    if not path.is_file():
        return {}
    found = {}
    with open(path, encoding="utf-8") as handle:
        for number, line in enumerate(handle, start=1):
            try:
                row = json.loads(line)
                found[str(row["id"])] = Question(str(row["question"]), tuple(map(str, row["options"])))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{path}, line {number}: not an item with id, question, options ({error}).") from None
    return found
