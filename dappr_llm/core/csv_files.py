"""CSV that a spreadsheet shows and does not run: every CSV file of ours is written, and can be read, through this."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

# Spreadsheets take a cell for a formula that begins with one of these, also in their full-width forms, or behind a
# control character. Apostrophes before it count, so that reading back knows which one is ours.
_FORMULA = re.compile(r"'*[=+\-@\x00-\x1f\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")


class _Stream(Protocol):
    def write(self, text: str, /) -> object: ...


def escape_cell(value: Any) -> Any:
    """A text that a spreadsheet would run, with an apostrophe before it; numbers, also as text, stay as they are."""
    if not isinstance(value, str) or not _FORMULA.match(value) or _NUMBER.fullmatch(value):
        return value
    return "'" + value


def unescape_cell(text: str) -> str:
    """The text that [`escape_cell`] was given."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def write_csv(stream: _Stream, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """
    Write a CSV file with a header.

    Args:
        stream (`TextIO`):
            An open text file (`newline=""`).
        header (`Iterable[str]`):
            Names of the columns.
        rows (`Iterable[Iterable]`):
            Cells; texts are escaped, see [`escape_cell`].
    """
    writer = csv.writer(stream)  # lines end in \r\n, so that a cell with either is quoted by every Python
    writer.writerow([escape_cell(name) for name in header])
    writer.writerows([escape_cell(value) for value in row] for row in rows)


def read_csv(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """Rows of a CSV file that [`write_csv`] wrote, with the texts as they were."""
    for row in csv.DictReader(lines):
        yield {unescape_cell(name): unescape_cell(text) for name, text in row.items()}
