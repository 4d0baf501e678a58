"""Every metric is declared once, and one declaration with one function is all that a new metric takes."""

import math
from pathlib import Path

import numpy as np
import pytest
from random_tables import make_table
from sklearn.metrics import f1_score

from dappr_llm.evaluation import (
    bootstrap_metrics,
    calibration_metrics,
    classification_metrics,
    evaluators,
    metric_columns,
)
from dappr_llm.evaluation.bootstrap import bootstrap
from dappr_llm.evaluation.evaluators import evaluate_id, evaluate_tables
from dappr_llm.evaluation.metric_columns import ANSWERS, METRICS, Metric, columns, detection_columns, find
from dappr_llm.evaluation.prediction_table import PredictionTable

ROOT = Path(__file__).resolve().parents[2]


def test_every_result_is_declared_and_every_declaration_is_a_result():
    reference, other = make_table(60), make_table(40, seed=1, task="x")
    reference.lengths, other.lengths = np.arange(60), np.arange(40)
    results = evaluate_tables(reference, {"x": other})
    undeclared = {key for key in results if find(key) is None}
    assert undeclared == {
        "id/n_unlabelled", "id/options/4", "ood/x/n_unlabelled", "ood/x/options/4",
    }  # fmt: skip
    found = {find(key)[0].key for key in results if key not in undeclared}
    assert found == {metric.key for metric in METRICS} and len(found) == len(METRICS)
    intervals = bootstrap(reference, {"x": other}, resamples=5)
    assert set(intervals) == {key for key in results if find(key) and find(key)[0].estimate}


def test_every_declared_function_exists_where_it_is_declared():
    for metric in ANSWERS:
        module, name = metric.function.split(".")
        function = evaluators.function_of(metric)
        assert function.__name__ == name and function.__module__ == f"dappr_llm.evaluation.{module}"


def test_every_metric_is_documented():
    text = (ROOT / "docs" / "evaluation.md").read_text()
    assert not [metric.key for metric in METRICS if metric.key != "n" and f"`{metric.key}`" not in text]


def test_headers_name_the_reading_only_where_there_are_two():
    two = [column.header for column in detection_columns(headline=True)]
    assert two[:2] == ["AUROC matched", "AUROC published"] and "FPR95 published" in two
    assert [column.header for column in detection_columns(True, one_reading=True)] == ["AUROC", "AUPR", "FPR95"]
    assert [column.header for column in detection_columns(False)] == [
        "AUPR, OOD positive", "AUPR, OOD positive, published",
    ]  # fmt: skip
    with pytest.raises(KeyError, match="acuracy"):
        columns(["acuracy"])


def test_lower_is_better_where_the_best_model_is_chosen():
    lower = metric_columns.LOWER_IS_BETTER
    assert {"nll", "brier", "ece", "mce", "aurc", "risk_at_coverage_80", "fpr95"} <= lower
    assert not lower & {"accuracy", "macro_f1", "conf_auroc", "coverage_at_risk_5", "auroc", "ece_floor", "n"}


@pytest.mark.parametrize("seed", range(6))
def test_macro_f1_is_scikit_learns(seed):
    options = 2 + 3 * seed
    table = make_table(80, seed=seed, options=options, mixed=seed % 2 == 1, unlabelled=seed)
    known = table.labels >= 0
    predicted = table.reading("own").probs[known].argmax(axis=1)
    expected = f1_score(table.labels[known], predicted, average="macro")
    assert evaluate_id(table)["macro_f1"] == pytest.approx(expected, abs=1e-12)


def test_macro_f1_in_corner_cases():
    probs = np.array([[0.9, 0.1, 0.0], [0.8, 0.2, 0.0], [0.3, 0.7, 0.0]])
    # The third class occurs nowhere and does not count; the second is predicted but never right.
    assert classification_metrics.macro_f1(probs, np.array([0, 0, 0])) == pytest.approx((4 / 5 + 0) / 2)
    assert classification_metrics.macro_f1(probs, np.array([0, 0, 1])) == 1
    # A row with NaN predicts nothing: a miss of its label, and no false alarm of another class.
    broken = np.vstack([probs, np.full((1, 3), np.nan)])
    assert classification_metrics.macro_f1(broken, np.array([0, 0, 1, 1])) == pytest.approx((1 + 2 / 3) / 2)
    assert math.isnan(classification_metrics.macro_f1(probs[:0], np.array([], dtype=int)))


def test_weights_of_macro_f1_stand_for_repeated_rows():
    rng = np.random.default_rng(0)
    table = make_table(50, options=5, mixed=True)
    probs, weights = table.reading("own").probs, rng.multinomial(50, np.full(50, 1 / 50), size=20).astype(float)
    found = classification_metrics.macro_f1(probs, table.labels, weights=weights)
    for number, counts in enumerate(weights):
        rows = np.repeat(np.arange(50), counts.astype(int))
        expected = f1_score(table.labels[rows], probs[rows].argmax(axis=1), average="macro")
        assert found[number] == pytest.approx(expected, abs=1e-12)
    assert np.isnan(classification_metrics.macro_f1(probs, table.labels, weights=np.zeros((1, 50)))).all()


def test_one_entry_and_one_function_make_a_metric(monkeypatch):
    """A function that knows nothing of weights: the bootstrap repeats rows for it."""
    entry = Metric(
        "sure_share",
        "sure",
        "Share of answers above 0.5",
        function="calibration_metrics.sure_share",
        inputs=("confidence",),
    )
    for module in (evaluators, bootstrap_metrics):
        monkeypatch.setattr(module, "ANSWERS", (*ANSWERS, entry))
    monkeypatch.setitem(metric_columns.BY_KEY, entry.key, entry)
    monkeypatch.setattr(
        calibration_metrics, "sure_share", lambda confidence: float((confidence > 0.5).mean()), raising=False
    )
    table = make_table(90, unlabelled=5)
    results = evaluate_tables(table, {})
    assert results["id/sure_share"] == (table.reading("own").probs[5:].max(axis=1) > 0.5).mean()
    answers = bootstrap_metrics.Answers(table, (*ANSWERS, entry))
    weights = np.random.default_rng(1).multinomial(90, np.full(90, 1 / 90), size=7).astype(float)
    sure = table.reading("own").probs[5:].max(axis=1) > 0.5
    np.testing.assert_allclose(answers(weights)["sure_share"], weights[:, 5:] @ sure / weights[:, 5:].sum(axis=1))


def test_a_single_class_has_no_undefined_macro_f1():
    table = PredictionTable.from_arrays(["a", "b"], [0, 0], np.array([[0.9, 0.1], [0.8, 0.2]]))
    assert evaluate_id(table)["macro_f1"] == 1
    assert bootstrap(table, {}, resamples=20)["id/macro_f1"] == (1, 1)
