"""`Split`, the result of a dataset reader, and operations on its rows: hold-out splits, long tails, sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import UserError
from .images import Images
from .seeded_random import shuffled

RULES = ("random", "stratified", "last")
_ALIASES = {"validation": ("validation", "val", "valid", "dev"), "test": ("test", "testing")}
_LIMIT, _VALIDATION, _TAIL, _TEST = range(4)  # independent random streams


def aliases(split: str) -> tuple[str, ...]:
    """Names of a split in folders and files, such as `val` for `validation`."""
    return _ALIASES.get(split, (split,))


@dataclass
class Split:
    """
    The rows of one split, as read from a dataset.

    Args:
        images (`Images`):
            The pixels.
        labels (`np.ndarray`):
            int64 class indices, -1 if unknown; or class names as strings, which are numbered later.
        ids (`list[str]`):
            Unique name of each row.
        class_names (`list[str]`, *optional*):
            Names of the classes.
        place (`str`, *optional*):
            Name of the source in error messages.
        undivided (`bool`, *optional*, defaults to `False`):
            The source has no splits: these are all its rows.
        final (`bool`, *optional*, defaults to `False`):
            The source has a validation split: do not hold out training rows.
    """

    images: Images
    labels: np.ndarray
    ids: list[str]
    class_names: list[str] | None = None
    place: str = ""
    undivided: bool = False
    final: bool = False

    def take(self, indices: np.ndarray) -> Split:
        """Select rows by index."""
        ids = [self.ids[i] for i in indices]
        return Split(self.images.take(indices), self.labels[indices], ids, self.class_names, self.place)


def joined(parts: list[Split]) -> Split:
    """Concatenate splits with the same classes."""
    first = parts[0]
    images: Any = first.images
    for part in parts[1:]:
        if part.class_names != first.class_names:
            raise UserError(f"{part.place}: other classes than {first.place}")
        images = images.joined(part.images)
    labels = np.concatenate([part.labels for part in parts])
    return Split(images, labels, [name for part in parts for name in part.ids], first.class_names, first.place)


def divide(labels: np.ndarray, fraction: float, rule: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Row numbers to keep and row numbers to hold out, both sorted.

    Args:
        labels (`np.ndarray`):
            Class of each row.
        fraction (`float`):
            Fraction to hold out; `int(n · (1 - fraction))` rows are kept.
        rule (`str`):
            `"random"` over all rows, `"stratified"` (random within each class, same total as `"random"`), or `"last"`
            (the last rows of each class; in folders, the last files in alphabetical order).
        seed (`int`):
            Seed of the random choice.
    """
    count = len(labels)
    held = np.zeros(count, dtype=bool)
    if rule == "random":
        held[shuffled(count, seed, _VALIDATION)[_kept(count, fraction) :]] = True
    elif rule == "stratified":
        held[_stratified(labels, count - _kept(count, fraction), shuffled(count, seed, _VALIDATION))] = True
    elif rule == "last":
        for label in np.unique(labels):
            rows = np.flatnonzero(labels == label)
            held[rows[max(1, _kept(len(rows), fraction)) :]] = True
    else:
        raise UserError(f"Unknown validation rule {rule!r}; valid: {', '.join(RULES)}")
    return np.flatnonzero(~held), np.flatnonzero(held)


def _kept(count: int, fraction: float) -> int:
    return int(count * (1 - fraction) + 1e-6)  # guards against rounding: 60000 · (1 - 0.2) must give 48000


def _stratified(labels: np.ndarray, total: int, order: np.ndarray) -> np.ndarray:
    """`total` row numbers, in proportion to the class sizes (largest-remainder rounding), taken in the given order."""
    classes, counts = np.unique(labels, return_counts=True)
    exact = counts * total / len(labels)
    wanted = np.floor(exact).astype(int)
    for i in np.argsort(-(exact - wanted), kind="stable")[: total - wanted.sum()]:
        wanted[i] += 1
    chosen = [order[labels[order] == label][:number] for label, number in zip(classes, wanted, strict=True)]
    return np.concatenate(chosen) if chosen else np.empty(0, dtype=int)


def divide_test(labels: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Training and test row numbers of a source without splits: stratified, independent of the seed of the run."""
    order = shuffled(len(labels), 0, _TEST)
    held = np.zeros(len(labels), dtype=bool)
    held[_stratified(labels, len(labels) - _kept(len(labels), fraction), order)] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def tail_counts(largest: int, num_classes: int, ratio: float) -> list[int]:
    """
    Rows per class of a long-tailed dataset, decreasing exponentially from the first class to the last.

    Args:
        largest (`int`):
            Rows of the first class.
        num_classes (`int`):
            Number of classes.
        ratio (`float`):
            Rows of the last class / rows of the first, for instance 0.01.
    """
    if not 0 < ratio <= 1:
        raise UserError(f"imbalance is tail/head, above 0 and at most 1; got {ratio}")
    return [int(largest * ratio ** (c / max(num_classes - 1, 1))) for c in range(num_classes)]


def long_tail(labels: np.ndarray, num_classes: int, ratio: float, seed: int) -> np.ndarray:
    """Sorted row numbers of a long-tailed subsample; the seed decides which rows of a class are kept."""
    largest = int(np.bincount(labels, minlength=num_classes).max())
    order = shuffled(len(labels), seed, _TAIL)
    wanted = tail_counts(largest, num_classes, ratio)
    return np.sort(np.concatenate([order[labels[order] == c][:number] for c, number in enumerate(wanted)]))


def sample(count: int, limit: int | None, seed: int) -> np.ndarray:
    """Sorted row numbers of a random sample of at most `limit` rows; a larger limit adds rows to it."""
    if limit is not None and limit < 1:
        raise UserError(f"The number of images to read must be at least 1, got {limit}")
    if limit is None or limit >= count:
        return np.arange(count)
    return np.sort(shuffled(count, seed, _LIMIT)[:limit])


def check_labels(split: Split, num_classes: int | None, labelled: bool) -> None:
    """Raise a `UserError` that names the first row with a label outside the classes, or without one if `labelled`."""
    labels = split.labels
    bad = labels < -1 if num_classes is None else (labels < -1) | (labels >= num_classes)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        among = "" if num_classes is None else f" among {num_classes} classes (0…{num_classes - 1})"
        raise UserError(f"{split.images.place(row)}: label {labels[row]}{among}")
    if labelled and (labels < 0).any():
        row = int(np.flatnonzero(labels < 0)[0])
        raise UserError(f"{split.images.place(row)}: the image has no label, which training and evaluation need")
