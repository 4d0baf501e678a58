"""Reading one split of an image dataset from a local folder in any known layout, or from the Hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...core.errors import UserError
from ...core.hub_revisions import dataset_to_load
from .arrays import npz_split, read_cifar_binary, read_corrupted, read_idx, read_matrix, read_npz
from .folders import read_cub, read_folder, read_json_lists, read_matrix_lists, read_places, read_tinyimagenet
from .images import HubImages
from .splits import Split, aliases

if TYPE_CHECKING:
    from datasets import Dataset

    from .tasks import ImageTask

_LABELS = ("label", "labels", "fine_label", "cls", "target", "class")


def read_parquet(folder: Path, split: str, task: ImageTask) -> Split | None:
    """Parquet files as on the Hub (`<split>-00000-of-….parquet`), `<split>.parquet`, or one folder per split."""
    places = [folder, folder / "data", *([folder / task.config] if task.config else [])]
    for place in places:
        for alias in aliases(split):
            for pattern in (f"{alias}.parquet", f"{alias}-*.parquet", f"{alias}/*.parquet"):
                files = sorted(place.glob(pattern))
                if files:
                    return parquet_split(files, split, task)
    return None


def parquet_split(files: list[Path], split: str, task: ImageTask) -> Split:
    """Read Parquet files with `datasets`, which memory-maps them."""
    import datasets

    place = str(files[0])
    try:
        dataset = datasets.load_dataset("parquet", data_files=[str(file) for file in files], split="train")
    except (ValueError, OSError, RuntimeError) as error:
        raise UserError(f"{place}: not a readable Parquet file ({_first_line(error)})") from None
    return dataset_split(dataset, split, task, place)


def read_saved(folder: Path, split: str, task: ImageTask) -> Split | None:
    """Read a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    import datasets

    for alias in aliases(split):
        if (folder / alias / "state.json").is_file():
            return dataset_split(datasets.load_from_disk(str(folder / alias)), split, task, str(folder / alias))
    if (folder / "state.json").is_file():
        found = dataset_split(datasets.load_from_disk(str(folder)), split, task, str(folder))
        found.undivided = True
        return found
    return None


Reader = Callable[[Path, str, "ImageTask"], Split | None]
# Readers of general layouts, tried in this order after the one of `ImageTask.layout` (`SPECIAL`).
LAYOUTS: dict[str, Reader] = {
    "idx": read_idx,
    "npz": read_npz,
    "cifar_binary": read_cifar_binary,
    "matrix": read_matrix,
    "json_lists": read_json_lists,
    "saved": read_saved,
    "parquet": read_parquet,
    "folder": read_folder,
}
SPECIAL: dict[str, Reader] = {
    "cub": read_cub,
    "dogs": read_matrix_lists,
    "tinyimagenet": read_tinyimagenet,
    "places365": read_places,
    "corrupted": read_corrupted,
}


def read_local(folder: Path, split: str, task: ImageTask) -> Split | None:
    """
    One split of a dataset in a local folder, by the first reader that recognises its layout; `None` if none does.

    Args:
        folder (`Path`):
            The dataset's folder.
        split (`str`):
            Name of the split in the dataset.
        task (`ImageTask`):
            Column names, class names and the special layout.
    """
    if task.layout == "corrupted":
        return read_corrupted(folder, split, task) or read_parquet(folder, split, task)
    readers = [read_json_lists, SPECIAL[task.layout]] if task.layout else []
    for reader in [*readers, *LAYOUTS.values()]:
        found = reader(folder, split, task)
        if found is not None:
            return found
    return None


def read_file(path: Path, split: str, task: ImageTask) -> Split:
    """Read one data file, `.npz` or `.parquet`."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.suffix == ".npz":
        return npz_split(path, split)
    return parquet_split([path], split, task)


def find_folder(root: str | Path, task: ImageTask) -> Path:
    """The folder of a task's dataset in the data root; a `UserError` with the names that were tried."""
    root = Path(root)
    if not root.is_dir():
        raise UserError(f"{root}: the data root is not a folder")
    names = [*task.folders, task.name, *([task.path, task.path.split("/")[-1]] if task.path else [])]
    for name in dict.fromkeys(names):
        if (root / name).is_dir():
            return root / name
    raise UserError(f"No {task.name} under {root}; looked for the folders {', '.join(dict.fromkeys(names))}")


def read_hub(task: ImageTask, split: str) -> Split:
    """One split of a Hub dataset (or its local cache), without running its loading script."""
    import datasets

    assert task.path is not None
    place = f"{task.path}{f' ({task.config})' if task.config else ''}, {split}"
    try:
        wanted = dataset_to_load(task.path, task.revision)
        dataset = datasets.load_dataset(task.path, task.config, split=split, revision=wanted)
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"Could not load {place} from the Hub: {_first_line(error)}. Check the name and the network, or point "
            "data.root (--data-root, DAPPR_DATA_ROOT) at a local copy"
        ) from None
    return dataset_split(dataset, split, task, place)


def dataset_split(dataset: Dataset, split: str, task: ImageTask, place: str) -> Split:
    """
    A `Split` from a `datasets.Dataset`.

    Args:
        dataset (`datasets.Dataset`):
            With an image column and optionally a label column.
        split (`str`):
            Prefix of the ids.
        task (`ImageTask`):
            Column names, and by `where` the rows to keep.
        place (`str`):
            Name of the dataset in error messages.
    """
    import datasets

    column = _image_column(dataset, task, place)
    rows = np.arange(len(dataset))
    for key, value in task.where.items():
        if key not in dataset.column_names:
            raise UserError(f"{place}: no column {key!r}; it has {', '.join(dataset.column_names)}")
        values_of = dataset.select_columns([key]).with_format("numpy")[:][key]  # lists are slow for a million rows
        rows = rows[values_of[rows].astype(str) == str(value)]
    name = next((key for key in (task.label, *_LABELS) if key in dataset.column_names), None)
    names = None
    labels: np.ndarray = np.full(len(dataset), -1, dtype=np.int64)
    if name is not None:
        values = [(-1 if value is None else value) for value in dataset[name][:]]
        if isinstance(dataset.features[name], datasets.ClassLabel):
            names = list(dataset.features[name].names)
        if any(isinstance(value, str) for value in values):
            labels = np.array([str(value) for value in values])
        else:
            try:
                labels = np.array(values, dtype=np.int64)
            except (TypeError, ValueError):
                raise UserError(f"{place}: the column {name!r} holds neither class numbers nor names") from None
    ids = [f"{split}-{i}" for i in rows]
    return Split(HubImages(dataset, column, place, rows), labels[rows], ids, names, place)


def _image_column(dataset: Dataset, task: ImageTask, place: str) -> str:
    import datasets

    if task.image in dataset.column_names:
        return task.image
    pictures = [name for name, feature in dataset.features.items() if isinstance(feature, datasets.Image)]
    if len(pictures) != 1:
        raise UserError(
            f"{place}: no image column {task.image!r}; it has {', '.join(dataset.column_names)}. "
            "Name it in the task description: image: <column>"
        )
    return pictures[0]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
