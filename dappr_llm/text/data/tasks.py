"""Loading the items of a split of a task; the declarations themselves are in `registry`."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import random
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.data_frames import as_rows
from ...core.errors import UserError, nearest
from ...core.splits import CALIBRATION, same_text, set_aside
from ...core.splits import split as deal_out
from . import everyday
from .columns import Columns
from .items import LETTERS, UNKNOWN, ItemParser, MCQItem, RowProblem
from .registry import TASKS, MCQTask, describe, get_task
from .run_task import inherit, task_of_run
from .settle import DATA_ROOT, raw_rows, settle, settle_recipe, settle_rows
from .sources import is_data_file

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = [
    "DATA_ROOT", "TASKS", "ItemRows", "MCQTask", "as_dataset", "as_rows", "describe", "get_task", "inherit",
    "items_of", "iter_items", "iter_rows", "labels_of", "load_items", "load_task", "most_options", "settle",
    "settle_recipe", "task_of_run", "trained_places", "with_naming",
]  # fmt: skip

logger = logging.getLogger(__name__)

_MOST_COMPARED = 2**26  # bytes of a file whose rows are compared with those of others

Placed = tuple[str, MCQItem]  # file and line, item
PlacedRow = tuple[str, MCQItem, Mapping[str, Any]]  # and the row that it was made of
_last_dealt: tuple[tuple[Any, ...], dict[str, list[PlacedRow]], list[RowProblem]] | None = None


def iter_items(
    task: MCQTask,
    split: str,
    root: str | Path | None = None,
    labelled: bool = False,
    problems: list[RowProblem] | None = None,
) -> Iterator[Placed]:
    """
    Iterate over `(place, item)` of one split; the place is file and line.

    Nothing is kept in memory, unless the split is dealt out from a larger one.

    Args:
        task (`MCQTask`):
            The task.
        split (`str`):
            The split.
        root (`str` or `Path`, *optional*):
            Local folder with copies of Hub datasets.
        labelled (`bool`, *optional*, defaults to `False`):
            Refuse rows without a label.
        problems (`list[RowProblem]`, *optional*):
            Where bad rows are put, which are then left out; by default the first one is an error.
    """
    return ((place, item) for place, item, _ in iter_rows(task, split, root, labelled, problems))


def iter_rows(
    task: MCQTask,
    split: str,
    root: str | Path | None = None,
    labelled: bool = False,
    problems: list[RowProblem] | None = None,
) -> Iterator[PlacedRow]:
    """Iterate over `(place, item, raw row)` of one split; arguments as for [`iter_items`]."""
    if task.bundled:
        yield from ((place, item, {}) for place, item in _bundled(task, split))
        return
    task = settle(task, root, split)
    source = task.calibration.get("source")
    if source is not None and split in (source, CALIBRATION):
        yield from _set_aside(task, source, split, _whole(task, source, root, labelled, problems))
    else:
        yield from _whole(task, split, root, labelled, problems)


def _whole(
    task: MCQTask, split: str, root: str | Path | None, labelled: bool, problems: list[RowProblem] | None
) -> Iterator[PlacedRow]:
    """A split with the calibration rows in it."""
    if split in task.fractions:
        yield from _dealt(task, root, labelled, problems)[split]
    else:
        yield from _parsed(task, split, root, labelled, problems)


def _set_aside(task: MCQTask, source: str, split: str, whole: Iterable[PlacedRow]) -> Iterator[PlacedRow]:
    """The calibration rows of a split, or the others."""
    rows = list(whole)
    rest, own = set_aside(*_strata(task, rows), task.calibration["share"], task.split_seed)
    if split == source:
        how = "stratified by label, equal texts on one side" if task.fixed else "equal questions on one side"
        logger.info(f"{task.name}: {len(own):,} of {len(rows):,} {source} rows are kept for calibration ({how})")
    yield from (rows[number] for number in (own if split == CALIBRATION else rest).tolist())


def _strata(task: MCQTask, rows: Sequence[PlacedRow]) -> tuple[list[Hashable], list[Hashable]]:
    """What rows are dealt out by: their labels, where these are fixed, and their texts."""
    labels = [item.label if task.fixed else 0 for _, item, _ in rows]
    names: list[Hashable] = [task.labels[each] if task.labels and each != UNKNOWN else each for each in labels]
    return names, [same_text(item.question) for _, item, _ in rows]


def _bundled(task: MCQTask, split: str) -> Iterator[Placed]:
    for row in everyday.generate(task.name, split):
        options, label = tuple(row["options"]), row["label"]
        if task.labels is not None:  # questions for a model that knows other labels
            options, label = task.labels, UNKNOWN
        yield f"{task.name}, {split}, {row['id']}", MCQItem(row["id"], row["question"], options, label)


def _parsed(
    task: MCQTask, split: str, root: str | Path | None, labelled: bool, problems: list[RowProblem] | None
) -> Iterator[PlacedRow]:
    parse = ItemParser(task.columns)
    for number, (place, row) in enumerate(raw_rows(task, split, root)):
        try:
            yield place, parse(row, place, f"{split}-{number}", labelled), row
        except RowProblem as problem:
            if problems is None:
                raise
            problems.append(problem)


def _dealt(
    task: MCQTask, root: str | Path | None, labelled: bool, problems: list[RowProblem] | None
) -> dict[str, list[PlacedRow]]:
    """The rows of every part of a split; those of the last task are kept, since its parts are read one by one."""
    global _last_dealt
    first = task.dealt_from
    key = (repr(dataclasses.replace(task, settled=True)), str(root), labelled, _stamp(task.source(first)))
    if _last_dealt is not None and _last_dealt[0] == key and (problems is not None or not _last_dealt[2]):
        if problems is not None:
            problems += _last_dealt[2]
        return _last_dealt[1]
    own: list[RowProblem] = []
    rows = list(_parsed(task, first, root, labelled, None if problems is None else own))
    for _ in _unique((place, item) for place, item, _ in rows):
        pass
    names, groups = _strata(task, rows)
    shares = {first: task.fractions[first], **task.fractions}
    parts = deal_out(names, groups, shares, task.split_seed)
    found = {name: [rows[number] for number in numbers.tolist()] for name, numbers in parts.items()}
    counts = ", ".join(f"{name} {len(part):,}" for name, part in found.items())
    how = "stratified by label, equal texts on one side" if task.fixed else "equal questions on one side"
    logger.info(f"{task.source(first)}: {len(rows):,} rows split into {counts} ({how}, seed {task.split_seed})")
    if problems is not None:
        problems += own
    _last_dealt = (key, found, own)
    return found


def _unique(rows: Iterable[Placed]) -> Iterator[Placed]:
    places: dict[str, str] = {}
    for place, item in rows:
        if item.id in places:
            raise UserError(f"{place}: the id {item.id!r} was used before ({places[item.id]}); ids must be unique")
        places[item.id] = place
        yield place, item


def _stamp(source: str) -> tuple[int, int] | None:
    """Tells a file from what it was before."""
    if not is_data_file(source) or not os.path.isfile(source):
        return None
    state = os.stat(source)
    return state.st_mtime_ns, state.st_size


def load_task(
    task: str | Mapping[str, Any] | MCQTask,
    split: str,
    root: str | Path | None = None,
    limit: int | None = None,
    labelled: bool = True,
) -> Dataset:
    """
    The items of one split as a `Dataset` with columns `id`, `question`, `options`, `label`.

    Args:
        task (`str`, `Mapping` or `MCQTask`):
            See `get_task`.
        split (`str`):
            `"train"`, `"validation"` or `"test"`, or whatever the dataset has.
        root (`str` or `Path`, *optional*):
            Local folder with copies of Hub datasets; defaults to the environment variable `DAPPR_DATA_ROOT`.
        limit (`int`, *optional*):
            Read only the first `limit` rows.
        labelled (`bool`, *optional*, defaults to `True`):
            Raise a `UserError` for rows without a label.
    """
    return load_items(task, split, root, limit, labelled).to_dataset()


class ItemRows(list[dict[str, Any]]):
    """Parsed items as a list; a `Dataset` is made only to tokenise them, since importing `datasets` takes seconds."""

    column_names = ("id", "question", "options", "label")
    labels: tuple[str, ...] | None = None  # of the task, if they are fixed

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)

    def to_dataset(self) -> Dataset:
        return as_dataset(self)


def load_items(
    task: str | Mapping[str, Any] | MCQTask,
    split: str,
    root: str | Path | None = None,
    limit: int | None = None,
    labelled: bool = True,
) -> ItemRows:
    """The items of one split, arguments as for [`load_task`]; imports `datasets` only for tasks on the Hub."""
    task = get_task(task)
    if split not in everyday.SPLITS["everyday"] and task.name in everyday.SPLITS:
        raise UserError(f"Task {task.name!r} has no split {split!r}; {nearest(split, everyday.SPLITS[task.name])}")
    items = ItemRows()
    try:
        task = settle(task, root, split)
        for place, item in itertools.islice(_unique(iter_items(task, split, root, labelled)), limit):
            if labelled and item.label == UNKNOWN:
                raise UserError(f"{place}: the row has no answer, which training and evaluation need")
            items.append({"id": item.id, "question": item.question, "options": item.options, "label": item.label})
    except ValueError as error:  # from the generator of the bundled tasks, which lists its splits
        raise UserError(str(error)) from None
    if not items:
        raise UserError(f"Task {task.name!r}, split {split!r}, has no rows")
    items.labels = task.labels
    return items


def items_of(rows: Any, name: str = "rows", labels: Sequence[str] | None = None, labelled: bool = True) -> ItemRows:
    """
    Rows in memory as items; their labels are fixed if they are given, or if the rows have no options of their own.

    Args:
        rows (`DataFrame`, `Dataset` or `list[dict]`):
            Rows with text and label, or with question, choices and answer, under their usual names.
        name (`str`, *optional*, defaults to `"rows"`):
            How errors call them.
        labels (`Sequence[str]`, *optional*):
            The labels that a model was trained on; by default those of the rows.
        labelled (`bool`, *optional*, defaults to `True`):
            Raise a `UserError` for rows without a label.
    """
    placed = [(f"{name}, row {number}", row) for number, row in enumerate(as_rows(rows))]
    if not placed:
        raise UserError(f"{name} has no rows")
    task = settle_rows(MCQTask(name, columns=Columns(options=tuple(labels) if labels else None)), placed)
    parse = ItemParser(task.columns)
    found = ((place, parse(row, place, str(number), labelled)) for number, (place, row) in enumerate(placed))
    items = ItemRows(vars(item) for _, item in _unique(found))
    items.labels = task.labels
    return items


def trained_places(own: MCQTask, split: str, questions: Sequence[str]) -> list[tuple[int, str]]:
    """
    Which of some texts a run was trained on: their numbers, each with the file and line of the training row.

    Args:
        own (`MCQTask`):
            The run's task; only files of a size that is read in a second or two are looked at, if they are there.
        split (`str`):
            Its training split.
        questions (`Sequence[str]`):
            The texts.
    """
    path = own.source(split) if own.own_files else ""
    if not os.path.isfile(path) or os.path.getsize(path) > _MOST_COMPARED:
        return []
    with suppress(UserError):
        known = {same_text(item.question): place for place, item in iter_items(own, split)}
        texts = [same_text(text) for text in questions]
        return [(number, known[text]) for number, text in enumerate(texts) if text in known]
    return []


def with_naming(items: Dataset, share: float) -> Dataset:
    """
    Replace the question of some items by one that contains the text of the right option ("Which of these is plum?").

    Such questions need no knowledge; they teach a small model that a letter stands for the option beside it. Items are
    chosen by a hash of their ids.

    Args:
        items (`Dataset`):
            Labelled items from `load_task`.
        share (`float`):
            Fraction of items to replace, in [0, 1].
    """
    if not 0 <= share <= 1:
        raise UserError(f"data.naming_share must be between 0 and 1, got {share}")
    if share == 0:
        return items

    def rename(item: dict[str, Any]) -> dict[str, Any]:
        draw = random.Random(f"naming/{item['id']}")  # a string as seed: the same on every machine
        if draw.random() < share:
            form = everyday.NAMING_QUESTIONS[int(draw.random() * len(everyday.NAMING_QUESTIONS))]
            item["question"] = form.format(word=item["options"][item["label"]])
        return item

    return items.map(rename)


def as_dataset(items: list[dict[str, Any]]) -> Dataset:
    """
    Items as a `Dataset`. Fixed labels are the names of its column `label` (a `ClassLabel`); beyond the 26 of which
    letters can be read, they are not repeated in every row as `options` ([`labels_of`] names them).
    """
    from datasets import ClassLabel, Dataset, Features, List, Value

    labels = items.labels if isinstance(items, ItemRows) else None
    features: dict[str, Any] = {"id": Value("string"), "question": Value("string")}
    if labels is None or len(labels) <= len(LETTERS):
        features["options"] = List(Value("string"))
    features["label"] = Value("int64") if labels is None else ClassLabel(names=list(labels))
    columns = {name: [item[name] for item in items] for name in features}
    return Dataset.from_dict(columns, features=Features(features))


def labels_of(rows: Any) -> tuple[str, ...] | None:
    """The fixed labels of loaded items (`ItemRows`, or a `Dataset` made of them); `None` if rows have their own."""
    if isinstance(rows, ItemRows):
        return rows.labels
    names = getattr((getattr(rows, "features", None) or {}).get("label"), "names", None)
    return tuple(names) if names else None


def most_options(rows: Any) -> int:
    """The largest number of options of loaded items."""
    labels = labels_of(rows)
    return len(labels) if labels else max(map(len, rows["options"]))
