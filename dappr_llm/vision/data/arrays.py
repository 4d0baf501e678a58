"""Readers of image datasets stored as arrays: IDX, NumPy, CIFAR's binary batches, SVHN's MATLAB files, CIFAR-10-C."""

from __future__ import annotations

import gzip
import logging
import math
import zlib
from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.archives import load_npy, load_npz
from ...core.errors import UserError
from .images import ArrayImages
from .splits import Split, aliases

if TYPE_CHECKING:
    from .tasks import ImageTask

logger = logging.getLogger(__name__)

_IDX_IMAGES, _IDX_LABELS = 2051, 2049
_CIFAR_PIXELS = 3 * 32 * 32
_MOST_UNPACKED = 2**32  # bytes of a gzip file


def read_idx(folder: Path, split: str, task: ImageTask) -> Split | None:
    """MNIST's IDX files, plain or gzipped: `train-images-idx3-ubyte[.gz]` and `t10k-…`; `None` if there are none."""
    for base in (folder, folder / "raw", *sorted(folder.glob("*/raw"))):
        for prefix in ("t10k", *aliases(split)) if split == "test" else aliases(split):
            images = _first(base, f"{prefix}-images[-.]idx3-ubyte", f"{prefix}-images[-.]idx3-ubyte.gz")
            if images is None:
                continue
            labels = _first(base, f"{prefix}-labels[-.]idx1-ubyte", f"{prefix}-labels[-.]idx1-ubyte.gz")
            if labels is None:
                raise UserError(f"{images}: there is no {prefix}-labels-idx1-ubyte[.gz] beside it")
            pixels, classes = idx_array(images, _IDX_IMAGES), idx_array(labels, _IDX_LABELS)
            _same_length(pixels, classes, images)
            return _split(pixels, classes, split, str(images))
    return None


def idx_array(path: Path, magic: int) -> np.ndarray:
    """The uint8 array in an IDX file with the given magic number."""
    raw = _bytes(path)
    if len(raw) < 8 or int.from_bytes(raw[:4], "big") != magic:
        raise UserError(f"{path}: not an IDX file of {'images' if magic == _IDX_IMAGES else 'labels'}")
    sides = magic & 0xFF
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(sides)]
    start, size = 4 + 4 * sides, math.prod(shape)
    if len(raw) != start + size:
        raise UserError(
            f"{path}: {len(raw) - start} bytes of data where the header announces {size}; download it again"
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape)


def read_npz(folder: Path, split: str, task: ImageTask) -> Split | None:
    """`<split>.npz`, or a subset such as `train_10k.npz`, with arrays `images` and `labels`; `None` if missing."""
    for alias in aliases(split):
        path = _first(folder, f"{alias}.npz", f"{alias}_*.npz")
        if path is not None:
            if path.stem != alias:
                logger.warning(f"{path}: taken for the {split} split, of which it may be a part")
            return npz_split(path, split)
    return None


def npz_split(path: Path, split: str) -> Split:
    """Read a `.npz` file with `images` (or `x`), and optionally `labels` (or `y`), `label_names` and `index`."""
    arrays = _numpy(path)
    if not isinstance(arrays, dict):
        raise UserError(f"{path}: expected an archive (.npz) with images and labels")
    images = next((arrays[key] for key in ("images", "x", "X", "data") if key in arrays), None)
    if images is None:
        raise UserError(f"{path}: no array `images`; it has {', '.join(arrays) or 'none'}")
    labels = next((arrays[key] for key in ("labels", "y", "label") if key in arrays), None)
    if labels is None:
        labels = np.full(len(images), -1)
    _same_length(images, labels, path)
    names = [str(name) for name in arrays["label_names"]] if "label_names" in arrays else None
    return _split(images, labels, split, str(path), names, arrays.get("index"))


def read_cifar_binary(folder: Path, split: str, task: ImageTask) -> Split | None:
    """CIFAR's binary version: `data_batch_1.bin` … and `test_batch.bin`, or CIFAR-100's `train.bin` and `test.bin`."""
    for base in (folder, folder / "cifar-10-batches-bin", folder / "cifar-100-binary"):
        batches = sorted(base.glob("data_batch_*.bin")) if split == "train" else sorted(base.glob("test_batch.bin"))
        label_bytes = 1
        if not batches:
            batches, label_bytes = [base / f"{split}.bin"], 2  # coarse label, then fine label
        if not batches[0].is_file():
            continue
        parts = []
        for path in batches:
            raw = np.frombuffer(_bytes(path), dtype=np.uint8)
            if raw.size == 0 or raw.size % (label_bytes + _CIFAR_PIXELS):
                raise UserError(f"{path}: {raw.size} bytes are not a whole number of images; download it again")
            parts.append(raw.reshape(-1, label_bytes + _CIFAR_PIXELS))
        rows = np.concatenate(parts)
        pixels = rows[:, label_bytes:].reshape(-1, 3, 32, 32)
        return _split(pixels, rows[:, label_bytes - 1], split, str(batches[0].parent))
    pickled = _first(folder, "data_batch_1", "cifar-10-batches-py/data_batch_1", "cifar-100-python/train")
    if pickled is not None:
        raise UserError(f"{pickled}: Python pickles are not read, since they can run code; take the binary version")
    return None


def read_matrix(folder: Path, split: str, task: ImageTask) -> Split | None:
    """SVHN's cropped digits: `train_32x32.mat`, `test_32x32.mat`, where class 10 is the digit 0."""
    path = _first(folder, f"{split}_32x32.mat")
    if path is None:
        return None
    arrays = load_matrix(path)
    if "X" not in arrays or "y" not in arrays:
        raise UserError(f"{path}: expected the matrices X and y")
    pixels, labels = arrays["X"].transpose(3, 0, 1, 2), arrays["y"].reshape(-1).astype(np.int64)
    _same_length(pixels, labels, path)
    return _split(pixels, np.where(labels == 10, 0, labels), split, str(path))


def load_matrix(path: Path) -> dict[str, Any]:
    """The variables of a MATLAB file by name."""
    import scipy.io

    try:
        return scipy.io.loadmat(path)
    except (ValueError, TypeError, OSError, NotImplementedError, zlib.error) as error:
        raise UserError(f"{path}: not a readable MATLAB file ({str(error).splitlines()[0]})") from None


def read_corrupted(folder: Path, split: str, task: ImageTask) -> Split | None:
    """CIFAR-10-C: `<corruption>.npy`, in which the five severities are concatenated, and `labels.npy`."""
    corruption, severity = str(task.where["corruption_name"]), int(task.where["corruption_level"])
    path = _first(folder, f"{corruption}.npy", f"CIFAR-10-C/{corruption}.npy")
    if path is None:
        return None
    pixels, labels = _numpy(path), _numpy(path.with_name("labels.npy"))
    _same_length(pixels, labels, path)
    if len(pixels) % 5:
        raise UserError(f"{path}: {len(pixels)} images do not make five severities of equal length")
    size = len(pixels) // 5
    part = slice(size * (severity - 1), size * severity)
    return _split(np.array(pixels[part]), labels[part], f"{corruption}-{severity}", str(path))


def _split(
    pixels: np.ndarray,
    labels: np.ndarray,
    split: str,
    place: str,
    names: list[str] | None = None,
    index: np.ndarray | None = None,
) -> Split:
    labels = np.asarray(labels).reshape(-1)
    if labels.dtype.kind not in "iuU":
        raise UserError(f"{place}: labels must be integers or class names, found {labels.dtype}")
    if labels.dtype.kind != "U":
        labels = labels.astype(np.int64)
    numbers = range(len(labels)) if index is None else index
    return Split(ArrayImages(pixels, place), labels, [f"{split}-{i}" for i in numbers], names, place)


def _first(folder: Path, *patterns: str) -> Path | None:
    return next((path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()), None)


def _bytes(path: Path) -> bytes:
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            data = file.read(_MOST_UNPACKED + 1)
        if len(data) > _MOST_UNPACKED:
            raise UserError(
                f"{path}: unpacks to more than {_MOST_UNPACKED:,} bytes; unpack it yourself if that is right"
            )
        return data
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise UserError(f"{path}: the gzip file is damaged or cut short") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None


def _numpy(path: Path) -> Any:
    try:
        return load_npy(path) if path.suffix == ".npy" else load_npz(path)
    except ValueError as error:
        raise UserError(f"{path}: not a readable NumPy file of plain arrays ({str(error).splitlines()[0]})") from None


def _same_length(images: Sized, labels: Sized, path: Path) -> None:
    if len(images) != len(labels):
        raise UserError(f"{path}: {len(images)} images but {len(labels)} labels")
