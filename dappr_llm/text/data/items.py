"""Parsing raw rows of any column layout into `MCQItem`s; errors name the file and line, or the dataset and row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from ...core.errors import UserError, nearest
from ...core.names import check_id

LETTERS = ascii_uppercase
ANSWER_TYPES = ("auto", "letter", "index", "text")
UNKNOWN = -1  # label of an unlabelled row

# Column names that are tried in this order if a recipe names none.
_GUESSES = {
    "question": ("question_stem", "question", "prompt", "text", "sentence"),
    "choices": ("choices", "options"),
    "answer": ("answerKey", "answer", "label", "labels"),
    "id": ("id", "qid", "uid"),
}


@dataclass(frozen=True)
class MCQItem:
    """
    One multiple-choice question.

    Args:
        id (`str`):
            Unique within a split.
        question (`str`):
            The question, without its options.
        options (`tuple[str, ...]`):
            What can be answered; at least 2.
        label (`int`):
            Index of the right option, or `UNKNOWN`.
    """

    id: str
    question: str
    options: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class Columns:
    """
    The columns of a row; those that are not named are guessed from the usual names.

    Args:
        question, choices, answer, id (`str`, *optional*):
            Column names. `choices` may be a list of columns, one per option.
        options (`tuple[str, ...]`, *optional*):
            The same options for every row, for text classification with fixed labels; replaces `choices`.
        answer_type (`str`, *optional*, defaults to `"auto"`):
            What the answer column holds: `"letter"`, `"index"` (from 0), `"text"` (of the right option), or `"auto"`.
    """

    question: str | None = None
    choices: str | Sequence[str] | None = None
    answer: str | None = None
    id: str | None = None
    options: tuple[str, ...] | None = None
    answer_type: str = "auto"


def parse_item(row: Mapping[str, Any], columns: Columns, where: str, default_id: str) -> MCQItem:
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
    """
    question = _take(row, "question", columns.question, where)
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"{where}: the question is empty")
    options, labels = _options(row, columns, where)
    item_id = _take(row, "id", columns.id, where, optional=True)
    answer = _take(row, "answer", columns.answer, where, optional=True)
    return MCQItem(
        id=default_id if item_id in (None, "") else check_id(item_id, where),
        question=question,
        options=options,
        label=_label(answer, options, labels, columns.answer_type, where),
    )


def _take(row: Mapping[str, Any], part: str, name: str | None, where: str, optional: bool = False) -> Any:
    if name is not None:
        if name in row:
            return row[name]
        # A named answer column may be missing: prediction needs no labels, and training reports unlabelled rows.
        if optional:
            return None
        raise UserError(f"{where}: no column {name!r} for the {part}; {nearest(name, row)}")
    for guess in _GUESSES[part]:
        if guess in row:
            return row[guess]
    if optional:
        return None
    raise UserError(
        f"{where}: no {part} column found among {', '.join(map(repr, row)) or 'nothing'}; "
        f"name it, e.g. {part}: my_column"
    )


def _options(row: Mapping[str, Any], columns: Columns, where: str) -> tuple[tuple[str, ...], list[str] | None]:
    labels: list[str] | None = None
    if columns.options is not None:
        texts: Any = list(columns.options)
    elif columns.choices is not None and not isinstance(columns.choices, str):
        texts = [_take(row, "choices", name, where) for name in columns.choices]
        texts = [text for text in texts if text not in (None, "")]
    else:
        texts = _take(row, "choices", columns.choices, where)
        if isinstance(texts, str):
            texts = _json_list(texts, where)
        if isinstance(texts, Mapping):  # Hub layout: {"text": [...], "label": [...]}
            labels = [str(label) for label in texts["label"]] if "label" in texts else None
            texts = texts.get("text")
    if not isinstance(texts, Sequence) or isinstance(texts, str):
        raise UserError(f"{where}: the choices are {type(texts).__name__}, expected a list of texts")
    if labels is not None and len(labels) != len(texts):
        raise UserError(f"{where}: {len(texts)} choices but {len(labels)} choice labels")
    if len(texts) < 2:
        raise UserError(f"{where}: {len(texts)} choice(s), at least 2 are needed")
    if len(texts) > len(LETTERS):
        raise UserError(f"{where}: {len(texts)} choices, but there are only {len(LETTERS)} letters")
    options = tuple(str(text) for text in texts)
    for position, option in enumerate(options):
        if not option.strip():
            raise UserError(f"{where}: choice {LETTERS[position]} is empty")
    return options, labels


def _json_list(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deeply, or a number too long")
        raise UserError(
            f"{where}: the choices column holds text that is not a JSON list ({reason}); "
            'write ["a", "b"], or name one column per option: choices: [col_a, col_b]'
        ) from None


def _label(answer: Any, options: tuple[str, ...], labels: list[str] | None, kind: str, where: str) -> int:
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        return UNKNOWN
    if isinstance(answer, float) and answer.is_integer():  # pandas turns integer columns with gaps into floats
        answer = int(answer)
    found = _candidates(answer, options, labels, kind)
    if len(set(found)) == 1:
        return found[0]
    shown = ", ".join(repr(option) for option in options[:6]) + (", …" if len(options) > 6 else "")
    if not found:
        raise UserError(f"{where}: the answer {answer!r} is not among the choices ({shown})")
    raise UserError(
        f"{where}: the answer {answer!r} could mean several choices ({shown}); "
        "set answer_type to letter, index or text"
    )


def _candidates(answer: Any, options: tuple[str, ...], labels: list[str] | None, kind: str) -> list[int]:
    """Option indices that `answer` may refer to; several if it is ambiguous (`"A"` as a letter and as a text)."""
    text = str(answer).strip()
    if isinstance(answer, bool):
        text = text.lower()
    if kind in ("auto", "letter") and labels is not None and text in labels:
        return [labels.index(text)]
    is_index = (isinstance(answer, int) and not isinstance(answer, bool)) or (kind == "index" and text.isdigit())
    if kind in ("auto", "index") and is_index:
        return [int(text)] if 0 <= int(text) < len(options) else []
    found = []
    if kind in ("auto", "text"):
        found += [i for i, option in enumerate(options) if option.strip() == text]
        found = found or [i for i, option in enumerate(options) if option.strip().lower() == text.lower()]
    if kind in ("auto", "letter") and len(text) == 1 and text.upper() in LETTERS[: len(options)]:
        found.append(LETTERS.index(text.upper()))
    if not found and kind == "auto" and text.isdigit() and int(text) < len(options):
        found.append(int(text))
    return found
