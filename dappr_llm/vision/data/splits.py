"""What a reader returns, and how its rows are divided: validation rows, long tails, samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import UserError
from .images import Images
from .seeded_random import shuffled

RULES = ("random", "stratified", "last")
_ALIASES = {"validation": ("validation", "val", "valid", "dev"), "test": ("test", "testing")}
_LIMIT, _VALIDATION, _TAIL, _TEST = range(4)  # streams of random numbers


def aliases(split: str) -> tuple[str, ...]:
    """Names under which a split is found in folders and files."""
    return _ALIASES.get(split, (split,))


@dataclass
class Split:
    """
    Rows as a reader found them.

    Args:
        images (`Images`):
            The pixels.
        labels (`np.ndarray`):
            int64, -1 where unknown; or class names as strings, which are numbered later.
        ids (`list[str]`):
            A name per row, unique within the dataset.
        class_names (`list[str]`, *optional*):
            Names of the classes.
        place (`str`, *optional*):
            Where they came from, for messages.
        undivided (`bool`, *optional*, defaults to `False`):
            The source knows no splits: these are all its rows.
        final (`bool`, *optional*, defaults to `False`):
            The source has validation rows of its own: take none from training.
    """

    images: Images
    labels: np.ndarray
    ids: list[str]
    class_names: list[str] | None = None
    place: str = ""
    undivided: bool = False
    final: bool = False

    def take(self, indices: np.ndarray) -> Split:
        """Some of the rows."""
        ids = [self.ids[i] for i in indices]
        return Split(self.images.take(indices), self.labels[indices], ids, self.class_names, self.place)


def joined(parts: list[Split]) -> Split:
    """The rows of several splits one after the other."""
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
    Positions of the rows to keep and of those to hold out, both in their old order.

    Args:
        labels (`np.ndarray`):
            Class of each row.
        fraction (`float`):
            Share to hold out; `int(n · (1 - fraction))` rows are kept.
        rule (`str`):
            `"random"` over all rows, `"stratified"` (random within each class; the total is as for `"random"`), or
            `"last"` (of each class the last rows, which in a folder are the last in alphabetical order).
        seed (`int`):
            Decides which rows.
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
    return int(count * (1 - fraction) + 1e-6)  # 60000 · (1 - 0.2) must not fall below 48000


def _stratified(labels: np.ndarray, total: int, order: np.ndarray) -> np.ndarray:
    """`total` rows, as many of each class as its share says; what rounding leaves goes to the largest remainders."""
    classes, counts = np.unique(labels, return_counts=True)
    exact = counts * total / len(labels)
    wanted = np.floor(exact).astype(int)
    for i in np.argsort(-(exact - wanted), kind="stable")[: total - wanted.sum()]:
        wanted[i] += 1
    chosen = [order[labels[order] == label][:number] for label, number in zip(classes, wanted, strict=True)]
    return np.concatenate(chosen) if chosen else np.empty(0, dtype=int)


def divide_test(labels: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Training and test rows of a source without splits: by class, and the same whatever the seed of the run."""
    order = shuffled(len(labels), 0, _TEST)
    held = np.zeros(len(labels), dtype=bool)
    held[_stratified(labels, len(labels) - _kept(len(labels), fraction), order)] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def tail_counts(largest: int, num_classes: int, ratio: float) -> list[int]:
    """
    Rows per class of a long-tailed set: exponentially fewer from the first class to the last.

    Args:
        largest (`int`):
            Rows of the first class.
        num_classes (`int`):
            How many classes.
        ratio (`float`):
            Rows of the last class by rows of the first, for instance 0.01.
    """
    if not 0 < ratio <= 1:
        raise UserError(f"imbalance is tail/head, above 0 and at most 1; got {ratio}")
    return [int(largest * ratio ** (c / max(num_classes - 1, 1))) for c in range(num_classes)]


def long_tail(labels: np.ndarray, num_classes: int, ratio: float, seed: int) -> np.ndarray:
    """Positions of a long-tailed sample, in their old order; which rows of a class stay is decided by the seed."""
    largest = int(np.bincount(labels, minlength=num_classes).max())
    order = shuffled(len(labels), seed, _TAIL)
    wanted = tail_counts(largest, num_classes, ratio)
    return np.sort(np.concatenate([order[labels[order] == c][:number] for c, number in enumerate(wanted)]))


def sample(count: int, limit: int | None, seed: int) -> np.ndarray:
    """At most `limit` positions, at random since sets are often sorted by class; a larger limit adds rows only."""
    if limit is not None and limit < 1:
        raise UserError(f"The number of images to read must be at least 1, got {limit}")
    if limit is None or limit >= count:
        return np.arange(count)
    return np.sort(shuffled(count, seed, _LIMIT)[:limit])


def check_labels(split: Split, num_classes: int | None, labelled: bool) -> None:
    """Refuse labels outside the classes, and missing ones where they are needed; the first bad row is named."""
    labels: Any = split.labels
    bad = labels < -1 if num_classes is None else (labels < -1) | (labels >= num_classes)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        among = "" if num_classes is None else f" among {num_classes} classes (0…{num_classes - 1})"
        raise UserError(f"{split.images.place(row)}: label {labels[row]}{among}")
    if labelled and (labels < 0).any():
        row = int(np.flatnonzero(labels < 0)[0])
        raise UserError(f"{split.images.place(row)}: the image has no label, which training and evaluation need")
