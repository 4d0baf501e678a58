"""Resolving image tasks from names, folders and recipes, and loading their splits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import UserError, nearest
from ...core.splits import CALIBRATION, set_aside
from . import digits
from .catalogue import CORRUPTIONS, FINE, IMAGE_TASKS, IMAGENET_MEAN, IMAGENET_STD, SEVERITIES, ImageTask
from .folders import has_images
from .images import in_memory
from .rows import ImageRows
from .sources import SPECIAL, find_folder, read_file, read_hub, read_local
from .splits import RULES, Split, aliases, check_labels, divide, divide_test, joined, long_tail, sample

__all__ = [
    "CORRUPTIONS", "DATA_ROOT", "IMAGE_TASKS", "SEVERITIES", "ImageRows", "ImageTask", "get_image_task",
    "is_image_task", "load_image_task",
]  # fmt: skip

DATA_ROOT = "DAPPR_DATA_ROOT"
_OWN: dict[str, Any] = {**FINE, "mean": IMAGENET_MEAN, "std": IMAGENET_STD}
_TASK_KEYS = {f.name for f in dataclasses.fields(ImageTask)}
_FILES = (".npz", ".parquet")
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("name", "path", "config", "image", "label", "layout", "revision"), str),
    **dict.fromkeys(("num_classes", "channels", "size", "resize"), int),
    **dict.fromkeys(("validation_fraction", "test_fraction", "imbalance"), (int, float)),
    **dict.fromkeys(("splits", "where", "calibration"), Mapping),
    **dict.fromkeys(("mean", "std", "augment", "class_names", "folders"), tuple),
}
_KIND_NAMES: dict[Any, str] = {
    str: "a text", int: "a whole number", (int, float): "a number", Mapping: "a mapping", tuple: "a list",
}  # fmt: skip


def is_image_task(spec: object) -> bool:
    """
    Whether a task is an image task: a name in `IMAGE_TASKS`, a folder of images, a `.npz` file, or a mapping with the
    key `task` or `image` or such a `path`.

    Args:
        spec (`str`, `Mapping` or `ImageTask`):
            See `get_image_task`.
    """
    if isinstance(spec, ImageTask):
        return True
    if isinstance(spec, str):
        return spec in IMAGE_TASKS or spec.startswith("cifar10_c/") or _is_own(spec)
    if not isinstance(spec, Mapping):
        return False
    if "task" in spec or "image" in spec:
        return True
    return any(isinstance(path, str) and _is_own(path) for path in (spec.get("path"), *_values(spec.get("splits"))))


def _is_own(path: str) -> bool:
    if path.endswith(".npz"):
        return True
    folder = Path(path).expanduser()
    return folder.is_dir() and (has_images(folder) or any(folder.glob("*.npz")) or any(folder.glob("*-idx3-ubyte*")))


def _values(splits: object) -> list[Any]:
    return list(splits.values()) if isinstance(splits, Mapping) else []


def get_image_task(spec: str | Mapping[str, Any] | ImageTask) -> ImageTask:
    """
    The image task that a name, a folder, a Hub id or a mapping in a recipe refers to.

    Args:
        spec (`str`, `Mapping` or `ImageTask`):
            A name in `IMAGE_TASKS`; `cifar10_c/<corruption>/<severity>`; a folder of images; a Hub id; or a mapping
            with fields of `ImageTask`, and with `task` (a name whose fields it overrides), `path` (folder, `.npz`,
            `.parquet`, Hub id) or `splits` (split: file).
    """
    if isinstance(spec, ImageTask):
        return spec
    if isinstance(spec, str):
        if spec in IMAGE_TASKS:
            return IMAGE_TASKS[spec]
        if spec.startswith("cifar10_c/"):
            return _corrupted(spec)
        if _is_own(spec) or "/" in spec:
            return _own({"path": spec})
        raise UserError(f"Unknown image task {spec!r}; {nearest(spec, IMAGE_TASKS)} (or give a folder of images)")
    if not isinstance(spec, Mapping):
        raise UserError(f"A task is a name or a mapping, not {type(spec).__name__}: {spec!r}")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in spec.items()}
    start = values.pop("task", None)
    for key in values:
        if key not in _TASK_KEYS:
            raise UserError(f"Unknown key {key!r} in the task description; {nearest(key, _TASK_KEYS | {'task'})}")
    _check_types(values)
    task = _own(values) if start is None else dataclasses.replace(get_image_task(start), **values)
    _check(task)
    return task


def _corrupted(spec: str) -> ImageTask:
    words = spec.split("/")
    if len(words) != 3:
        raise UserError(f"{spec!r}: write it as cifar10_c/<corruption>/<severity>, e.g. cifar10_c/fog/3")
    if words[1] not in CORRUPTIONS:
        raise UserError(f"Unknown corruption {words[1]!r}; {nearest(words[1], CORRUPTIONS)}")
    if words[2] not in map(str, SEVERITIES):
        raise UserError(f"{spec!r}: severities are 1 to 5")
    where = {"corruption_name": words[1], "corruption_level": int(words[2])}
    return dataclasses.replace(IMAGE_TASKS["cifar10_c"], name="_".join(words), where=where)


def _own(values: dict[str, Any]) -> ImageTask:
    path, splits = values.get("path") or None, dict(values.get("splits") or {})
    if path is None and not splits:
        raise UserError("A task description needs `task` (a name), `path` (a folder, file or Hub id) or `splits`")
    if path is not None and str(path).endswith(_FILES):
        splits, path = {"*": str(path), **splits}, None
    source = Path(str(path or next(iter(splits.values()))))
    defaults = dict(_OWN)
    if path is not None and not Path(path).expanduser().is_dir():
        defaults.pop("validation_fraction")  # Hub datasets usually have a validation split
    size = values.get("size")
    if size is not None and "resize" not in values:
        defaults["resize"] = round(256 / 224 * size)
    return ImageTask(**{**defaults, "name": source.stem, **values, "path": path, "splits": splits})


def _check_types(values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if key in _KINDS and value is not None and (isinstance(value, bool) or not isinstance(value, _KINDS[key])):
            raise UserError(f"{key} in the task description must be {_KIND_NAMES[_KINDS[key]]}, got {value!r}")


def _check(task: ImageTask) -> None:
    if task.validation_rule not in RULES:
        raise UserError(f"Unknown validation_rule {task.validation_rule!r}; {nearest(task.validation_rule, RULES)}")
    if task.num_classes and task.class_names and len(task.class_names) != task.num_classes:
        raise UserError(f"{len(task.class_names)} class_names for {task.num_classes} classes")
    if task.layout is not None and task.layout not in SPECIAL:
        raise UserError(f"Unknown layout {task.layout!r}; {nearest(task.layout, SPECIAL)}")
    for name in ("validation_fraction", "test_fraction"):
        value = getattr(task, name)
        if value is not None and not 0 < value < 1:
            raise UserError(f"{name} must be between 0 and 1, got {value}")


def load_image_task(
    spec: str | Mapping[str, Any] | ImageTask,
    split: str,
    root: str | Path | None = None,
    limit: int | None = None,
    labelled: bool = True,
    seed: int = 0,
) -> ImageRows:
    """
    Load the images of one split.

    Args:
        spec (`str`, `Mapping` or `ImageTask`):
            See `get_image_task`.
        split (`str`):
            `"train"`, `"validation"` or `"test"`, or whatever the dataset has.
        root (`str` or `Path`, *optional*):
            Folder with local copies of datasets; defaults to the environment variable `DAPPR_DATA_ROOT`, else the Hub.
        limit (`int`, *optional*):
            Size of a random sample of the rows; a larger limit adds rows to it.
        labelled (`bool`, *optional*, defaults to `True`):
            Raise a `UserError` for rows without a label.
        seed (`int`, *optional*, defaults to 0):
            Seed of the validation split, the long tail, the `limit` sample of training and validation rows, and the
            augmentation. Test rows do not depend on it.
    """
    task = get_image_task(spec)
    source = task.calibration.get("source") if split in (task.calibration.get("source"), CALIBRATION) else None
    found = _divided(task, source or split, root or os.environ.get(DATA_ROOT), seed)
    if source is not None:
        rest, own = set_aside(found.labels.tolist(), None, task.calibration["share"])
        found = found.take(own if split == CALIBRATION else rest)
    num_classes = task.num_classes or len(found.class_names or task.class_names) or None
    check_labels(found, num_classes, labelled)
    if len(found.ids) == 0:
        raise UserError(f"Task {task.name!r}, split {split!r}, has no images")
    rows = sample(len(found.ids), limit, seed if split in ("train", "validation") else 0)
    if len(rows) < len(found.ids):
        found = found.take(rows)
    images = in_memory(found.images, task.channels) if task.in_memory else found.images
    names = task.class_names or found.class_names
    return ImageRows(images, found.labels, found.ids, names, num_classes, f"{task.name} {split}", seed)


def _divided(task: ImageTask, split: str, root: str | Path | None, seed: int) -> Split:
    """The rows of our split; validation and test rows are held out from training rows if the source has none."""
    if task.whole or split not in ("train", "validation", "test"):
        return _read(task, split, root)
    carved = task.validation_fraction is not None and "validation" not in task.splits
    # Not empty if the source's validation split is our test split.
    tested = set(aliases("validation")) & set(task.splits.values())
    if split == "validation" and not carved:
        if tested and "validation" not in task.splits:
            raise UserError(
                f"The validation images of {task.name} are what it is tested on; hold out some training images "
                "(validation_fraction) or go without (data.validation_split: null)"
            )
        return _read(task, split, root)
    first = _read(task, "train" if split == "validation" else split, root)
    final = first.final and not tested
    if first.undivided and (first.labels >= 0).any():
        train, test = divide_test(first.labels, task.test_fraction)
        first = first.take(test if split == "test" else train)
    elif split == "validation" and final:
        return _read(task, split, root)
    if split == "test":
        return first
    if task.imbalance is not None:
        check_labels(first, task.num_classes, labelled=True)
        first = first.take(long_tail(first.labels, task.num_classes or 0, task.imbalance, seed))
    if final or not carved:
        return first
    assert task.validation_fraction is not None
    train, held = divide(first.labels, task.validation_fraction, task.validation_rule, seed)
    return first.take(held if split == "validation" else train)


def _read(task: ImageTask, split: str, root: str | Path | None) -> Split:
    """The rows of a split in the source, with class names converted to class indices."""
    found = _source(task, split, root)
    if found.labels.dtype.kind == "U":
        names = list(task.class_names or found.class_names or ())
        if not names:
            others = found if split == "train" else _source(task, "train", root)
            names = sorted(set(others.labels.tolist()) - {"-1"})
        numbers = {name: i for i, name in enumerate(names)} | {"-1": -1}
        for row, label in enumerate(found.labels.tolist()):
            if label not in numbers:
                raise UserError(f"{found.images.place(row)}: unknown class {label!r}; {nearest(label, names)}")
        found.labels = np.array([numbers[label] for label in found.labels.tolist()], dtype=np.int64)
        found.class_names = names
    return found


def _source(task: ImageTask, split: str, root: str | Path | None) -> Split:
    if task.path is None and not task.splits:
        return digits.read(task.name, split)
    if task.layout == "corrupted" and not task.where:
        raise UserError(f"{task.name} is 95 sets: name one, e.g. {task.name}/fog/3")
    source = task.splits.get(split) or task.splits.get("*") or split
    if source.endswith(_FILES):
        return read_file(Path(source).expanduser(), split, task)
    if task.path is None:
        raise UserError(f"Task {task.name!r} has no split {split!r}; it has: {', '.join(task.splits) or 'none'}")
    own = Path(task.path).expanduser()
    if not own.is_dir():
        if own.is_absolute() or task.path.count("/") > 1 or task.path[0] in ".~":
            raise UserError(f"{own}: no such folder")
        if not root:
            return read_hub(task, source)
        own = find_folder(root, task)
    source = next((name for name in ("validation", "test") if source in aliases(name)), source)
    found = read_local(own, source, task)
    if found is None and "+" in source:
        parts = [read_local(own, name, task) for name in source.split("+")]
        found = joined([part for part in parts if part is not None]) if all(parts) else None
    if found is None and task.whole:
        found = read_local(own, split, task)
    if found is None:
        raise UserError(f"{own}: no split {split!r} of {task.name} in a layout that is known")
    return found
