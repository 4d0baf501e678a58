"""Parsing raw rows of any column layout into `MCQItem`s; errors name the file and line, or the dataset and row."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from ...core.errors import UserError, nearest
from ...core.names import check_id
from .columns import Columns, QuestionReader, take
from .labels import LabelIndex, label_text, plain_text

__all__ = ["ANSWER_TYPES", "LETTERS", "UNKNOWN", "Columns", "ItemParser", "MCQItem", "RowProblem", "parse_item"]

LETTERS = ascii_uppercase
ANSWER_TYPES = ("auto", "letter", "index", "text")
_INDEX = re.compile(r"\d{1,7}")
UNKNOWN = -1  # label of an unlabelled row


@dataclass(frozen=True)
class MCQItem:
    """
    One multiple-choice question, or one text to classify.

    Args:
        id (`str`):
            Unique within a split.
        question (`str`):
            The question, without its options; or the text.
        options (`tuple[str, ...]`):
            What can be answered; at least 2. Items of a task with fixed labels share one tuple of label names.
        label (`int`):
            Index of the right option, or `UNKNOWN`.
    """

    id: str
    question: str
    options: tuple[str, ...]
    label: int


class RowProblem(UserError):
    """
    Something wrong with one row, of a kind that data checks count instead of stopping at the first.

    Args:
        kind (`str`):
            `"empty"` (no text), `"unlabelled"` or `"unknown label"`.
        where, what (`str`):
            The row, and the sentence about it.
        value (`str`, *optional*):
            The label that is not known.
    """

    def __init__(self, kind: str, where: str, what: str, value: str = ""):
        super().__init__(f"{where}: {what}")
        self.kind, self.where, self.value = kind, where, value


def parse_item(
    row: Mapping[str, Any], columns: Columns, where: str, default_id: str, labelled: bool = False
) -> MCQItem:
    """
    Parse one raw row.

    Args:
        row (`Mapping`):
            Column name → value.
        columns (`Columns`):
            The names of its columns.
        where (`str`):
            File and line, or dataset and row; the start of error messages.
        default_id (`str`):
            Id to use if the row has none.
        labelled (`bool`, *optional*, defaults to `False`):
            Refuse a row without an answer.
    """
    return ItemParser(columns)(row, where, default_id, labelled)


class ItemParser:
    """
    Parses the rows of a task.

    Args:
        columns (`Columns`):
            The names of their columns, and the labels if they are fixed.
    """

    def __init__(self, columns: Columns):
        self.columns = columns
        self.fixed = columns.options is not None
        self.question = QuestionReader(columns.question, self.fixed)
        self.labels = LabelIndex(_checked(columns.options, "labels")) if columns.options is not None else None

    def __call__(self, row: Mapping[str, Any], where: str, default_id: str, labelled: bool = False) -> MCQItem:
        """One row as an item; arguments as for `parse_item`."""
        columns = self.columns
        question = self.question(row, where)
        if not isinstance(question, str) or not question.strip():
            raise RowProblem("empty", where, f"the {'text' if self.fixed else 'question'} is empty")
        # A named answer column may be missing where no labels are needed.
        answer = take(row, "answer", columns.answer, where, not (labelled and columns.answer), self.fixed)
        if self.labels is not None:
            options, label = self.labels.labels, self._fixed_label(answer, where)
        else:
            options, names = own_options(row, columns, where)
            label = _own_label(answer, options, names, columns, where)
        if labelled and label == UNKNOWN:
            raise RowProblem("unlabelled", where, "the row has no answer, which training and evaluation need")
        item_id = take(row, "id", columns.id, where, optional=True)
        name = default_id if item_id in (None, "") else check_id(item_id, where)
        return MCQItem(id=name, question=question, options=options, label=label)

    def _fixed_label(self, answer: Any, where: str) -> int:
        assert self.labels is not None
        text = label_text(answer, where)
        if text is None:
            return UNKNOWN
        found = _position(text, self.labels, self.columns.answer_type)
        if found is None and self.columns.foreign:
            return UNKNOWN
        if found is None:
            labels = self.labels.labels
            if self.labels.several(text):
                raise UserError(f"{where}: the label {text!r} names several labels, and every row needs one")
            raise RowProblem(
                "unknown label",
                where,
                f"the label {text!r} is not among the {len(labels)} labels; {nearest(text, labels)}",
                text,
            )
        return found


def _position(text: str, labels: LabelIndex, kind: str) -> int | None:
    """The label that a cell means; names come first, so that `1` among `1…5` is the label 1 and never the second."""
    count = len(labels.labels)
    named = labels.find(text) if kind in ("auto", "text") else None
    if named is None and kind in ("auto", "letter") and len(text) == 1 and text.upper() in LETTERS[:count]:
        return LETTERS.index(text.upper())
    if named is None and kind in ("auto", "index") and _INDEX.fullmatch(text) and int(text) < count:
        return int(text)
    return named


def _checked(texts: Sequence[Any], where: str) -> tuple[str, ...]:
    if len(texts) < 2:
        raise UserError(f"{where}: {len(texts)} choice(s), at least 2 are needed")
    options = tuple(str(text) for text in texts)
    for position, option in enumerate(options):
        if not option.strip():
            shown = LETTERS[position] if position < len(LETTERS) else position + 1
            raise UserError(f"{where}: choice {shown} is empty")
    return options


# --- rows with their own options ------------------------------------------------------------------------------------


def own_options(row: Mapping[str, Any], columns: Columns, where: str) -> tuple[tuple[str, ...], list[str] | None]:
    """The options of a row, and the names that they have in the dataset (`A`, `1`), if any."""
    labels: list[str] | None = None
    if columns.choices is not None and not isinstance(columns.choices, str):
        texts: Any = [take(row, "choices", name, where) for name in columns.choices]
        texts = [text for text in texts if text not in (None, "")]
    else:
        texts = take(row, "choices", columns.choices, where)
        if isinstance(texts, str):
            texts = _json_list(texts, where)
        if isinstance(texts, Mapping):  # Hub layout: {"text": [...], "label": [...]}
            labels = [str(label) for label in texts["label"]] if "label" in texts else None
            texts = texts.get("text")
    if not isinstance(texts, Sequence) or isinstance(texts, str):
        raise UserError(f"{where}: the choices are {type(texts).__name__}, expected a list of texts")
    if labels is not None and len(labels) != len(texts):
        raise UserError(f"{where}: {len(texts)} choices but {len(labels)} choice labels")
    if len(texts) > len(LETTERS):
        raise UserError(f"{where}: {len(texts)} choices, but there are only {len(LETTERS)} letters")
    return _checked(texts, where), labels


def _json_list(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deeply, or a number too long")
        raise UserError(
            f"{where}: the choices column holds text that is not a JSON list ({reason}); "
            'write ["a", "b"], or name one column per option: choices: [col_a, col_b]'
        ) from None


def _own_label(answer: Any, options: tuple[str, ...], names: list[str] | None, columns: Columns, where: str) -> int:
    text = label_text(answer, where)
    if text is None:
        return UNKNOWN
    found = own_candidates(text, options, names, columns.answer_type)
    if len(set(found)) == 1:
        return found[0]
    if not found and columns.foreign:
        return UNKNOWN
    shown = ", ".join(repr(option) for option in options[:6]) + (", …" if len(options) > 6 else "")
    if not found:
        raise UserError(f"{where}: the answer {answer!r} is not among the choices ({shown})")
    raise UserError(
        f"{where}: the answer {answer!r} could mean several choices ({shown}); "
        "set answer_type to letter, index or text"
    )


def own_candidates(text: str, options: tuple[str, ...], names: list[str] | None, kind: str) -> list[int]:
    """Option indices that an answer may refer to; several if it is ambiguous (`"A"` as a letter and as a text)."""
    if kind in ("auto", "letter") and names is not None and text in names:
        return [names.index(text)]
    found = []
    if kind in ("auto", "text"):
        forms = [plain_text(option) for option in options]
        found += [i for i, form in enumerate(forms) if form == text]
        found = found or [i for i, form in enumerate(forms) if form.lower() == text.lower()]
    if kind in ("auto", "letter") and len(text) == 1 and text.upper() in LETTERS[: len(options)]:
        found.append(LETTERS.index(text.upper()))
    # A number is a position only where it is none of the options.
    if not found and kind in ("auto", "index") and _INDEX.fullmatch(text) and int(text) < len(options):
        found.append(int(text))
    return found
