"""
The one splitter: rows dealt out to named parts (train, validation, test, …), for text and images.

Stratified by label; rows of one group (equal texts, equal images) stay together; decided by a hash of seed and group,
so the same on every machine and with every version of every library.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from .errors import UserError

logger = logging.getLogger(__name__)


def same_text(text: str) -> str:
    """The form in which texts are equal: without differences of case and white space."""
    return " ".join(text.split()).casefold()


def split(
    labels: Sequence[Hashable], groups: Sequence[Hashable] | None, parts: Mapping[str, float], seed: int = 0
) -> dict[str, np.ndarray]:
    """
    Deal rows out to parts.

    Every label goes to every part in proportion, at least one group each. A label with fewer groups than there are
    parts goes to the parts in their order, so name `train` first; a warning says how many such labels there are.

    Args:
        labels (`Sequence`):
            Label of each row.
        groups (`Sequence`, *optional*):
            Rows with equal entries stay in one part; a group counts for the label of its first row. By default every
            row is a group.
        parts (`Mapping[str, float]`):
            Name → fraction of the rows, 1 in all.
        seed (`int`, *optional*, defaults to 0):
            Another seed deals other rows.

    Returns:
        Sorted row numbers of each part.
    """
    _check(parts)
    groups = range(len(labels)) if groups is None else groups
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    of_label: dict[Hashable, list[list[int]]] = {}
    for group in sorted(members, key=lambda group: _order(seed, group)):
        of_label.setdefault(labels[members[group][0]], []).append(members[group])
    dealt: dict[str, list[int]] = {name: [] for name in parts}
    carry = np.zeros(len(parts))  # what rounding owes each part, passed on to the next label
    for label in dict.fromkeys(labels):  # in the order of the rows; a label may have lost its groups to another one
        own = sorted(of_label.get(label, []), key=len, reverse=True)
        wanted, carry = _targets(own, np.array(list(parts.values())), carry)
        for name, rows in zip(parts, _deal(own, wanted), strict=True):
            dealt[name] += rows
    _say_scarce(of_label, list(parts))
    return {name: np.array(sorted(rows), dtype=np.int64) for name, rows in dealt.items()}


# --- calibration rows -----------------------------------------------------------------------------------------------

CALIBRATION = "calibration"
LEAST_SELECTION = 200  # validation rows that stay for selection, if half of them are to calibrate
LEAST_TRAINING = 500  # training rows from which on some of them are
_LEAST, _MOST = 100, 2000  # calibration rows


def calibration_source(selection: int, training: int, fraction: float | None = None) -> tuple[str, float] | None:
    """
    Which rows calibration rows are split off from, `"validation"` or `"train"`, and their share of these.

    Half of the validation rows if enough of them are left; else a tenth of the training rows, at least 100; `None`
    where both are too few.

    Args:
        selection, training (`int`):
            Numbers of validation and training rows.
        fraction (`float`, *optional*):
            Another share.
    """
    if selection and (fraction or selection >= 2 * LEAST_SELECTION):
        return "validation", fraction or min(0.5, _MOST / selection)
    if training and (fraction or training >= LEAST_TRAINING):
        return "train", fraction or min(max(0.1, _LEAST / training), _MOST / training)
    return None


def set_aside(
    labels: Sequence[Hashable], groups: Sequence[Hashable] | None, share: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """
    Row numbers without calibration rows, and those of the calibration rows; stratified, equal rows on one side.

    Args:
        labels, groups, seed:
            As in [`split`].
        share (`float`):
            Share of the calibration rows.
    """
    parts = split(labels, groups, {"rest": 1 - share, CALIBRATION: share}, seed)
    return parts["rest"], parts[CALIBRATION]


def _check(parts: Mapping[str, float]) -> None:
    if not parts or any(share <= 0 for share in parts.values()) or abs(sum(parts.values()) - 1) > 1e-6:
        shown = ", ".join(f"{name} {share:g}" for name, share in parts.items())
        raise UserError(f"The fractions of a split must be above 0 and add up to 1, got {shown or 'none'}")


def _order(seed: int, group: Hashable) -> bytes:
    return hashlib.blake2b(f"{seed}/{group}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _targets(groups: list[list[int]], shares: np.ndarray, carry: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of one label for each part (largest remainders), and what is still owed."""
    count = sum(map(len, groups))
    exact = count * shares + carry
    wanted = np.maximum(np.floor(exact + 1e-9), 0).astype(int)
    if len(groups) >= len(shares):
        wanted = np.maximum(wanted, 1)
    else:  # the first parts first
        wanted = np.array([int(place < len(groups)) for place in range(len(shares))])
    while wanted.sum() > count:
        wanted[np.argmax(wanted)] -= 1
    while wanted.sum() < count:
        wanted[np.argmax(exact - wanted)] += 1
    owed = exact - wanted if len(groups) >= len(shares) else carry
    return wanted, owed


def _deal(groups: list[list[int]], wanted: np.ndarray) -> list[list[int]]:
    """Groups, the largest first, each to the part that lacks most; the last ones to parts that are still empty."""
    rows: list[list[int]] = [[] for _ in wanted]
    for number, group in enumerate(groups):
        empty = [place for place in range(len(wanted)) if not rows[place]]
        if len(groups) - number <= len(empty):
            place = empty[0]
        else:
            place = int(np.argmax([want - len(own) for want, own in zip(wanted, rows, strict=True)]))
        rows[place] += group
    return rows


def _say_scarce(of_label: Mapping[Hashable, list[list[int]]], parts: list[str]) -> None:
    scarce = {label: len(groups) for label, groups in of_label.items() if len(groups) < len(parts)}
    if scarce:
        label, count = min(scarce.items(), key=lambda entry: (entry[1], str(entry[0])))
        logger.warning(
            f"{len(scarce)} of {len(of_label)} labels have fewer different rows than the split has parts (first: "
            f"{str(label)!r} with {count}): they are put into {', then '.join(parts)}, as far as they go"
        )
