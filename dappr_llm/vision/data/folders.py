"""Readers of image datasets stored as files: one folder per class, or files with a list of their labels."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...core.errors import UserError
from ...core.files import read_json
from .images import FileImages
from .splits import Split, aliases

if TYPE_CHECKING:
    from .tasks import ImageTask

logger = logging.getLogger(__name__)

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
_WRAPPERS = ("images", "Images", "image", "val_256", "val_large")
_SPLITS = ("train", "validation", "test")


def is_image(path: str | Path) -> bool:
    """Whether a file name has one of the image `SUFFIXES`."""
    return str(path).lower().endswith(SUFFIXES)


def has_images(folder: Path) -> bool:
    """Whether there is an image in a folder, at most three levels deep; stops at the first."""
    for here, below, files in os.walk(folder):
        if any(is_image(name) for name in files):
            return True
        if len(Path(here).relative_to(folder).parts) >= 3:
            below.clear()
    return False


def read_folder(folder: Path, split: str, task: ImageTask) -> Split | None:
    """
    Read one folder per class: `<split>/<class>/…`, or `<class>/…` for a source without splits.

    Images directly in the folder have no label. Classes are numbered by the sorted folder names of the training split,
    so that all splits agree.
    """
    divided = {name: place for name in _SPLITS if (place := _split_folder(folder, name)) is not None}
    if divided:
        if split not in divided:
            return None
        base, of_classes = divided[split], divided.get("train", divided[split])
    else:
        base = of_classes = _unwrapped(folder)
    classes = list(task.class_names) or _class_folders(of_classes)
    found = _tree(base, folder, classes, split == "train" or not divided)
    if found is not None:
        found.undivided, found.final = not divided, "validation" in divided
    return found


def _split_folder(folder: Path, split: str) -> Path | None:
    for alias in aliases(split):
        if (folder / alias).is_dir():
            return _unwrapped(folder / alias)
    return None


def _unwrapped(folder: Path) -> Path:
    """The subfolder `images` (or another of `_WRAPPERS`) if there is one, else the folder."""
    return next((folder / name for name in _WRAPPERS if (folder / name).is_dir()), folder)


def _class_folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _tree(base: Path, root: Path, classes: list[str], complete: bool) -> Split | None:
    names = _class_folders(base)
    if not names:
        files, skipped = _files(base)
        labels = np.full(len(files), -1, dtype=np.int64)
    else:
        numbers = {name: i for i, name in enumerate(classes)}
        files, skipped, found = [], 0, []
        for name in names:
            if name not in numbers:
                raise UserError(f"{base / name}: a class that training does not have; it has {_few(classes)}")
            inside, others = _files(base / name)
            files += inside
            skipped += others
            found += [numbers[name]] * len(inside)
        labels = np.array(found, dtype=np.int64)
        empty = sorted(set(names) - {classes[i] for i in found})
        if complete and files and empty:
            raise UserError(f"{base / empty[0]}: a class without images; add some, or remove the folder")
    if skipped:
        logger.warning(f"{base}: {skipped} files that are not images were skipped")
    if not files:
        return None
    ids = [path[len(str(root)) :].lstrip(os.sep).replace(os.sep, "/") for path in files]
    return Split(FileImages(files), labels, ids, classes if names else None, str(base))


def _files(folder: Path) -> tuple[list[str], int]:
    """Sorted paths of all images below a folder, and the number of other files."""
    images, others = [], 0
    for here, _, files in os.walk(folder, followlinks=True):
        for name in files:
            if name.startswith("."):
                continue
            if is_image(name):
                images.append(os.path.join(here, name))
            else:
                others += 1
    return sorted(images), others


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def read_json_lists(folder: Path, split: str, task: ImageTask) -> Split | None:
    """Read `train.json`, `val.json`, `test.json`, each `{file: label}`; classes are numbered by sorted label."""
    lists: dict[str, Path] = {}
    for name in _SPLITS:
        for place in (folder, folder / "splits"):
            for alias in aliases(name):
                if (place / f"{alias}.json").is_file():
                    lists.setdefault(name, place / f"{alias}.json")
    if split not in lists:
        return None
    known = sorted({label for path in lists.values() for label in _json_list(path).values()})
    numbers = {label: i for i, label in enumerate(known)}
    entries = _json_list(lists[split])
    found = _listed(folder, entries, [numbers[label] for label in entries.values()], lists[split])
    found.final = "validation" in lists
    return found


def _json_list(path: Path) -> dict[str, int | str]:
    entries = read_json(path, 2**30)  # one entry per image
    if not isinstance(entries, dict) or not entries:
        raise UserError(f"{path}: expected a JSON object {{file: label}}")
    return entries


def _listed(folder: Path, names: Iterable[str], labels: Iterable[int], source: Path) -> Split:
    """A `Split` of listed files, searched in the folder, in its `images` subfolder and beside the list."""
    names = list(names)
    bases = [folder, _unwrapped(folder), source.parent, _unwrapped(source.parent)]
    base = next((base for base in bases if names and (base / names[0]).is_file()), None)
    if base is None:
        raise UserError(f"{source}: names {_few(names[:1]) or 'no files'}, which is not under {folder}")
    return Split(
        FileImages([os.path.join(base, name) for name in names]), np.array(list(labels)), names, None, str(source)
    )


def read_cub(folder: Path, split: str, task: ImageTask) -> Split | None:
    """CUB-200-2011: `images.txt`, `image_class_labels.txt`, `train_test_split.txt`, `classes.txt`."""
    folder = folder / "CUB_200_2011" if (folder / "CUB_200_2011").is_dir() else folder
    if split not in ("train", "test") or not (folder / "images.txt").is_file():
        return None
    paths, labels, training = (
        _pairs(folder / f"{name}.txt") for name in ("images", "image_class_labels", "train_test_split")
    )
    wanted = "1" if split == "train" else "0"
    chosen = [key for key in paths if _entry(training, key, folder / "train_test_split.txt") == wanted]
    numbers = [int(_entry(labels, key, folder / "image_class_labels.txt")) - 1 for key in chosen]
    found = _listed(folder, [paths[key] for key in chosen], numbers, folder / "images.txt")
    if (folder / "classes.txt").is_file():
        found.class_names = list(_pairs(folder / "classes.txt").values())
    return found


def _pairs(path: Path) -> dict[str, str]:
    """A text file with two words per line as a dictionary: first word → second word."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    pairs = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        words = line.split()
        if len(words) < 2:
            raise UserError(f"{path}, line {number}: expected two words, found {line!r}")
        pairs[words[0]] = words[1]
    return pairs


def _entry(pairs: dict[str, str], key: str, path: Path) -> str:
    if key not in pairs:
        raise UserError(f"{path}: no entry for {key!r}")
    return pairs[key]


def read_matrix_lists(folder: Path, split: str, task: ImageTask) -> Split | None:
    """Stanford Dogs: `Images/<breed>/…` with `train_list.mat` and `test_list.mat` in the folder or in `lists/`."""
    from .arrays import load_matrix

    for place in (folder, folder / "lists"):
        path = place / f"{split}_list.mat"
        if path.is_file():
            lists = load_matrix(path)
            names = [str(np.asarray(entry[0]).item()) for entry in lists["file_list"]]
            found = _listed(folder, names, (lists["labels"].reshape(-1).astype(np.int64) - 1).tolist(), path)
            found.class_names = _class_folders(_unwrapped(folder))
            return found
    return None


def read_tinyimagenet(folder: Path, split: str, task: ImageTask) -> Split | None:
    """TinyImageNet: `train/<class>/images/…`, and `val/images/…` with `val/val_annotations.txt`."""
    folder = folder / "tiny-imagenet-200" if (folder / "tiny-imagenet-200").is_dir() else folder
    notes = folder / "val" / "val_annotations.txt"
    if not notes.is_file() or not (folder / "train").is_dir():
        return None
    classes = _class_folders(folder / "train")
    if split == "train":
        return _tree(folder / "train", folder, classes, True)
    numbers = {name: i for i, name in enumerate(classes)}
    entries = _pairs(notes)
    for name, word in entries.items():
        if word not in numbers:
            raise UserError(f"{notes}: {name} has the class {word!r}, which is not in {folder / 'train'}")
    found = _listed(folder / "val", entries, [numbers[word] for word in entries.values()], notes)
    found.ids, found.class_names = [f"val/{name}" for name in found.ids], classes
    return found


def read_places(folder: Path, split: str, task: ImageTask) -> Split | None:
    """Places365's validation images: `val_256/…` or `val_large/…`, with `places365_val.txt` for the labels."""
    notes = folder / "places365_val.txt"
    if not notes.is_file():
        return None
    entries = _pairs(notes)
    return _listed(folder, entries, [int(word) for word in entries.values()], notes)
