"""The baselines that a run's own rows allow: which kind of rows they are, and what may be computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .item_texts import ItemText
from .prediction_table import PredictionTable
from .trivial_baselines import Baselines, ChoiceRows, ClassRows, choice_baselines, class_baselines

_ITEMS = {"question", "options", "label"}


def row_baselines(
    train: Any,
    test: Any,
    table: PredictionTable,
    features: tuple[np.ndarray, np.ndarray] | None = None,
    others: Mapping[str, PredictionTable] | None = None,
) -> Baselines:
    """
    Baselines of a run, from the rows that it was trained and tested on.

    Args:
        train, test: Rows of a text task (columns `question`, `options`, `label`) or of images (with `labels`).
        table ([`PredictionTable`]): The run's predictions for the test rows, in their order.
        features (`tuple[np.ndarray, np.ndarray]`, *optional*): Hidden states `[N, D]` of the frozen base model for the
            rows of `train` and of `test`; used where all rows offer the same classes.
        others (`Mapping[str, PredictionTable]`, *optional*): Further tables of the test rows by name, such as
            `"zero_shot"`.
    """
    if not (table.labels >= 0).any():
        return Baselines()
    if not hasattr(train, "__len__"):
        found = Baselines(skipped={"all": "the training rows are a stream"})
    elif _has_items(train) and _has_items(test):
        found = _text_baselines(train, test, table, features)
    elif hasattr(train, "labels") and hasattr(test, "labels"):
        one, other = (_class_rows(np.asarray(r.labels), None, features, i) for i, r in enumerate((train, test)))
        found = class_baselines(table, one, other)
    else:
        found = Baselines(skipped={"all": "the rows have neither texts nor labels that can be read"})
    found.tables |= others or {}
    return found


def _has_items(rows: Any) -> bool:
    return set(getattr(rows, "column_names", ())) >= _ITEMS


def _text_baselines(
    train: Any, test: Any, table: PredictionTable, features: tuple[np.ndarray, np.ndarray] | None
) -> Baselines:
    items = [
        [ItemText(str(q), tuple(o)) for q, o in zip(rows["question"], rows["options"], strict=True)]
        for rows in (train, test)
    ]
    labels = [np.asarray(rows["label"], dtype=np.int64) for rows in (train, test)]
    if len({item.options for side in items for item in side}) != 1:
        return choice_baselines(table, ChoiceRows(labels[0], items[0]), ChoiceRows(labels[1], items[1]))
    texts = [[item.question for item in side] for side in items]
    one, other = (_class_rows(labels[i], texts[i], features, i) for i in (0, 1))
    return class_baselines(table, one, other)


def _class_rows(
    labels: np.ndarray, texts: list[str] | None, features: tuple[np.ndarray, np.ndarray] | None, side: int
) -> ClassRows:
    return ClassRows(labels, texts, None if features is None else features[side])
