"""
Detectors that never see a model: what part of an OOD figure is length, form and words.

All are two-sided: what is unusual among the ID items counts as foreign, whether it is longer or shorter, and nothing
is learnt from OOD items. Lengths and numbers of options come from the prediction tables; the last character and the
words from the items' texts, where these are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .metric_columns import TRIVIAL_READINGS
from .prediction_table import PredictionTable

if TYPE_CHECKING:
    from .item_texts import ItemText

MOST_REFERENCES = 20_000  # texts among which a nearest neighbour is looked for
_MARKS = ("?", "\uff1f", "\u061f")  # also those of Chinese and Arabic
_CHUNK = 256  # rows whose distances to all references are held at once
Sides = tuple[np.ndarray, np.ndarray]  # uncertainties [N] of the ID items and [M] of the OOD items
TrivialSides = Mapping[str, Mapping[str, Sides]]  # by OOD task and suffix of the key
Texts = Mapping[str, "ItemText"]  # by id


def trivial_sides(
    id_table: PredictionTable,
    ood_tables: Mapping[str, PredictionTable],
    texts: Mapping[str, Texts] | None = None,
    id_name: str = "",
) -> dict[str, dict[str, Sides]]:
    """
    Scores of the trivial detectors for both sides, by OOD task and by the suffix of their keys.

    Args:
        id_table ([`PredictionTable`]): Predictions for the ID task.
        ood_tables (`Mapping[str, PredictionTable]`): Predictions for the other tasks, by name.
        texts (`Mapping`, *optional*): The items' texts by task and id; tasks may be missing.
        id_name (`str`, *optional*): The ID task's name in `texts`.

    The nearest neighbour is looked for among the training rows, if the tables hold their `text_distance`. Otherwise
    among half of the ID items: each ID item is compared with the half that it is not in, and OOD items are dealt out
    to the halves.
    """
    own = _ordered(id_table, (texts or {}).get(id_name))
    known = {task: _ordered(table, (texts or {}).get(task)) for task, table in ood_tables.items()}
    found: dict[str, dict[str, Sides]] = {}
    for task, table in ood_tables.items():
        found[task] = _of_tables(id_table, table)
        other = known[task]
        if own is not None and other is not None:
            marks = [np.array([item.question.rstrip().endswith(_MARKS) for item in side]) for side in (own, other)]
            found[task]["question_mark"] = _rarity(*marks)
        if id_table.text_distance is not None and table.text_distance is not None:
            found[task]["tfidf"] = (id_table.text_distance, table.text_distance)
    left = {task: items for task, items in known.items() if items is not None and "tfidf" not in found[task]}
    if own is not None and len(own) >= 4:
        for task, sides in _to_other_half(own, left).items():
            found[task]["tfidf"] = sides
    order = [suffix.removeprefix("_trivial_") for suffix in TRIVIAL_READINGS]
    return {task: {f"_trivial_{n}": sides[n] for n in order if n in sides} for task, sides in found.items()}


def _of_tables(id_table: PredictionTable, ood_table: PredictionTable) -> dict[str, Sides]:
    found: dict[str, Sides] = {}
    for name, array in (("length", "lengths"), ("option_length", "option_lengths")):
        one, other = getattr(id_table, array), getattr(ood_table, array)
        if one is not None and other is not None and len(one) and (one.any() or other.any()):
            found[name] = _distance(one, other)
    if len({*id_table.num_options.tolist(), *ood_table.num_options.tolist()}) > 1:
        found["options"] = _rarity(id_table.num_options, ood_table.num_options)
    return found


def _distance(one: np.ndarray, other: np.ndarray) -> Sides:
    """The distance from the median of the ID items."""
    middle = np.median(one)
    return np.abs(one - middle), np.abs(other - middle)


def _rarity(one: np.ndarray, other: np.ndarray) -> Sides:
    """Minus the share of the ID items that have the same value."""
    values, counts = np.unique(one, return_counts=True)
    share = dict(zip(values.tolist(), (counts / max(1, len(one))).tolist(), strict=True))
    of_one, of_other = (-np.array([share.get(value, 0.0) for value in side.tolist()]) for side in (one, other))
    return of_one, of_other


def _ordered(table: PredictionTable, texts: Texts | None) -> list[ItemText] | None:
    """The texts of a table's items in its order; `None` unless all are known."""
    if not texts or not len(table) or any(name not in texts for name in table.ids.tolist()):
        return None
    return [texts[name] for name in table.ids.tolist()]


# --- nearest neighbours -------------------------------------------------------------------------------------------


def add_text_distances(train: Any, tables: Sequence[PredictionTable], rows: Sequence[Any]) -> None:
    """
    Fill `text_distance` of tables from the training rows' texts; nothing is filled where rows have no texts.

    Args:
        train: The training rows; with the column `question`, and `options` unless labels are fixed.
        tables (`Sequence[PredictionTable]`): Tables of one model.
        rows (`Sequence`): The rows of each table, in its order.
    """
    known = [_items(each) for each in (train, *rows)]
    if not known[0] or any(items is None for items in known):
        return
    reference, *sets = (items or [] for items in known)
    for table, distances in zip(tables, text_distances(reference, *sets), strict=True):
        table.text_distance = distances.astype(np.float32)


def _items(rows: Any) -> list[ItemText] | None:
    if "question" not in (getattr(rows, "column_names", None) or ()) or not hasattr(rows, "__len__"):
        return None
    from .item_texts import ItemText, options_of

    options = options_of(rows) or [()] * len(rows)
    return [ItemText(str(q), tuple(o)) for q, o in zip(rows["question"], options, strict=True)]


def text_distances(train: Sequence[ItemText], *sets: Sequence[ItemText]) -> list[np.ndarray]:
    """
    Distances of items to the nearest training row, for `PredictionTable.text_distance`.

    Args:
        train (`Sequence[ItemText]`): The training rows; of more than 20,000, a random choice.
        sets (`Sequence[ItemText]`): The items of each table.
    """
    fixed = _fixed(train)
    chosen = _words(train, fixed)
    if len(chosen) > MOST_REFERENCES:
        rows = np.sort(np.random.default_rng(0).choice(len(chosen), MOST_REFERENCES, replace=False))
        chosen = [chosen[row] for row in rows]
    near = _Neighbours(chosen)
    return [near.distances(_words(items, fixed)) for items in sets]


def _to_other_half(own: list[ItemText], others: Mapping[str, list[ItemText]]) -> dict[str, Sides]:
    """Distances to the nearest text of a half of the ID items, by OOD task; no item is compared with itself."""
    fixed = _fixed(own)
    mine = _words(own, fixed)
    half = np.random.default_rng(0).permutation(len(mine)) % 2
    halves = [_Neighbours([mine[i] for i in np.flatnonzero(half == side)][:MOST_REFERENCES]) for side in (0, 1)]
    id_side = np.zeros(len(mine))
    for side in (0, 1):
        rows = np.flatnonzero(half != side)
        id_side[rows] = halves[side].distances([mine[i] for i in rows])
    found = {}
    for task, items in others.items():
        texts = _words(items, fixed)
        ood_side = np.zeros(len(texts))
        for side in (0, 1):
            ood_side[side::2] = halves[side].distances(texts[side::2])
        found[task] = (id_side, ood_side)
    return found


def _fixed(items: Sequence[ItemText]) -> bool:
    """Whether all items share their options, which then say nothing."""
    return len({item.options for item in items}) <= 1


def _words(items: Sequence[ItemText], fixed: bool) -> list[str]:
    return [item.question if fixed else " ".join([item.question, *item.options]) for item in items]


class _Neighbours:
    """Cosine distances of TF-IDF vectors to the nearest of some texts."""

    def __init__(self, texts: Sequence[str]):
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.neighbors import NearestNeighbors

        self.vectorizer = TfidfVectorizer(sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
        try:
            vectors = self.vectorizer.fit_transform(texts)
        except ValueError:  # no words at all
            self.search = None
            return
        self.search = NearestNeighbors(n_neighbors=1, metric="cosine", algorithm="brute").fit(vectors)

    def distances(self, texts: Sequence[str]) -> np.ndarray:
        """Of each text to the nearest reference, 0 to 1, `[N]`."""
        if self.search is None or not texts:
            return np.ones(len(texts))
        vectors = self.vectorizer.transform(texts)
        parts = [self.search.kneighbors(vectors[i : i + _CHUNK])[0][:, 0] for i in range(0, len(texts), _CHUNK)]
        return np.concatenate(parts).round(9)  # rounding errors are no order
