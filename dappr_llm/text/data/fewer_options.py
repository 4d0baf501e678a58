"""Items with fewer options, so that tasks of five options can be compared with tasks of four."""

from __future__ import annotations

import hashlib
from typing import Any

from .tasks import ItemRows, most_options


def with_matched_options(rows: Any, first: Any) -> Any:
    """Rows with no more options than those of another task offer; fixed labels and images are left as they are."""
    if not all(isinstance(each, ItemRows) and each.labels is None for each in (rows, first)):
        return rows
    return fewer_options(rows, most_options(first))


def fewer_options(rows: ItemRows, most: int) -> ItemRows:
    """
    The same items with at most `most` options; the right one stays, and all others keep their order.

    Which wrong options are left out is decided by a hash of the item's id: the same in every run and for any number
    of rows.

    Args:
        rows (`ItemRows`):
            The items. Fixed labels are left as they are.
        most (`int`):
            At least 2.
    """
    if rows.labels is not None:
        return rows
    found = ItemRows(
        row if len(row["options"]) <= most else {**row, **_kept(row["id"], row["options"], row["label"], most)}
        for row in rows
    )
    found.labels = rows.labels
    return found


def _kept(name: str, options: tuple[str, ...], label: int, most: int) -> dict[str, object]:
    def order(place: int) -> tuple[bool, bytes]:
        return place != label, hashlib.sha256(f"{name}\n{place}".encode()).digest()

    kept = sorted(sorted(range(len(options)), key=order)[:most])
    return {"options": tuple(options[place] for place in kept), "label": kept.index(label) if label >= 0 else label}
