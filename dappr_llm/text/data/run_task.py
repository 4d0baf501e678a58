"""The task that a run was trained on, and what new rows inherit from it: columns, labels, encoding."""

from __future__ import annotations

import codecs
import dataclasses
import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from ...core.checkpoint import sha256
from ...core.errors import UserError
from .columns import Columns, columns_of, missing_column
from .registry import MCQTask, get_task, read_columns
from .settle import recipe_task
from .sources import is_data_file, read_file

if TYPE_CHECKING:
    from ...core.schemas.recipe import Recipe

_LOOKED_AT = 100  # rows in one of which a named column must be


def task_of_run(recipe: Recipe) -> MCQTask:
    """The task of a recipe; of one in a run's folder, which says all of it, the task that was trained on."""
    return recipe_task(recipe)


def remembered(recipe: Recipe | None, labels: tuple[str, ...] | None) -> MCQTask | None:
    """
    What a run remembers of its data, without reading them: they may be on another machine.

    Args:
        recipe (`Recipe`, *optional*):
            The recipe in the run's folder; one of an older version has no splits that were dealt out.
        labels (`tuple[str, ...]`, *optional*):
            The fixed labels that the checkpoint itself names.
    """
    if recipe is None:
        return MCQTask("run", columns=Columns(options=labels), fixed=True) if labels else None
    task = get_task(recipe.data.train)
    if labels and task.labels is None:
        task = dataclasses.replace(task, columns=dataclasses.replace(task.columns, options=labels), fixed=True)
    return task


def find_rows(
    own: MCQTask | None,
    spec: str | Mapping[str, Any] | MCQTask | None,
    columns: Mapping[str, Any] | None = None,
    ood: bool = False,
) -> MCQTask:
    """
    The task that a verb is asked for, beside a run's own.

    Args:
        own (`MCQTask`, *optional*):
            The run's task, from [`remembered`].
        spec (`str`, `Mapping` or `MCQTask`, *optional*):
            See `get_task`; `None`, the run's own name or its own file are the run's task, with its splits.
        columns (`Mapping`, *optional*):
            Columns, labels and encoding that the user names, under the keys of a task description.
        ood (`bool`, *optional*, defaults to `False`):
            Rows of another distribution, see [`inherit`].
    """
    if own is not None and not ood and is_own(own, spec):
        return _with_columns(own, columns or {})
    if spec is None:
        raise UserError("The run does not say what it was trained on; name the rows")
    task = _with_columns(get_task(spec), columns or {})
    if task.own_files:
        if own is not None:
            task = dataclasses.replace(task, encoding=task.encoding or _encoding(own, task))
        _check_named(task)
    return task if own is None else inherit(own, task, ood)


def is_own(own: MCQTask, spec: Any) -> bool:
    """Whether a task is the run's own: nothing is named, or its name or file."""
    return spec is None or spec == own.name or isinstance(spec, str) and _same_file(own, spec)


def _with_columns(task: MCQTask, given: Mapping[str, Any]) -> MCQTask:
    if not given:
        return task
    found = read_columns({key: value for key, value in given.items() if key != "encoding"})
    fixed = False if "choices" in found else True if "options" in found else task.fixed
    if "choices" in found or "options" in found:
        found = {"choices": None, "options": None, **found}
    if "answer" in found or "options" in found:
        found = {"answer_type": "auto", **found}
    columns = dataclasses.replace(task.columns, **found)
    count = len(columns.options) if columns.options else None
    encoding = given.get("encoding") or task.encoding
    return dataclasses.replace(task, columns=columns, fixed=fixed, encoding=encoding, num_choices=count, settled=False)


def _check_named(task: MCQTask) -> None:
    """Columns that were named must be there, also that of the answers, without which a file can be read."""
    path = next(iter(task.splits.values()))
    rows = [row for _, row in islice(read_file(path, task.encoding), _LOOKED_AT)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    for part in ("question", "choices", "answer", "id"):
        named = getattr(task.columns, part)
        for column in columns_of(named) if rows and named is not None else ():
            if column not in names:
                raise missing_column(part, column, names, path, fixed=bool(task.fixed))


def inherit(own: MCQTask, spec: str | Mapping[str, Any] | MCQTask, ood: bool = False) -> MCQTask:
    """
    The task of a new file of a run: columns and labels are the run's where the file or its description says nothing.

    Args:
        own (`MCQTask`):
            The run's task, from [`task_of_run`].
        spec (`str`, `Mapping` or `MCQTask`):
            The new file, see `get_task`. The run's own name or file is the run's task, with its splits.
        ood (`bool`, *optional*, defaults to `False`):
            Rows of another distribution: labels that the run does not have make a row unlabelled.
    """
    if not ood and is_own(own, spec):
        return own
    task = get_task(spec)
    task = dataclasses.replace(task, encoding=task.encoding or _encoding(own, task), settled=False)
    columns = _inherited(own, task) if task.own_files else task.columns
    if not own.fixed or own.labels is None:
        return dataclasses.replace(task, columns=columns)
    reading = "text" if ood and columns.answer_type == "auto" else columns.answer_type
    columns = dataclasses.replace(
        columns, choices=None, options=columns.options or own.labels, answer_type=reading, foreign=ood
    )
    if task.fixed is False and not task.own_files:  # a question set of the registry: its answers are no labels
        columns = dataclasses.replace(columns, answer=None, foreign=True)
    return dataclasses.replace(task, columns=columns, fixed=True, num_choices=len(columns.options or ()))


def _same_file(own: MCQTask, path: str) -> bool:
    """Whether it is the file whose rows were dealt out; a file of one split is a file of rows like any other."""
    source = own.source(own.dealt_from) if own.fractions else ""
    return is_data_file(path) and is_data_file(source) and os.path.abspath(path) == os.path.abspath(source)


def _encoding(own: MCQTask, task: MCQTask) -> str | None:
    """The run's encoding for a file that is not UTF-8."""
    if not (own.encoding and task.own_files):
        return None
    with suppress(OSError):  # said when it is read
        with open(next(iter(task.splits.values())), "rb") as file:
            start = file.read(1_000_000)
        if b"\0" in start and "16" not in own.encoding and "32" not in own.encoding:
            return None  # wide characters, which Latin-1 and its like would read as nonsense
        try:
            codecs.getincrementaldecoder("utf-8")().decode(start)  # which may end within a character
        except UnicodeDecodeError:
            return own.encoding
    return None


def _inherited(own: MCQTask, task: MCQTask) -> Columns:
    """The run's columns, as far as the file has them; a file with others is read by their usual names."""
    given = task.columns
    _, row = next(read_file(next(iter(task.splits.values())), task.encoding), ("", {}))
    found: dict[str, Any] = {}
    for part in ("question", "choices", "answer", "id"):
        name = getattr(own.columns, part)
        if getattr(given, part) is None and name is not None and set(columns_of(name)) <= set(row):
            found[part] = name
    if given.answer_type == "auto" and given.options is None and found.get("answer") == own.columns.answer:
        found["answer_type"] = own.columns.answer_type
    return dataclasses.replace(given, **found)


def check_unchanged(task: MCQTask, run: str) -> str | None:
    """
    Notice that a run's files have changed since it was trained.

    Args:
        task (`MCQTask`):
            The run's task, which notes the hashes of its files.
        run (`str`):
            The run's folder, in messages.

    Returns:
        `str`, *optional*: What to warn of. A changed file whose rows were dealt out, and a missing one, are a
        `UserError`: nobody could tell trained rows from others.
    """
    for split, path in task.splits.items() if task.own_files else ():
        if not os.path.isfile(path):
            raise UserError(
                f"{path}: no such file; {run} was trained on it: start where it was trained, or name other rows of "
                "the same kind (--task FILE)"
            )
        if task.sha256.get(split) in (None, sha256(path)):
            continue
        if task.fractions:
            raise UserError(
                f"{path} has changed since {run} was trained on a part of it, so its test rows are not known any "
                "more; restore it, or put rows that were not trained on into a file of their own (--task FILE)"
            )
        return f"{path} has changed since {run} was trained: results are not comparable with those of then"
    return None
