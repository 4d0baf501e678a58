"""Which columns of a raw row are read: by name, by template, or guessed from the usual names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from ...core.errors import UserError, nearest

_TEXTS = ("text", "sentence", "utterance", "query", "message", "content", "body")
_LABELS = ("label", "labels", "class", "category", "intent", "target")
_QUESTIONS = ("question_stem", "question", "prompt")
_ANSWERS = ("answerKey", "answer")
# Names that are tried in this order if a recipe names none; first for rows with their own options, then for rows that
# share the labels of their task.
GUESSES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "question": (_QUESTIONS + _TEXTS, _TEXTS + _QUESTIONS),
    "choices": (("choices", "options"), ()),
    "answer": (_ANSWERS + _LABELS, _LABELS + _ANSWERS),
    "id": (("id", "qid", "uid"),) * 2,
}
# What the parts are called where labels are fixed.
_KEYS = {"question": ("question", "text"), "answer": ("answer", "label")}


@dataclass(frozen=True)
class Columns:
    """
    The columns of a row; those that are not named are guessed from the usual names.

    Args:
        question (`str` or `Sequence[str]`, *optional*):
            Column of the question or text; or several columns, whose texts are joined by line breaks; or a template
            over columns, such as `"{question}\\n{passage}"`.
        choices (`str` or `Sequence[str]`, *optional*):
            Column of the options, or one column per option.
        answer, id (`str`, *optional*):
            Column names.
        options (`tuple[str, ...]`, *optional*):
            The labels of the task: the same options for every row. Replaces `choices`.
        answer_type (`str`, *optional*, defaults to `"auto"`):
            What the answer column holds: `"letter"`, `"index"` (from 0), `"text"` (of the right option), or `"auto"`.
        foreign (`bool`, *optional*, defaults to `False`):
            An answer that is not among the options makes the row unlabelled instead of being an error: for
            out-of-distribution rows, whose labels are of another task.
    """

    question: str | Sequence[str] | None = None
    choices: str | Sequence[str] | None = None
    answer: str | None = None
    id: str | None = None
    options: tuple[str, ...] | None = None
    answer_type: str = "auto"
    foreign: bool = False


def guess(part: str, names: Iterable[str], fixed: bool = False) -> str | None:
    """The column that holds a part (`question`, `choices`, `answer`, `id`), by its name; `None` if none looks so."""
    names = list(names)
    usual = GUESSES[part][fixed]
    lower = {name.strip().lower(): name for name in reversed(names)}
    exact = [name for name in usual if name in names]
    return next(iter(exact or [lower[name.lower()] for name in usual if name.lower() in lower]), None)


def is_template(question: object) -> bool:
    """Whether a question column is a template over columns."""
    return isinstance(question, str) and "{" in question


def columns_of(question: str | Sequence[str]) -> list[str]:
    """The columns that a question is made of."""
    if not isinstance(question, str):
        return list(question)
    return [name for _, name in _pieces(question) if name is not None] if is_template(question) else [question]


def _pieces(template: str) -> list[tuple[str, str | None]]:
    """Literal texts, each with the column after it. Plain names only: values are put in as they are."""
    try:
        found = list(Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"The text template {template!r} is not valid: {error}") from None
    for _, name, form, conversion in found:
        if name is not None and (not name or form or conversion or any(mark in name for mark in ".[")):
            raise UserError(
                f"The text template {template!r} may hold column names in braces and nothing else, such as "
                "{question} (a brace itself is written {{ or }})"
            )
    if all(name is None for _, name, _, _ in found):
        raise UserError(f"The text template {template!r} names no column, such as {{question}}")
    return [(literal, name) for literal, name, _, _ in found]


class QuestionReader:
    """
    Reads the question or text of a row.

    Args:
        question (`str` or `Sequence[str]`, *optional*):
            See `Columns`.
        fixed (`bool`, *optional*, defaults to `False`):
            Rows share the labels of their task, so that the text is looked for under other names first.
    """

    def __init__(self, question: str | Sequence[str] | None, fixed: bool = False):
        self.fixed = fixed
        self.pieces: list[tuple[str, str | None]] | None = None
        self.name = question if isinstance(question, str) else None
        if is_template(question):
            self.pieces = _pieces(str(question))
        elif question is not None and not isinstance(question, str):
            self.pieces = [("\n" * bool(place), name) for place, name in enumerate(question)]

    def __call__(self, row: Mapping[str, Any], where: str) -> Any:
        """The text; columns that are missing are an error, empty ones are empty."""
        if self.pieces is None:
            return take(row, "question", self.name, where, fixed=self.fixed)
        text = ""
        for literal, name in self.pieces:
            value = None if name is None else take(row, "question", name, where, fixed=self.fixed)
            text += literal + ("" if value is None else str(value))
        return text


def take(
    row: Mapping[str, Any], part: str, name: str | None, where: str, optional: bool = False, fixed: bool = False
) -> Any:
    """The value of a named or guessed column; `None` for one that is missing and may be."""
    name = guess(part, row, fixed) if name is None else name
    if name is not None and name in row:
        return row[name]
    if optional:
        return None
    raise missing_column(part, name, row, where, fixed)


def missing_column(part: str, name: str | None, names: Collection[str], where: str, fixed: bool = False) -> UserError:
    """What to say about a column that is not there."""
    key = _KEYS.get(part, (part, part))[fixed]
    if name is not None:
        return UserError(f"{where}: no column {name!r} for the {key}; {nearest(name, names)}")
    found = ", ".join(map(repr, names)) or "nothing"
    also = " (or labels: [a, b], if every row has the same)" if part == "choices" else ""
    return UserError(f"{where}: no {key} column found among {found}; name it, e.g. {key}: my_column{also}")
