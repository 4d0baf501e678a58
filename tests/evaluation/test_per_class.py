"""Metrics of each class: scikit-learn's values, honest intervals, and silence where classes mean nothing."""

import json
import math

import numpy as np
import pytest
from random_tables import make_table
from scipy.stats import binomtest
from sklearn.metrics import balanced_accuracy_score, classification_report, confusion_matrix

from dappr_llm.evaluation import calibration_metrics, classification_metrics
from dappr_llm.evaluation.bootstrap import bootstrap, wilson
from dappr_llm.evaluation.evaluators import evaluate_id
from dappr_llm.evaluation.item_texts import ItemText
from dappr_llm.evaluation.per_class import ClassMetrics, class_metrics, class_names
from dappr_llm.evaluation.prediction_table import PredictionTable
from dappr_llm.evaluation.results import to_json


def named_table(rows=400, classes=5, seed=0, unlabelled=0):
    table = make_table(rows, seed=seed, options=classes, unlabelled=unlabelled, sharp=40.0)
    table.meta["class_names"] = [f"class {k}" for k in range(classes)]
    return table


@pytest.mark.parametrize(("classes", "rows"), [(2, 80), (3, 200), (150, 900), (1000, 1500)])
def test_values_are_scikit_learns(classes, rows):
    table = named_table(rows, classes, seed=classes, unlabelled=3)
    labels, given = table.labels[3:], table.probs[3:].argmax(axis=1)
    found = class_metrics(table)
    report = classification_report(
        labels, given, labels=range(classes), target_names=found.names, output_dict=True, zero_division=np.nan
    )
    for k, name in enumerate(found.names):
        for key, value in (("precision", found.precision), ("recall", found.recall), ("f1-score", found.f1)):
            assert value[k] == pytest.approx(report[name][key], abs=1e-12, nan_ok=True)
        assert found.support[k] == report[name]["support"]
    np.testing.assert_array_equal(found.confusion[:, :-1], confusion_matrix(labels, given, labels=range(classes)))
    assert not found.confusion[:, -1].any()
    assert found.ece.mean() == pytest.approx(calibration_metrics.classwise_ece(table.probs[3:], labels), abs=1e-6)
    restored = ClassMetrics.from_list(json.loads(json.dumps(to_json(found.to_list()))))
    for name in ("support", "predicted", "precision", "recall", "f1", "confidence", "mean_prob", "ece", "confusion"):
        np.testing.assert_allclose(getattr(restored, name), getattr(found, name))
    np.testing.assert_allclose(restored.intervals["f1"], found.intervals["f1"])


@pytest.mark.filterwarnings("ignore:y_pred contains classes")
@pytest.mark.parametrize("classes", [2, 3, 150])
def test_balanced_accuracy_is_scikit_learns(classes):
    table = make_table(300, seed=classes, options=classes)
    expected = balanced_accuracy_score(table.labels, table.probs.argmax(axis=1))
    assert evaluate_id(table)["balanced_accuracy"] == pytest.approx(expected, abs=1e-12)
    low, high = bootstrap(table, {}, resamples=50)["id/balanced_accuracy"]
    assert low < high


@pytest.mark.filterwarnings("ignore:y_pred contains classes")
def test_weights_of_balanced_accuracy_stand_for_repeated_rows():
    table = make_table(50, options=5)
    weights = np.random.default_rng(0).multinomial(50, np.full(50, 1 / 50), size=20).astype(float)
    found = classification_metrics.balanced_accuracy(table.probs, table.labels, weights=weights)
    for number, counts in enumerate(weights):
        rows = np.repeat(np.arange(50), counts.astype(int))
        expected = balanced_accuracy_score(table.labels[rows], table.probs[rows].argmax(axis=1))
        assert found[number] == pytest.approx(expected, abs=1e-12)
    assert math.isnan(classification_metrics.balanced_accuracy(table.probs[:0], table.labels[:0]))


def test_a_class_that_never_occurs_is_undefined_and_one_never_predicted_has_no_precision():
    probs = np.array([[0.9, 0.1, 0, 0], [0.8, 0.2, 0, 0], [0.3, 0.7, 0, 0], [0.6, 0.4, 0, 0]])
    table = PredictionTable.from_arrays(list("abcd"), [0, 0, 1, 2], probs, meta={"class_names": list("wxyz")})
    found = class_metrics(table)
    assert found.support.tolist() == [2, 1, 1, 0] and found.predicted.tolist() == [3, 1, 0, 0]
    assert math.isnan(found.precision[2]) and found.recall[2] == 0 and found.f1[2] == 0
    assert math.isnan(found.precision[3]) and math.isnan(found.recall[3]) and math.isnan(found.f1[3])
    assert np.isnan(found.intervals["f1"][3]).all() and np.isnan(found.intervals["precision"][2]).all()
    assert found.worst_first().tolist() == [2, 0, 1, 3]
    assert found.confused_pairs() == [(2, 0, 1)]
    assert json.dumps(to_json(found.to_list()), allow_nan=False)


def test_a_row_with_nan_misses_its_class_and_predicts_none():
    probs = np.array([[0.9, 0.1], [0.2, 0.8], [np.nan, np.nan]])
    table = PredictionTable.from_arrays(
        list("abc"), [0, 1, 1], probs, meta={"class_names": ["x", "y"]}, allow_nan=True
    )
    found = class_metrics(table)
    assert found.recall.tolist() == [1, 0.5] and found.precision.tolist() == [1, 1]
    assert found.confusion.tolist() == [[1, 0, 0], [0, 1, 1]]
    assert np.isfinite(found.ece).all() and np.isfinite(found.mean_prob).all()


def test_intervals_are_wilsons_and_f1s_comes_from_a_proportion():
    found = class_metrics(named_table(60, 3))
    for k in range(3):
        right = int(found.confusion[k, k])
        for value, count in (("recall", found.support[k]), ("precision", found.predicted[k])):
            expected = binomtest(right, int(count)).proportion_ci(method="wilson")
            assert found.intervals[value][k] == pytest.approx((expected.low, expected.high), abs=1e-12)
        union = int(found.support[k] + found.predicted[k]) - right
        share = binomtest(right, union).proportion_ci(method="wilson")
        assert found.intervals["f1"][k] == pytest.approx([2 * j / (1 + j) for j in (share.low, share.high)])
        assert found.intervals["f1"][k][0] <= found.f1[k] <= found.intervals["f1"][k][1]


def test_f1_intervals_cover():
    """95 % intervals of a class of about 20 rows hold the true F1 nearly as often as they say; none has width 0."""
    rng = np.random.default_rng(0)
    joint = np.array([0.08, 0.02, 0.03, 0.87])  # TP, FN, FP, TN
    truth = 2 * joint[0] / (2 * joint[0] + joint[1] + joint[2])
    counts = rng.multinomial(200, joint, size=2000)
    low, high = (2 * end / (1 + end) for end in wilson(counts[:, 0], counts[:, :3].sum(axis=1)))
    assert 0.93 < ((low <= truth) & (truth <= high)).mean() < 0.97


def test_calibration_of_a_class():
    """A class whose confidence is far above its precision is named; one that is right as often as it says is not."""
    probs = np.tile([[0.9, 0.1]], (100, 1))
    probs[50:] = [0.2, 0.8]
    labels = np.r_[np.arange(50) % 2, (np.arange(50) % 5 > 0).astype(int)]
    found = class_metrics(
        PredictionTable.from_arrays([str(i) for i in range(100)], labels, probs, meta={"class_names": ["a", "b"]})
    )
    assert found.confidence == pytest.approx([0.9, 0.8]) and found.precision == pytest.approx([0.5, 0.8])
    assert found.miscalibrated.tolist() == [True, False]
    assert found.mean_prob == pytest.approx([0.55, 0.45]) and found.share == pytest.approx([0.35, 0.65])


def test_multiple_choice_has_no_classes():
    assert class_metrics(make_table(20)) is None  # no names
    assert class_metrics(make_table(0, options=3)) is None
    mixed = make_table(20, mixed=True)
    mixed.meta["class_names"] = list("abcd")
    assert class_metrics(mixed) is None
    unlabelled = named_table(10, 3, unlabelled=10)
    assert class_metrics(unlabelled) is None


def test_names_come_from_the_table_or_from_options_that_all_items_share():
    table = make_table(3, options=2)
    same = {str(i): ItemText("?", ("spam", "ham")) for i in table.ids}
    assert class_names(table, same) == ["spam", "ham"]
    assert class_names(table, same | {str(table.ids[1]): ItemText("?", ("ham", "spam"))}) is None
    assert class_names(table, {str(table.ids[0]): ItemText("?", ("spam", "ham"))}) is None
    table.meta["class_names"] = ["x\x1b[2J", "x\x1b[2J"]
    assert class_names(table) == ["x\\x1b[2J (0)", "x\\x1b[2J (1)"]
    table.meta["class_names"] = [["a", "b"], ["b", "a"]]  # an ensemble of models that disagree
    assert class_names(table) is None
