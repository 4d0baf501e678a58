"""
Labels of text classification: the one form of a label cell, the labels of a column, and how a column is read.

Labels are names. Whole numbers are read as positions only where they cannot be names, and it is said.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any

from ...core.errors import UserError

logger = logging.getLogger(__name__)

_WHOLE = re.compile(r"([+-]?\d+)\.0+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_INTEGER = re.compile(r"[+-]?\d+")
_INDEX = re.compile(r"\d{1,7}")
_TRUTH = {"true": "yes", "false": "no"}
_FREE_TEXT = 0.8  # labels per row, from which on they are no labels
_FEW = 10  # rows below which nothing is concluded from that
_ONE_EACH = "every row needs one label: multi-label targets are not supported (train one yes/no run per label instead)"


def label_text(value: Any, where: str) -> str | None:
    """
    The text of a label cell, the same from CSV, JSON and Parquet (`4`, `4.0` and `"4"` are `"4"`); `None` if empty.

    Args:
        value (`Any`):
            The cell.
        where (`str`):
            File and line, for the error about lists.
    """
    value = value.tolist() if hasattr(value, "tolist") else value  # of NumPy
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list | tuple | set | dict):
        raise UserError(f"{where}: the label is a list ({str(value)[:60]}); {_ONE_EACH}")
    return plain_text(str(value)) or None


def plain_text(text: str) -> str:
    """A label's text without blanks around it, and without zeros that spreadsheets and pandas add to whole numbers."""
    whole = _WHOLE.fullmatch(text.strip())
    return whole[1] if whole else text.strip()


@dataclass
class LabelColumn:
    """What a label column holds: how often each text occurs, and where first."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, text: str, where: str) -> None:
        """Count one cell."""
        self.counts[text] += 1
        self.first.setdefault(text, where)


def find_labels(column: LabelColumn, name: str) -> tuple[str, ...]:
    """
    The labels of a column, sorted, numbers by value; what is no column of labels is refused.

    Args:
        column (`LabelColumn`):
            The training rows' labels.
        name (`str`):
            Name of the task, in errors.
    """
    counts, rows = column.counts, sum(column.counts.values())
    several = _several(counts, counts)
    if several:
        raise UserError(f"{column.first[several]}: the label is {several!r}, made of several labels; {_ONE_EACH}")
    listed = next((text for text in counts if text[0] == "[" and text[-1] == "]"), None)
    if listed:
        raise UserError(f"{column.first[listed]}: the label is a list ({listed[:60]}); {_ONE_EACH}")
    numbers = all(_NUMBER.fullmatch(text) for text in counts)
    broken = next((text for text in counts if not _INTEGER.fullmatch(text)), None) if numbers else None
    if broken:
        raise UserError(
            f"{column.first[broken]}: the label is the number {broken}: regression and ordinal targets are not "
            "supported; sort the numbers into named classes first, or list them as names: labels: [...]"
        )
    if rows >= _FEW and len(counts) > _FREE_TEXT * rows:
        raise UserError(
            f"{name}: {len(counts):,} different labels in {rows:,} rows: free text is no label; name another column "
            "(label: my_column), or the column of options if rows have their own (choices: my_column)"
        )
    if len(counts) < 2:
        raise UserError(f"{name}: {_only(counts, rows)}; at least 2 different labels are needed to learn from")
    if numbers:
        return tuple(sorted(counts, key=lambda text: (float(text), text)))
    return tuple(sorted(counts, key=lambda text: (text.casefold(), text)))


def _only(counts: Mapping[str, int], rows: int) -> str:
    return f"all {rows:,} rows have the label {next(iter(counts))!r}" if counts else "no row has a label"


def _several(texts: Iterable[str], names: Iterable[str]) -> str | None:
    """The first text that is made of several names (`a;b`)."""
    known = set(names)
    for text in texts:
        for mark in ";|,":
            parts = [part.strip() for part in text.split(mark)]
            if text not in known - {text} and len(parts) > 1 and set(parts) <= known - {text}:
                return text
    return None


def find_reading(column: LabelColumn, labels: Sequence[str], name: str) -> str:
    """
    How a column is read, given the labels: as names (`"text"`), or as positions or letters where no cell is a name.

    Args:
        column (`LabelColumn`):
            What the column holds.
        labels (`Sequence[str]`):
            Names of the labels.
        name (`str`):
            Name of the task, in messages.
    """
    index = LabelIndex(labels)
    texts = list(column.counts)
    named = [text for text in texts if index.find(text) is not None]
    if texts and not named:
        if all(_INDEX.fullmatch(text) and int(text) < len(labels) for text in texts):
            shown = ", ".join(f"{place} = {label!r}" for place, label in enumerate(labels[:3]))
            logger.info(f"{name}: the labels are read as positions, from 0: {shown}{', …' * (len(labels) > 3)}")
            return "index"
        if all(len(text) == 1 and text.upper() in ascii_uppercase[: len(labels)] for text in texts):
            logger.info(f"{name}: the labels are read as letters: A = {labels[0]!r}, B = {labels[1]!r}, …")
            return "letter"
    say_names(texts, name)
    return "text"


def say_names(texts: Iterable[str], name: str) -> None:
    """Say that numbers were read as names; nothing else could be meant by other texts."""
    texts = list(texts)
    if texts and all(_NUMBER.fullmatch(text) for text in texts):
        some = ", ".join(sorted(texts, key=float)[:5]) + ", …" * (len(texts) > 5)
        logger.info(f"{name}: the labels are numbers ({some}) and read as names, not positions")


class LabelIndex:
    """
    Names of labels → their positions; without differences of case where that is enough to tell them apart.

    Args:
        labels (`Sequence[str]`):
            The names.
    """

    def __init__(self, labels: Sequence[str]):
        self.labels = tuple(labels)
        self.exact = {label.strip(): place for place, label in enumerate(labels)}
        folded = Counter(label.strip().casefold() for label in labels)
        self.folded = {
            label.strip().casefold(): place
            for place, label in enumerate(labels)
            if folded[label.strip().casefold()] == 1
        }
        if len(self.exact) < len(self.labels):
            twice = next(label for label, count in Counter(label.strip() for label in labels).items() if count > 1)
            raise UserError(f"The label {twice!r} is listed twice")

    def find(self, text: str) -> int | None:
        """The position of a name; `true` and `false` are also `yes` and `no`."""
        for form in (text, _TRUTH.get(text, text)):
            if form in self.exact:
                return self.exact[form]
            if form.casefold() in self.folded:
                return self.folded[form.casefold()]
        return None

    def several(self, text: str) -> bool:
        """Whether a text is made of several names."""
        return _several([text], self.exact) is not None
