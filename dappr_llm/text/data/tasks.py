"""The registry of multiple-choice tasks, and loading the items of a split."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import UserError, nearest
from . import everyday
from .items import ANSWER_TYPES, UNKNOWN, Columns, MCQItem, parse_item
from .sources import find_local, is_data_file, read_file, read_hub

if TYPE_CHECKING:
    from datasets import Dataset

DATA_ROOT = "DAPPR_DATA_ROOT"


@dataclass(frozen=True)
class MCQTask:
    """
    The dataset of a task and how its rows are parsed.

    Args:
        name (`str`):
            Short name, used in metric keys and file names.
        path (`str`, *optional*):
            Hub id of the dataset; `None` for bundled tasks and for tasks made of files.
        config (`str`, *optional*):
            Hub configuration.
        splits (`dict[str, str]`, *optional*):
            Our split name → the dataset's split name, or a data file; `"*"` for all others. By default the same name.
        num_choices (`int`, *optional*):
            The largest number of options of an item. `None`: found in the data.
        columns (`Columns`, *optional*):
            Column names.
        revision (`str`, *optional*):
            Commit or tag on the Hub.
    """

    name: str
    path: str | None = None
    config: str | None = None
    splits: Mapping[str, str] = field(default_factory=dict)
    num_choices: int | None = None
    columns: Columns = Columns()
    revision: str | None = None


_HUB: dict[str, Any] = {"choices": "choices", "answer": "answerKey", "id": "id"}
_ARC = Columns(question="question", **_HUB)

TASKS: dict[str, MCQTask] = {
    task.name: task
    for task in (
        MCQTask("obqa", "allenai/openbookqa", "main", num_choices=4, columns=Columns("question_stem", **_HUB)),
        MCQTask("arc_c", "allenai/ai2_arc", "ARC-Challenge", num_choices=5, columns=_ARC),
        MCQTask("arc_e", "allenai/ai2_arc", "ARC-Easy", num_choices=5, columns=_ARC),
        # The labels of CommonsenseQA's test split are not public; as usual, the validation split is used for testing.
        MCQTask("csqa", "tau/commonsense_qa", None, {"test": "validation"}, num_choices=5, columns=_ARC),
        MCQTask("everyday", num_choices=4),
        MCQTask("everyday_arithmetic", num_choices=4),
        MCQTask("everyday_opposites", num_choices=4),
    )
}

_COLUMN_KEYS = {f.name for f in fields(Columns)}
_TASK_KEYS = {"name", "path", "config", "splits", "revision"} | _COLUMN_KEYS


def get_task(spec: str | Mapping[str, Any] | MCQTask) -> MCQTask:
    """
    The task that a name, a file, a Hub id or a mapping in a recipe refers to.

    Args:
        spec (`str`, `Mapping` or `MCQTask`):
            A name in `TASKS`; the path of a JSONL, CSV or Parquet file; a Hub dataset id; or a mapping with
            `name`, `path` and/or `splits`, and the column names (`question`, `choices`, `answer`, `id`,
            `options`, `answer_type`).
    """
    if isinstance(spec, MCQTask):
        return spec
    if isinstance(spec, str):
        if spec in TASKS:
            return TASKS[spec]
        if is_data_file(spec):
            return MCQTask(_stem(spec), splits={"*": spec})
        if "/" in spec:
            return MCQTask(spec.split("/")[-1], spec)
        raise UserError(
            f"Unknown task {spec!r}; {nearest(spec, TASKS)} "
            "(or give a .jsonl, .csv or .parquet file, or a Hub id org/name)"
        )
    if not isinstance(spec, Mapping):
        raise UserError(f"A task is a name or a mapping, not {type(spec).__name__}: {spec!r}")
    for key in spec:
        if key not in _TASK_KEYS:
            raise UserError(f"Unknown key {key!r} in the task description; {nearest(key, _TASK_KEYS)}")
    path, splits = spec.get("path"), dict(spec.get("splits") or {})
    if path is None and not splits:
        raise UserError("A task description needs `path` (a file or Hub id) or `splits` (split: file)")
    if path is not None and is_data_file(path):
        splits, path = {"*": path, **splits}, None
    name = spec.get("name") or (path.split("/")[-1] if path else _stem(next(iter(splits.values()))))
    return MCQTask(name, path, spec.get("config"), splits, columns=_columns(spec), revision=spec.get("revision"))


def _columns(spec: Mapping[str, Any]) -> Columns:
    values = {key: value for key, value in spec.items() if key in _COLUMN_KEYS and value is not None}
    if "options" in values:
        values["options"] = tuple(str(option) for option in values["options"])
    kind = values.get("answer_type", "auto")
    if kind not in ANSWER_TYPES:
        raise UserError(f"Unknown answer_type {kind!r}; {nearest(kind, ANSWER_TYPES)}")
    return Columns(**values)


def _stem(path: str) -> str:
    return Path(path).name.split(".")[0]


def iter_items(task: MCQTask, split: str, root: str | Path | None = None) -> Iterator[tuple[str, MCQItem]]:
    """Iterate over `(place, item)` of one split without loading it into memory; the place is file and line."""
    if task.path is None and not task.splits:
        for row in everyday.generate(task.name, split):
            yield (
                f"{task.name}, {split}, {row['id']}",
                MCQItem(row["id"], row["question"], tuple(row["options"]), row["label"]),
            )
        return
    root = root or os.environ.get(DATA_ROOT)
    source = task.splits.get(split) or task.splits.get("*") or split
    if is_data_file(source):
        rows = read_file(source)
    elif task.path is None:
        raise UserError(f"Task {task.name!r} has no split {split!r}; it has: {', '.join(task.splits) or 'none'}")
    elif root:
        rows = read_file(find_local(root, task.path, task.config, source))
    else:
        rows = read_hub(task.path, task.config, source, task.revision)
    for number, (place, row) in enumerate(rows):
        yield place, parse_item(row, task.columns, place, default_id=f"{split}-{number}")


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
    if split not in ("train", "validation", "test") and task.name in everyday.SPLITS:
        raise UserError(f"Task {task.name!r} has no split {split!r}; {nearest(split, everyday.SPLITS[task.name])}")
    places: dict[str, str] = {}
    items = ItemRows()
    try:
        for place, item in itertools.islice(iter_items(task, split, root), limit):
            if item.id in places:
                raise UserError(f"{place}: the id {item.id!r} was used before ({places[item.id]}); ids must be unique")
            if labelled and item.label == UNKNOWN:
                raise UserError(f"{place}: the row has no answer, which training and evaluation need")
            places[item.id] = place
            items.append({"id": item.id, "question": item.question, "options": item.options, "label": item.label})
    except ValueError as error:  # from the generator of the bundled tasks, which lists its splits
        raise UserError(str(error)) from None
    if not items:
        raise UserError(f"Task {task.name!r}, split {split!r}, has no rows")
    return items


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
    from datasets import Dataset, Features, List, Value

    features = Features(
        {"id": Value("string"), "question": Value("string"), "options": List(Value("string")), "label": Value("int64")}
    )
    return Dataset.from_list(items, features=features)
