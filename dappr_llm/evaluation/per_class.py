"""
Metrics of each class and the confusion matrix, for tables whose rows all offer the same named classes.

Multiple-choice items bring options of their own: there the first option is no class, and nothing here applies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.terminal import printable
from . import calibration_metrics
from .bootstrap import wilson
from .classification_metrics import predicted_classes
from .evaluators import answer_rows
from .item_texts import ItemText
from .prediction_table import PredictionTable

_LONGEST_NAME = 200
_VALUES = ("precision", "recall", "f1", "confidence", "mean_prob", "ece")
ESTIMATED = ("precision", "recall", "f1")


@dataclass(frozen=True)
class ClassMetrics:
    """
    Metrics of K classes; NaN where undefined, such as the precision of a class that is never predicted.

    Args:
        names (`list[str]`): Names of the classes, each once.
        support, predicted (`np.ndarray` of shape `[K]`): Rows of each class, and rows that were given it.
        precision, recall, f1 (`np.ndarray` of shape `[K]`): As scikit-learn defines them.
        confidence (`np.ndarray` of shape `[K]`): Mean confidence of the rows that were given the class; a calibrated
            model has it equal to `precision`.
        mean_prob (`np.ndarray` of shape `[K]`): Mean probability of the class over all rows; a calibrated model has it
            equal to the class's share of the rows.
        ece (`np.ndarray` of shape `[K]`): Expected calibration error of the class's own probability, 15 bins.
        confusion (`np.ndarray` of shape `[K, K + 1]`): Rows by true and predicted class; the last column counts rows
            with NaN, which predict none.
        intervals (`dict[str, np.ndarray]`): Lower and upper bounds `[K, 2]` (95 %) of precision, recall and F1.
    """

    names: list[str]
    support: np.ndarray
    predicted: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    confidence: np.ndarray
    mean_prob: np.ndarray
    ece: np.ndarray
    confusion: np.ndarray
    intervals: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def miscalibrated(self) -> np.ndarray:
        """Mask `[K]`: the mean confidence lies outside the interval of the precision."""
        low, high = self.intervals["precision"].T
        return (self.confidence < low) | (self.confidence > high)

    @property
    def share(self) -> np.ndarray:
        """Share `[K]` of the rows that belong to each class."""
        return self.support / max(1, self.support.sum())

    def worst_first(self) -> np.ndarray:
        """Indices of the classes by F1 score, those that do not occur at all last."""
        return np.argsort(np.where(np.isnan(self.f1), np.inf, self.f1), kind="stable")

    def confused_pairs(self, most: int = 10) -> list[tuple[int, int, int]]:
        """The pairs (true class, predicted class, rows) with the most rows, at most `most`."""
        wrong = self.confusion[:, :-1].copy()
        np.fill_diagonal(wrong, 0)
        order = np.argsort(-wrong, axis=None, kind="stable")[:most]
        found = [(int(k // len(self)), int(k % len(self))) for k in order]
        return [(true, given, int(wrong[true, given])) for true, given in found if wrong[true, given]]

    def to_list(self) -> list[dict[str, Any]]:
        """One JSON-serialisable entry per class, with its row of the confusion matrix under `predicted_as`."""
        entries = []
        for k, name in enumerate(self.names):
            given = {self.names[j]: int(self.confusion[k, j]) for j in np.flatnonzero(self.confusion[k, :-1])}
            entry = {"name": name, "support": int(self.support[k]), "predicted": int(self.predicted[k])}
            entry |= {value: float(getattr(self, value)[k]) for value in _VALUES}
            entry["intervals"] = {value: [float(end) for end in self.intervals[value][k]] for value in ESTIMATED}
            entries.append({**entry, "predicted_as": given, "n_nan": int(self.confusion[k, -1])})
        return entries

    @classmethod
    def from_list(cls, entries: Sequence[Mapping[str, Any]]) -> ClassMetrics:
        """The reverse of [`~ClassMetrics.to_list`]."""
        names = [entry["name"] for entry in entries]
        place = {name: k for k, name in enumerate(names)}
        confusion = np.zeros((len(names), len(names) + 1), dtype=np.int64)
        for k, entry in enumerate(entries):
            for name, count in entry["predicted_as"].items():
                confusion[k, place[name]] = count
            confusion[k, -1] = entry["n_nan"]

        def column(values: Sequence[Any]) -> np.ndarray:
            return np.array(values, dtype=np.float64)  # null → NaN

        return cls(
            names,
            np.array([entry["support"] for entry in entries]),
            np.array([entry["predicted"] for entry in entries]),
            **{value: column([entry[value] for entry in entries]) for value in _VALUES},
            confusion=confusion,
            intervals={value: column([entry["intervals"][value] for entry in entries]) for value in ESTIMATED},
        )


def class_names(table: PredictionTable, texts: Mapping[str, ItemText] | None = None) -> list[str] | None:
    """
    Names of the classes that every row of a table offers; `None` if rows bring options of their own.

    Args:
        table ([`PredictionTable`]): The predictions; `meta["class_names"]` holds the names if the model knows them.
        texts (`Mapping[str, ItemText]`, *optional*): Item texts by id. Where all items have the same options in the
            same order, these are the classes.
    """
    counts = set(table.num_options.tolist())
    names = table.meta.get("class_names")
    if names is None and texts:
        found = {texts[str(i)].options if str(i) in texts else None for i in table.ids}
        options = found.pop() if len(found) == 1 else None
        # A single item always offers the same options as itself.
        names = list(options) if options is not None and len(table) > 1 else None
    if not isinstance(names, list) or counts != {len(names)} or not all(isinstance(name, str) for name in names):
        return None
    return _distinct([printable(name, one_line=True)[:_LONGEST_NAME] or "(empty)" for name in names])


def _distinct(names: list[str]) -> list[str]:
    """Names, with the number of the class behind those that occur twice."""
    return [f"{name} ({k})" if names.count(name) > 1 else name for k, name in enumerate(names)]


def class_metrics(table: PredictionTable, names: Sequence[str] | None = None) -> ClassMetrics | None:
    """
    Metrics of each class, over the rows of known label.

    Intervals are Wilson's. F1 = 2J / (1 + J) with J = TP / (TP + FP + FN), a proportion of the rows that have or are
    given the class, so its interval is that of J, transformed.

    Args:
        table ([`PredictionTable`]): The predictions.
        names (`Sequence[str]`, *optional*): From [`class_names`], which is asked without item texts by default.

    Returns:
        [`ClassMetrics`], or `None` if rows bring options of their own or no label is known.
    """
    names = class_names(table) if names is None else list(names)
    if names is None or not (table.labels >= 0).any():
        return None
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    rows, size = answer_rows(table), len(names)
    probs, labels = rows["probs"][:, :size].astype(np.float64), rows["labels"]
    given = predicted_classes(probs)
    precision, recall, f1, support = precision_recall_fscore_support(
        labels, given, labels=np.arange(size), zero_division=np.nan
    )
    confusion = confusion_matrix(labels, given, labels=np.arange(size + 1))[:-1]
    predicted, right = confusion[:, :-1].sum(axis=0), confusion.diagonal()
    valid = given < size
    sums = np.bincount(given[valid], rows["confidence"][valid], size)
    with np.errstate(invalid="ignore"):
        confidence = sums / predicted
    jaccard = np.stack(wilson(right, support + predicted - right), axis=1)
    return ClassMetrics(
        names=names,
        support=support.astype(np.int64),
        predicted=predicted,
        precision=precision,
        recall=recall,
        f1=f1,
        # float32 probabilities may sum to slightly more than 1
        confidence=confidence.clip(0, 1),
        mean_prob=probs[valid].mean(axis=0).clip(0, 1) if valid.any() else np.full(size, np.nan),
        ece=np.array([calibration_metrics.ece(probs[valid, k], labels[valid] == k) for k in range(size)]).clip(0, 1),
        confusion=confusion,
        intervals={
            "precision": np.stack(wilson(right, predicted), axis=1),
            "recall": np.stack(wilson(right, support), axis=1),
            "f1": 2 * jaccard / (1 + jaccard),
        },
    )
