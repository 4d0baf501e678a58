"""
What a task leaves open, found in its training rows: columns, labels, how labels are read, and splits.

A settled task is written into the recipe of a run; what a new file inherits from it is in `run_task`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.checkpoint import sha256
from ...core.errors import UserError
from ...core.splits import CALIBRATION, LEAST_SELECTION, calibration_source
from .columns import guess, missing_column, take
from .items import own_candidates, own_options
from .labels import LabelColumn, find_labels, find_reading, label_text, say_names
from .registry import MCQTask, describe, get_task
from .sources import Row, find_local, is_data_file, read_file, read_hub

if TYPE_CHECKING:
    from ...core.schemas.recipe import DataSection, Recipe

logger = logging.getLogger(__name__)

DATA_ROOT = "DAPPR_DATA_ROOT"
_LOOKED_AT = 5000  # rows of multiple choice that decide whether whole numbers are options or positions
_MOST_HASHED = 2**30  # bytes
_SHARES = {1: 0.2, 2: 0.1}  # share of each part that is dealt out from the training rows, by their number


def raw_rows(task: MCQTask, split: str, root: str | Path | None = None) -> Iterator[Row]:
    """Iterate over `(place, row)` of the source of a split; for one that is dealt out, of all its parts together."""
    root = root or os.environ.get(DATA_ROOT)
    source, names = task.source(split), task.fixed is not False
    if is_data_file(source):
        rows = read_file(source, task.encoding, names)
    elif task.path is None:
        raise UserError(f"Task {task.name!r} has no split {split!r}; it has: {', '.join(task.splits) or 'none'}")
    elif root:
        rows = read_file(_local(task, split, root, source), task.encoding, names)
    else:
        rows = read_hub(task.path, task.config, source, task.revision, names)
    return _selected(task, rows) if task.skip_labels or task.only_labels else rows


def _local(task: MCQTask, split: str, root: str | Path, source: str) -> Path:
    assert task.path is not None
    if split in task.local_splits:
        try:
            return find_local(root, task.path, task.config, task.local_splits[split])
        except UserError:
            pass  # a copy in the Hub's own layout
    return find_local(root, task.path, task.config, source)


def _selected(task: MCQTask, rows: Iterator[Row]) -> Iterator[Row]:
    for place, row in rows:
        label = label_text(take(row, "answer", task.columns.answer, place, optional=True, fixed=True), place)
        if label in task.only_labels if task.only_labels else label not in task.skip_labels:
            yield place, row


def settle(task: MCQTask, root: str | Path | None = None, split: str = "train") -> MCQTask:
    """
    A task with its columns, and with labels and their reading where they are fixed; unchanged if nothing is open.

    Args:
        task (`MCQTask`):
            The task.
        root (`str` or `Path`, *optional*):
            Local folder with copies of Hub datasets.
        split (`str`, *optional*, defaults to `"train"`):
            The split that is read, for tasks whose training rows are not needed or not there.
    """
    if task.bundled or task.settled or _is_settled(task):
        return task
    if task.own_files and "train" in {*task.splits, *task.fractions} or task.fixed and task.path:
        split = "train"
    rows = raw_rows(task, split, root)
    first = next(rows, None)
    if first is None:
        raise UserError(f"Task {task.name!r}, split {split!r}, has no rows")
    fixed = task.fixed if task.fixed is not None else guess("choices", first[1]) is None
    task = dataclasses.replace(task, fixed=fixed, settled=True)
    if not fixed:
        return _settle_own(task, itertools.chain([first], rows))
    split = "train" if task.path and not task.labels else split
    return _settle_labels(task, first, lambda: raw_rows(task, split, root))


def settle_rows(task: MCQTask, rows: Sequence[Row]) -> MCQTask:
    """As [`settle`], for rows in memory, at least one."""
    fixed = task.labels is not None or guess("choices", rows[0][1]) is None
    task = dataclasses.replace(task, fixed=fixed, settled=True)
    return _settle_labels(task, rows[0], lambda: rows) if fixed else _settle_own(task, rows)


def _is_settled(task: MCQTask) -> bool:
    columns = task.columns
    if task.fixed:
        named = columns.question is not None and columns.answer is not None
        return columns.options is not None and named and (columns.answer_type != "auto" or columns.foreign)
    return task.num_choices is not None or columns.answer_type != "auto" and columns.choices is not None


def _settle_labels(task: MCQTask, first: Row, rows: Callable[[], Iterable[Row]]) -> MCQTask:
    columns, (place, row) = task.columns, first
    question = columns.question or guess("question", row, fixed=True)
    answer = columns.answer or guess("answer", row, fixed=True)
    if answer is not None and answer not in row and columns.options is None:
        raise missing_column("answer", answer, row, place, fixed=True)
    if answer is None and columns.options is None:
        # Nothing says that the labels are fixed: what is missing may as well be the options.
        raise missing_column("choices" if task.columns.question is None else "answer", None, row, place, fixed=True)
    if question is None:
        raise missing_column("question", None, row, place, fixed=True)
    labels, reading = columns.options, columns.answer_type
    if labels is None or (reading == "auto" and answer is not None):
        found = _label_column(rows(), answer)
        labels = labels or find_labels(found, task.name)
        if reading == "auto" and columns.options is None:
            say_names(labels, task.name)
            reading = "text"
        elif reading == "auto" and found.counts:
            reading = find_reading(found, labels, task.name)
    settled = dataclasses.replace(columns, question=question, answer=answer, options=labels, answer_type=reading)
    return dataclasses.replace(task, columns=settled, num_choices=len(labels))


def _label_column(rows: Iterable[Row], answer: str | None) -> LabelColumn:
    found = LabelColumn()
    for place, row in rows:
        text = label_text(row.get(answer) if answer else None, place)
        if text is not None:
            found.add(text, place)
    return found


def _settle_own(task: MCQTask, rows: Iterable[Row]) -> MCQTask:
    """Whole numbers as answers: options where every one of them is an option of its row, positions otherwise."""
    columns = task.columns
    if columns.answer_type != "auto":
        return task
    named = positions = True
    seen = 0
    for place, row in itertools.islice(rows, _LOOKED_AT):
        text = label_text(take(row, "answer", columns.answer, place, optional=True), place)
        if text is None:
            continue
        if not text.isdecimal():
            return task
        options, labels = own_options(row, columns, place)
        if labels is not None:
            return task
        seen += 1
        named = named and bool(own_candidates(text, options, None, "text"))
        positions = positions and len(text) < 8 and int(text) < len(options)
    if not seen or not (named or positions):
        return task
    kind, words = ("text", "options by their text") if named else ("index", "positions of options, from 0")
    logger.info(f"{task.name}: the answers are whole numbers and read as {words} (answer_type: {kind})")
    return dataclasses.replace(task, columns=dataclasses.replace(columns, answer_type=kind))


# --- recipes --------------------------------------------------------------------------------------------------------


def recipe_task(recipe: Recipe) -> MCQTask:
    """The training task of a recipe, settled, with its splits."""
    return settle(with_parts(get_task(recipe.data.train), recipe.data), recipe.data.root, recipe.data.train_split)


def settle_recipe(recipe: Recipe) -> Recipe:
    """A recipe that says what was found in its data, for the run's folder; the same one if nothing was open."""
    task, split = with_calibration(recipe_task(recipe), recipe)
    if not recipe.data.streaming:
        task = dataclasses.replace(task, sha256={**file_hashes(task), **task.sha256})
    data = recipe.data.model_copy(update={"train": describe(task), "calibration_split": split})
    return recipe.model_copy(update={"data": data})


def with_calibration(task: MCQTask, recipe: Recipe) -> tuple[MCQTask, str | None]:
    """
    A task with calibration rows, and the split that they are; says where they come from.

    Args:
        task (`MCQTask`):
            The task of a recipe, with its other splits.
        recipe (`Recipe`):
            Which splits are used for what.
    """
    data = recipe.data
    split = data.calibration_split
    if split != CALIBRATION or task.calibration or split in {*task.splits, *task.fractions} or task.bundled:
        return task, split if not task.bundled or task.name == "everyday" else None
    unused = data.validation_split is None and not data.validation_fraction and data.calibration_fraction is None
    if unused and task.path is not None and _count(task, "validation", data.root) >= LEAST_SELECTION:
        logger.info(f"{task.name}: its validation rows, on which nothing is selected, are kept for calibration")
        return task, "validation"
    selected = data.validation_split or ("validation" if data.validation_fraction else None)
    training = 0 if data.streaming else _count(task, data.train_split, data.root)
    selection = _count(task, selected, data.root) if selected else 0
    found = calibration_source(selection, training, data.calibration_fraction)
    if found is None:
        logger.info(
            f"{task.name}: {training:,} training and {selection:,} validation rows are too few to keep some for "
            "calibration, so answers get no familiarity (data.calibration_split names such rows)"
        )
        return task, None
    source = data.train_split if found[0] == "train" else str(selected)
    return dataclasses.replace(task, calibration={"source": source, "share": round(found[1], 6)}), split


def _count(task: MCQTask, split: str, root: str | None) -> int:
    """Rows of a split; 0 if it is not there, which is said by those who need it."""
    try:
        return int(sum(1 for _ in raw_rows(task, split, root)) * task.fractions.get(split, 1.0))
    except UserError:
        return 0


def file_hashes(task: MCQTask) -> dict[str, str]:
    """SHA-256 of a task's own files, by split; of those that are there, and up to a gibibyte."""
    files = {split: path for split, path in task.splits.items() if task.own_files and os.path.isfile(path)}
    found = {path: sha256(path) for path in set(files.values()) if os.path.getsize(path) <= _MOST_HASHED}
    return {split: found[path] for split, path in files.items() if path in found}


def with_parts(task: MCQTask, data: DataSection) -> MCQTask:
    """
    A task whose missing splits are dealt out from its training rows.

    Args:
        task (`MCQTask`):
            The task of a recipe; files of one's own have the splits that they have, Hub datasets all that are asked.
        data (`DataSection`):
            Which splits are asked for.
    """
    train, share = data.train_split, data.validation_fraction
    validation = data.validation_split or ("validation" if share else None)
    wanted = [name for name in (data.test_split, validation) if name and name != train]
    missing = [name for name in wanted if task.own_files and name not in task.splits]
    if share and validation and validation not in missing:
        missing.append(validation)
    if task.fractions or task.bundled and not share or not missing or task.source(train) == train and task.own_files:
        return task
    if data.streaming:
        raise UserError(
            f"{task.name}: data.streaming reads the file as it comes and cannot deal out {' and '.join(missing)}; "
            "give them files of their own (splits:), or set data.test_split and data.validation_split to null"
        )
    shares = {name: share if name == validation and share else _SHARES[len(missing)] for name in missing}
    return dataclasses.replace(task, fractions={train: round(1 - sum(shares.values()), 6), **shares})
