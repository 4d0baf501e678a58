"""
What costs nothing: the baselines that a fine-tuned model has to beat, on the same test rows.

Fixed classes: the majority class, TF-IDF + logistic regression, and, where the caller hands in hidden states of the
frozen base model, these + logistic regression. Multiple choice: the most frequent letter, the longest option, and
TF-IDF of question and options. Each baseline is a [`PredictionTable`] of the run's own test rows, so every metric,
interval and paired difference works on it. All of them see training rows only, and the same rows give the same tables.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import UserError
from .item_texts import ItemText
from .prediction_table import PredictionTable

if TYPE_CHECKING:
    from scipy.sparse import csr_array

# Time grows with rows x classes: these keep a baseline at some seconds of one core.
_MOST_ROWS, _FEWEST_ROWS, _MOST_CELLS = 20_000, 4_000, 3_000_000
_MOST_FEATURES, _MOST_WEIGHTS = 20_000, 2_000_000
_SEARCH_ROWS = 1_000
_FOLDS = 3
_ITERATIONS = 60
# Inverse strengths of the penalty: TF-IDF rows have length 1, standardised features a length of sqrt(D).
_C_TEXT, _C_FEATURES = (1.0, 10.0, 100.0), (0.001, 0.01, 0.1, 1.0)


@dataclass
class Baselines:
    """
    Baselines of one run.

    Args:
        tables (`dict[str, PredictionTable]`): Predictions by name of the baseline, for the run's test rows. Tables
            from elsewhere, such as those of the same model before training (`"zero_shot"`), may be added.
        skipped (`dict[str, str]`): Why a baseline could not be made, by name.
    """

    tables: dict[str, PredictionTable] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ClassRows:
    """
    Rows of fixed classes: labels `[N]`, and what a baseline may look at.

    Args:
        labels (`np.ndarray` of shape `[N]`): Classes; rows of unknown label (-1) are not trained on.
        texts (`Sequence[str]`, *optional*): One text per row.
        features (`np.ndarray` of shape `[N, D]`, *optional*): Hidden states of the frozen base model.
    """

    labels: np.ndarray
    texts: Sequence[str] | None = None
    features: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("texts", "features"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.labels):
                raise UserError(f"The baselines were given {len(self.labels)} labels but {len(values)} {name}.")

    def take(self, rows: np.ndarray) -> ClassRows:
        """The rows with these indices."""
        texts = None if self.texts is None else [self.texts[i] for i in rows]
        return ClassRows(self.labels[rows], texts, None if self.features is None else self.features[rows])


@dataclass(frozen=True)
class ChoiceRows:
    """Multiple-choice rows: their labels `[N]` (-1: unknown), questions and options."""

    labels: np.ndarray
    items: Sequence[ItemText]


def class_baselines(table: PredictionTable, train: ClassRows, test: ClassRows, seed: int = 0) -> Baselines:
    """
    Baselines for fixed classes.

    Args:
        table ([`PredictionTable`]): The run's predictions for the test rows, which give ids, labels and meta data.
        train, test ([`ClassRows`]): Rows with the same kinds of inputs; `test` in the order of the table.
        seed (`int`, *optional*, defaults to 0): Which training rows are kept where there are too many.
    """
    if len(test.labels) != len(table):
        raise UserError(f"The baselines were given {len(test.labels)} test rows for a table of {len(table)}.")
    train = train.take(np.flatnonzero(np.asarray(train.labels) >= 0))
    found, total, classes = Baselines(), len(train.labels), int(table.num_options.max(initial=2))
    if not total:
        return Baselines(skipped=dict.fromkeys(("majority", "tfidf", "features"), "no labelled training rows"))
    if train.labels.max() >= classes:
        raise UserError(f"The baselines were given the label {train.labels.max()}, but there are {classes} classes.")
    counts = np.bincount(train.labels, minlength=classes)
    found.tables["majority"] = _table(table, np.tile(_smoothed(counts), (len(table), 1)), {"rows": total})
    kept = train.take(stratified_sample(train.labels, _most_rows(classes), seed))
    facts = {"rows": len(kept.labels), "of": total}
    for name, inputs, fit in (("tfidf", "texts", _fit_texts), ("features", "features", _fit_features)):
        if getattr(train, inputs) is None or getattr(test, inputs) is None:
            continue
        if len(np.unique(kept.labels)) < 2:
            found.skipped[name] = "the training rows hold one class only"
            continue
        probs, chosen = fit(kept, test, classes)
        if probs is None:
            found.skipped[name] = "no training row holds a word"
            continue
        found.tables[name] = _table(table, probs, {**facts, "C": chosen})
    return found


def choice_baselines(table: PredictionTable, train: ChoiceRows, test: ChoiceRows, seed: int = 0) -> Baselines:
    """
    Baselines for multiple choice: `majority_letter`, `longest_option` and `tfidf_options`.

    Args:
        table, seed: As in [`class_baselines`].
        train, test ([`ChoiceRows`]): Items; `test` in the order of the table.
    """
    if len(test.items) != len(table) or len(train.items) != len(train.labels):
        raise UserError("The baselines were given items that do not belong to their labels or to the table.")
    known = np.flatnonzero(np.asarray(train.labels) >= 0)
    found = Baselines()
    if not len(known):
        return Baselines(skipped=dict.fromkeys(("majority_letter", "longest_option"), "no labelled training rows"))
    known = known[stratified_sample(train.labels[known], _MOST_ROWS // 4, seed)]
    items, labels, width = [train.items[i] for i in known], np.asarray(train.labels)[known], table.width
    facts = {"rows": len(items), "of": int((train.labels >= 0).sum())}
    counts = np.bincount(labels, minlength=width)[:width]
    found.tables["majority_letter"] = _table(table, np.tile(_smoothed(counts), (len(table), 1)), facts)

    hits = np.mean([longest(item) == label for item, label in zip(items, labels, strict=True)])
    probs = np.zeros((len(table), width))
    for row, item in enumerate(test.items):
        size = len(item.options)
        # As sure as it was right in training, but never so unsure that another option is preferred.
        sure = max((hits * len(items) + 1) / (len(items) + 2), 1 / size + 0.001)
        probs[row, :size] = (1 - sure) / (size - 1)
        probs[row, longest(item)] = sure
    found.tables["longest_option"] = _table(table, probs, facts)
    scores = _option_scores(items, labels, test.items)
    if scores is None:
        found.skipped["tfidf_options"] = "no option holds a word, or none is wrong"
        return found
    for row, values in enumerate(scores):
        probs[row] = 0
        odds = np.exp(values - values.max())
        probs[row, : len(odds)] = odds / odds.sum()
    found.tables["tfidf_options"] = _table(table, probs, facts)
    return found


def longest(item: ItemText) -> int:
    """The option with the most characters, the first of several."""
    return int(np.argmax([len(option) for option in item.options]))


def _most_rows(classes: int) -> int:
    return max(_FEWEST_ROWS, min(_MOST_ROWS, _MOST_CELLS // classes))


def _smoothed(counts: np.ndarray) -> np.ndarray:
    """Shares of counts, each plus one: a class without training rows is unlikely, not impossible."""
    return (counts + 1) / (counts.sum() + len(counts))


def stratified_sample(labels: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Indices of at most `most` rows in their order: the same share of every class, and at least one row of each."""
    if len(labels) <= most:
        return np.arange(len(labels))
    order = np.random.default_rng(seed).permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    starts = np.r_[0, np.flatnonzero(np.diff(labels[by_class])) + 1]
    lengths = np.diff(np.r_[starts, len(labels)])
    rank = np.arange(len(labels)) - np.repeat(starts, lengths)  # of each row within its class
    share = (rank + 1) / np.repeat(lengths, lengths)
    chosen = np.lexsort((share, rank > 0))[:most]
    return np.sort(by_class[chosen])


def _table(table: PredictionTable, probs: np.ndarray, facts: dict[str, Any]) -> PredictionTable:
    """A baseline's table for the rows of the run's own."""
    wide = np.zeros((len(table), table.width))
    wide[:, : probs.shape[1]] = probs
    kept = ("task", "split", "modality", "num_choices", "task_num_choices", "class_names")
    meta = {name: table.meta[name] for name in kept if name in table.meta}
    return PredictionTable.from_arrays(
        table.ids, table.labels, wide, num_options=table.num_options, meta={**meta, "baseline": facts}
    )


# --- logistic regression --------------------------------------------------------------------------------------------


def _fit_texts(train: ClassRows, test: ClassRows, classes: int) -> tuple[np.ndarray | None, float]:
    most = max(500, min(_MOST_FEATURES, _MOST_WEIGHTS // classes))

    def inputs(fitted: ClassRows, other: ClassRows) -> tuple[Any, Any] | None:
        return _tfidf(list(fitted.texts or ()), list(other.texts or ()), most)

    return _fit(inputs, train, test, classes, _C_TEXT)


def _fit_features(train: ClassRows, test: ClassRows, classes: int) -> tuple[np.ndarray | None, float]:
    def inputs(fitted: ClassRows, other: ClassRows) -> tuple[Any, Any]:
        from sklearn.preprocessing import StandardScaler

        scaler = StandardScaler().fit(np.asarray(fitted.features, dtype=np.float64))
        return scaler.transform(fitted.features), scaler.transform(other.features)

    return _fit(inputs, train, test, classes, _C_FEATURES)


_Inputs = Callable[[ClassRows, ClassRows], tuple[Any, Any] | None]


def _fit(
    inputs: _Inputs, train: ClassRows, test: ClassRows, classes: int, strengths: Sequence[float]
) -> tuple[np.ndarray | None, float]:
    """Probabilities `[N, K]` of the test rows by logistic regression, and the C chosen; `None` without any input."""
    chosen = _search(inputs, train, classes, strengths)
    made = inputs(train, test)
    if made is None:
        return None, chosen
    return _probs(made[0], train.labels, made[1], classes, chosen), chosen


def _search(inputs: _Inputs, train: ClassRows, classes: int, strengths: Sequence[float]) -> float:
    """The C of best balanced accuracy in cross-validation over training rows; among equals, of least NLL."""
    from sklearn.model_selection import StratifiedKFold

    from .classification_metrics import balanced_accuracy, nll

    rows = train.take(stratified_sample(train.labels, _SEARCH_ROWS, 0))
    folds = min(_FOLDS, int(np.bincount(rows.labels).max()))
    if folds < 2 or len(rows.labels) < 2 * folds:
        return strengths[len(strengths) // 2]
    scores = np.zeros((len(strengths), 2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The least populated class")  # rare classes are not in every fold
        parts = list(StratifiedKFold(folds, shuffle=True, random_state=0).split(rows.labels, rows.labels))
    for inside, outside in parts:
        fitted, held_out = rows.take(inside), rows.take(outside)
        made = inputs(fitted, held_out)
        if made is None or len(np.unique(fitted.labels)) < 2:
            continue
        for i, strength in enumerate(strengths):
            probs = _probs(made[0], fitted.labels, made[1], classes, strength)
            scores[i] += balanced_accuracy(probs, held_out.labels), -nll(probs, held_out.labels)
    best = max(range(len(strengths)), key=lambda i: (round(scores[i, 0], 9), scores[i, 1]))
    return strengths[best]


def _probs(inputs: Any, labels: np.ndarray, others: Any, classes: int, strength: float) -> np.ndarray:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    # The gradient of the mean loss is smaller with more classes; scikit-learn's tolerance does not know that.
    model = LogisticRegression(C=strength, max_iter=_ITERATIONS, tol=min(1e-3, 0.1 / classes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # stopped early, always at the same iteration
        warnings.filterwarnings("ignore", message="The number of unique classes")  # few rows of many classes
        model.fit(inputs, labels)
    found = np.zeros((others.shape[0], classes))
    found[:, model.classes_] = model.predict_proba(others)
    return found


def _tfidf(fitted: list[str], others: list[str], most: int) -> tuple[csr_array, csr_array] | None:
    """TF-IDF of word 1- and 2-grams and of character 2- to 4-grams; `None` if no text holds a character."""
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import TfidfVectorizer

    parts = []
    for options in (
        {"ngram_range": (1, 2), "token_pattern": r"(?u)\b\w+\b"},
        {"analyzer": "char_wb", "ngram_range": (2, 4)},
    ):
        vectoriser = TfidfVectorizer(sublinear_tf=True, max_features=most, dtype=np.float32, **options)
        try:
            parts.append((vectoriser.fit_transform(fitted), vectoriser.transform(others)))
        except ValueError:  # an empty vocabulary
            continue
    if not parts:
        return None
    return tuple(hstack([part[side] for part in parts], format="csr") for side in (0, 1))  # type: ignore[return-value]


def _option_scores(
    items: Sequence[ItemText], labels: np.ndarray, others: Sequence[ItemText]
) -> list[np.ndarray] | None:
    """
    One score per option of each of the other items, by logistic regression of right against wrong options.

    Inputs are the option's TF-IDF and its similarity with the question: words of the question itself are the same for
    all its options and could not tell them apart.
    """
    from scipy.sparse import csr_array, hstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    sides = [list(items), list(others)]
    questions = [[item.question for item in side for _ in item.options] for side in sides]
    options = [[option for item in side for option in item.options] for side in sides]
    right = np.concatenate([np.arange(len(i.options)) == label for i, label in zip(items, labels, strict=True)])
    vectoriser = TfidfVectorizer(sublinear_tf=True, max_features=_MOST_FEATURES, token_pattern=r"(?u)\b\w+\b")
    try:
        vectoriser.fit(questions[0] + options[0])
    except ValueError:  # an empty vocabulary
        return None
    if right.all() or not right.any():
        return None
    made = []
    for question, option in zip(questions, options, strict=True):
        one, other = vectoriser.transform(question), vectoriser.transform(option)
        similar = np.asarray(one.multiply(other).sum(axis=1)).reshape(-1, 1)
        made.append(hstack([other, csr_array(similar)], format="csr"))
    scores = LogisticRegression(max_iter=_ITERATIONS).fit(made[0], right).decision_function(made[1])
    return np.split(scores, np.cumsum([len(item.options) for item in others])[:-1])
