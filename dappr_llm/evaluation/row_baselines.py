"""The baselines that a run's own rows allow: which kind of rows they are, and what may be computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .item_texts import ItemText, options_of
from .prediction_table import PredictionTable
from .trivial_baselines import Baselines, ChoiceRows, ClassRows, choice_baselines, class_baselines

_ITEMS = {"question", "label"}


def row_baselines(
    train: Any,
    test: Any,
    table: PredictionTable,
    features: tuple[np.ndarray, np.ndarray] | None = None,
    others: Mapping[str, PredictionTable] | None = None,
    feature_rows: np.ndarray | None = None,
) -> Baselines:
    """
    Baselines of a run, from the rows that it was trained and tested on.

    Args:
        train, test: Rows of a text task (columns `question`, `options`, `label`) or of images (with `labels`).
        table ([`PredictionTable`]): The run's predictions for the test rows, in their order.
        features (`tuple[np.ndarray, np.ndarray]`, *optional*): Hidden states `[N, D]` of the frozen base model for the
            rows of `train` (or `feature_rows` of them) and of `test`; used where all rows offer the same classes.
        others (`Mapping[str, PredictionTable]`, *optional*): Further tables of the test rows by name, such as
            `"zero_shot"`.
        feature_rows (`np.ndarray`, *optional*): Indices of the training rows whose features are given; by default all.
    """
    if not (table.labels >= 0).any():
        return Baselines()
    if not hasattr(train, "__len__"):
        found = Baselines(skipped={"all": "the training rows are a stream"})
    elif _has_items(train) and _has_items(test):
        found = _text_baselines(train, test, table, features, feature_rows)
    elif hasattr(train, "labels") and hasattr(test, "labels"):
        labels = [np.asarray(rows.labels) for rows in (train, test)]
        found = _class_baselines(table, labels, None, features, feature_rows)
    else:
        found = Baselines(skipped={"all": "the rows have neither texts nor labels that can be read"})
    found.tables |= others or {}
    return found


def _has_items(rows: Any) -> bool:
    return set(getattr(rows, "column_names", None) or ()) >= _ITEMS and options_of(rows) is not None


def has_same_options(train: Any, test: Any) -> bool:
    """Whether all rows, of a text task, offer the same options: classes."""
    if not (_has_items(train) and _has_items(test)):
        return False
    return len({tuple(options) for rows in (train, test) for options in options_of(rows) or ()}) == 1


def _text_baselines(
    train: Any,
    test: Any,
    table: PredictionTable,
    features: tuple[np.ndarray, np.ndarray] | None,
    feature_rows: np.ndarray | None,
) -> Baselines:
    items = [
        [ItemText(str(q), tuple(o)) for q, o in zip(rows["question"], options_of(rows) or (), strict=True)]
        for rows in (train, test)
    ]
    labels = [np.asarray(rows["label"], dtype=np.int64) for rows in (train, test)]
    if len({item.options for side in items for item in side}) != 1:
        return choice_baselines(table, ChoiceRows(labels[0], items[0]), ChoiceRows(labels[1], items[1]))
    texts = [[item.question for item in side] for side in items]
    return _class_baselines(table, labels, texts, features, feature_rows)


def _class_baselines(
    table: PredictionTable,
    labels: list[np.ndarray],
    texts: list[list[str]] | None,
    features: tuple[np.ndarray, np.ndarray] | None,
    feature_rows: np.ndarray | None,
) -> Baselines:
    rows = [ClassRows(own, None if texts is None else texts[side]) for side, own in enumerate(labels)]
    found = class_baselines(table, rows[0], rows[1])
    if features is not None:
        kept = labels[0] if feature_rows is None else labels[0][feature_rows]
        more = class_baselines(table, ClassRows(kept, None, features[0]), ClassRows(labels[1], None, features[1]))
        del more.tables["majority"]
        for made in more.tables.values():
            made.meta["baseline"]["of"] = int((labels[0] >= 0).sum())
        found.tables |= more.tables
        found.skipped |= more.skipped
    return found
