import numpy as np
import pytest
from sklearn import metrics as sk

from dappr_llm import metrics

CONFIDENCE = np.array([0.95, 0.80, 0.72, 0.65, 0.55, 0.50])
CORRECT = np.array([1, 1, 0, 1, 0, 1], dtype=bool)


def random_rows(rows, options, seed):
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(options), size=rows), rng.integers(options, size=rows)


def test_golden_confidence():
    assert metrics.confidence_aupr(CORRECT, 1 - CONFIDENCE) == pytest.approx(0.854167, abs=1e-6)
    assert metrics.auroc(CORRECT, CONFIDENCE) == pytest.approx(0.625)
    assert metrics.ece(CONFIDENCE, CORRECT) == pytest.approx(0.395)


def test_golden_ood():
    scores = metrics.ood_scores(np.array([0.10, 0.20, 0.35, 0.60]), np.array([0.30, 0.55, 0.70]))
    assert scores == {"auroc": pytest.approx(0.75), "aupr": pytest.approx(0.854167, abs=1e-6)}


@pytest.mark.parametrize("options", [2, 3, 4, 10, 50])
def test_answers_agree_with_scikit_learn(options):
    probs, labels = random_rows(200, options, seed=options)
    classes = np.arange(options)
    assert metrics.accuracy(probs, labels) == pytest.approx(sk.accuracy_score(labels, probs.argmax(axis=1)))
    assert metrics.nll(probs, labels) == pytest.approx(sk.log_loss(labels, probs, labels=classes))
    by_option = [sk.brier_score_loss(labels == option, probs[:, option], pos_label=True) for option in classes]
    assert metrics.brier(probs, labels) == pytest.approx(sum(by_option))


@pytest.mark.parametrize("levels", [1, 2, 7, 10_000])
def test_rankings_agree_with_scikit_learn(levels):
    rng = np.random.default_rng(levels)
    positive = rng.random(300) < 0.3
    score = rng.integers(levels, size=300) / levels - 0.5
    assert metrics.aupr(positive, score) == pytest.approx(sk.average_precision_score(positive, score), abs=1e-12)
    assert metrics.auroc(positive, score) == pytest.approx(sk.roc_auc_score(positive, score), abs=1e-12)


def test_constant_score_is_chance():
    positive = np.array([1, 0, 0, 0])
    assert metrics.auroc(positive, np.zeros(4)) == 0.5
    assert metrics.aupr(positive, np.zeros(4)) == 0.25


def test_undefined_cases_are_nan():
    empty = np.array([])
    for metric in (metrics.aupr, metrics.auroc, metrics.confidence_aupr):
        for positive in ([], [1], [0], [1, 1], [0, 0]):
            assert np.isnan(metric(np.array(positive), np.arange(len(positive))))
    assert all(np.isnan(value) for value in metrics.ood_scores(np.array([0.5]), empty).values())
    assert all(np.isnan(value) for value in metrics.ood_scores(empty, empty).values())
    assert np.isnan(metrics.ece(empty, empty))
    for metric in (metrics.accuracy, metrics.nll, metrics.brier):
        assert np.isnan(metric(np.zeros((0, 4)), np.zeros(0, dtype=int)))


def test_one_row():
    probs, labels = np.array([[0.7, 0.3]]), np.array([1])
    assert metrics.accuracy(probs, labels) == 0
    assert metrics.nll(probs, labels) == pytest.approx(-np.log(0.3))
    assert metrics.brier(probs, labels) == pytest.approx(0.98)
    assert metrics.ece(np.array([0.7]), np.array([0])) == pytest.approx(0.7)


def test_nan_ranks_as_most_uncertain():
    good_id, good_ood = np.array([0.1, 0.2]), np.array([0.8, 0.9])
    assert metrics.ood_scores(good_id, np.append(good_ood, np.nan)) == {"auroc": 1, "aupr": 1}
    assert metrics.ood_scores(np.append(good_id, np.nan), good_ood)["auroc"] == pytest.approx(4 / 6)
    assert metrics.ood_scores(good_id, np.append(good_ood, np.inf))["auroc"] == 1


def test_nan_row_is_wrong_and_shows_in_the_loss():
    probs, labels = np.array([[np.nan, 0.5], [1, 0]]), np.array([0, 0])
    assert metrics.accuracy(probs, labels) == 0.5
    assert np.isnan(metrics.nll(probs, labels))
    assert np.isnan(metrics.ece(probs.max(axis=1), metrics.is_correct(probs, labels)))


def test_nll_is_clamped():
    assert metrics.nll(np.array([[1.0, 0.0]]), np.array([1])) == pytest.approx(-np.log(1e-10))


@pytest.mark.parametrize("labels", [[-1, 0], [0, 2], [0]])
def test_labels_outside_the_options_are_refused(labels):
    with pytest.raises(ValueError, match="labels"):
        metrics.nll(np.full((2, 2), 0.5), np.array(labels))


def test_bins_are_closed_on_the_left():
    # 0.5 opens the second of two bins; were it in the first, the two gaps there would cancel.
    assert metrics.ece(np.array([0.4, 0.5]), np.array([1, 0]), bins=2) == pytest.approx((0.6 + 0.5) / 2)
    count, _, _ = metrics.reliability_bins(np.array([0.4, 0.5]), np.array([1, 0]), bins=2)
    assert count.tolist() == [1, 1]


def test_full_confidence_has_its_own_bin_as_in_torchmetrics():
    confidence, correct = np.array([1.0, 0.95]), np.array([0, 1])
    assert metrics.ece(confidence, correct) == pytest.approx((1 + 0.05) / 2)
    count, mean, accuracy = metrics.reliability_bins(confidence, correct)
    assert len(count) == metrics.NUM_BINS == 15
    assert (count[-1], mean[-1], accuracy[-1]) == (2, pytest.approx(0.975), 0.5)
    assert metrics.ece(np.array([1 + 1e-7]), np.array([1])) == pytest.approx(0, abs=1e-6)


def test_reliability_bins_against_a_slow_reference():
    rng = np.random.default_rng(0)
    confidence = rng.random(500) * 0.6 + 0.3
    correct = rng.random(500) < confidence
    count, mean, accuracy = metrics.reliability_bins(confidence, correct)
    error = 0.0
    for index in range(15):
        inside = (confidence >= index / 15) & (confidence < (index + 1) / 15)
        assert count[index] == inside.sum()
        if inside.any():
            assert mean[index] == pytest.approx(confidence[inside].mean())
            assert accuracy[index] == pytest.approx(correct[inside].mean())
            error += inside.mean() * abs(confidence[inside].mean() - correct[inside].mean())
        else:
            assert np.isnan(mean[index]) and np.isnan(accuracy[index])
    assert metrics.ece(confidence, correct) == pytest.approx(error)
