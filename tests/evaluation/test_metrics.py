import numpy as np
import pytest
from sklearn import metrics as sk

from dappr_llm.evaluation import calibration_metrics, classification_metrics, ranking_metrics

CONFIDENCE = np.array([0.95, 0.80, 0.72, 0.65, 0.55, 0.50])
CORRECT = np.array([1, 1, 0, 1, 0, 1], dtype=bool)


def random_rows(rows, options, seed):
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(options), size=rows), rng.integers(options, size=rows)


def test_golden_confidence():
    assert ranking_metrics.confidence_aupr(CORRECT, 1 - CONFIDENCE) == pytest.approx(0.854167, abs=1e-6)
    assert ranking_metrics.auroc(CORRECT, CONFIDENCE) == pytest.approx(0.625)
    assert calibration_metrics.ece(CONFIDENCE, CORRECT) == pytest.approx(0.395)


def test_golden_ood():
    scores = ranking_metrics.ood_scores(np.array([0.10, 0.20, 0.35, 0.60]), np.array([0.30, 0.55, 0.70]))
    assert scores == {
        "auroc": pytest.approx(0.75),
        "aupr": pytest.approx(0.854167, abs=1e-6),
        "aupr_ood": pytest.approx(0.755556, abs=1e-6),
        "fpr95": pytest.approx(2 / 3),
    }


@pytest.mark.parametrize("options", [2, 3, 4, 10, 50])
def test_answers_agree_with_scikit_learn(options):
    probs, labels = random_rows(200, options, seed=options)
    classes = np.arange(options)
    assert classification_metrics.accuracy(probs, labels) == pytest.approx(
        sk.accuracy_score(labels, probs.argmax(axis=1))
    )
    assert classification_metrics.nll(probs, labels) == pytest.approx(sk.log_loss(labels, probs, labels=classes))
    by_option = [sk.brier_score_loss(labels == option, probs[:, option], pos_label=True) for option in classes]
    assert classification_metrics.brier(probs, labels) == pytest.approx(sum(by_option))


@pytest.mark.parametrize("levels", [1, 2, 7, 10_000])
def test_rankings_agree_with_scikit_learn(levels):
    rng = np.random.default_rng(levels)
    positive = rng.random(300) < 0.3
    score = rng.integers(levels, size=300) / levels - 0.5
    assert ranking_metrics.aupr(positive, score) == pytest.approx(
        sk.average_precision_score(positive, score), abs=1e-12
    )
    assert ranking_metrics.auroc(positive, score) == pytest.approx(sk.roc_auc_score(positive, score), abs=1e-12)


def test_constant_score_is_chance():
    positive = np.array([1, 0, 0, 0])
    assert ranking_metrics.auroc(positive, np.zeros(4)) == 0.5
    assert ranking_metrics.aupr(positive, np.zeros(4)) == 0.25


def test_undefined_cases_are_nan():
    empty = np.array([])
    for metric in (
        ranking_metrics.aupr,
        ranking_metrics.auroc,
        ranking_metrics.confidence_aupr,
        ranking_metrics.confidence_auroc,
        ranking_metrics.fpr_at_tpr,
    ):
        for positive in ([], [1], [0], [1, 1], [0, 0]):
            assert np.isnan(metric(np.array(positive), np.arange(len(positive))))
    assert all(np.isnan(value) for value in ranking_metrics.ood_scores(np.array([0.5]), empty).values())
    assert all(np.isnan(value) for value in ranking_metrics.ood_scores(empty, empty).values())
    for metric in (
        calibration_metrics.ece,
        calibration_metrics.mce,
        calibration_metrics.equal_mass_ece,
        ranking_metrics.aurc,
        ranking_metrics.excess_aurc,
        ranking_metrics.risk_at_coverage,
        ranking_metrics.coverage_at_risk,
    ):
        assert np.isnan(metric(empty, empty))
    assert np.isnan(calibration_metrics.ece_floor(empty))
    for metric in (
        classification_metrics.accuracy,
        classification_metrics.nll,
        classification_metrics.brier,
        calibration_metrics.classwise_ece,
    ):
        assert np.isnan(metric(np.zeros((0, 4)), np.zeros(0, dtype=int)))


def test_one_row():
    probs, labels = np.array([[0.7, 0.3]]), np.array([1])
    assert classification_metrics.accuracy(probs, labels) == 0
    assert classification_metrics.nll(probs, labels) == pytest.approx(-np.log(0.3))
    assert classification_metrics.brier(probs, labels) == pytest.approx(0.98)
    assert calibration_metrics.ece(np.array([0.7]), np.array([0])) == pytest.approx(0.7)


def test_nan_ranks_as_most_uncertain():
    good_id, good_ood = np.array([0.1, 0.2]), np.array([0.8, 0.9])
    best = {"auroc": 1, "aupr": 1, "aupr_ood": 1, "fpr95": 0}
    assert ranking_metrics.ood_scores(good_id, np.append(good_ood, np.nan)) == best
    assert ranking_metrics.ood_scores(np.append(good_id, np.nan), good_ood)["auroc"] == pytest.approx(4 / 6)
    assert ranking_metrics.ood_scores(good_id, np.append(good_ood, np.inf))["auroc"] == 1


def test_nan_row_is_wrong_and_shows_in_the_loss():
    probs, labels = np.array([[np.nan, 0.5], [1, 0]]), np.array([0, 0])
    assert classification_metrics.accuracy(probs, labels) == 0.5
    assert np.isnan(classification_metrics.nll(probs, labels))
    assert np.isnan(calibration_metrics.ece(probs.max(axis=1), classification_metrics.is_correct(probs, labels)))


def test_nll_is_clamped():
    assert classification_metrics.nll(np.array([[1.0, 0.0]]), np.array([1])) == pytest.approx(-np.log(1e-10))


@pytest.mark.parametrize("labels", [[-1, 0], [0, 2], [0]])
def test_labels_outside_the_options_are_refused(labels):
    with pytest.raises(ValueError, match="labels"):
        classification_metrics.nll(np.full((2, 2), 0.5), np.array(labels))


def test_bins_are_closed_on_the_left():
    # 0.5 opens the second of two bins; were it in the first, the two gaps there would cancel.
    assert calibration_metrics.ece(np.array([0.4, 0.5]), np.array([1, 0]), bins=2) == pytest.approx((0.6 + 0.5) / 2)
    count, _, _ = calibration_metrics.reliability_bins(np.array([0.4, 0.5]), np.array([1, 0]), bins=2)
    assert count.tolist() == [1, 1]


def test_full_confidence_has_its_own_bin_as_in_torchmetrics():
    confidence, correct = np.array([1.0, 0.95]), np.array([0, 1])
    assert calibration_metrics.ece(confidence, correct) == pytest.approx((1 + 0.05) / 2)
    count, mean, accuracy = calibration_metrics.reliability_bins(confidence, correct)
    assert len(count) == calibration_metrics.NUM_BINS == 15
    assert (count[-1], mean[-1], accuracy[-1]) == (2, pytest.approx(0.975), 0.5)
    assert calibration_metrics.ece(np.array([1 + 1e-7]), np.array([1])) == pytest.approx(0, abs=1e-6)


def test_reliability_bins_against_a_slow_reference():
    rng = np.random.default_rng(0)
    confidence = rng.random(500) * 0.6 + 0.3
    correct = rng.random(500) < confidence
    count, mean, accuracy = calibration_metrics.reliability_bins(confidence, correct)
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
    assert calibration_metrics.ece(confidence, correct) == pytest.approx(error)


def random_table(seed):
    """One of 200 tables: ties, a single class, one row, constant scores, K from 2 to 200."""
    rng = np.random.default_rng(seed)
    options = int(rng.choice([2, 3, 4, 5, 10, 57, 200]))
    rows = int(rng.choice([1, 2, 7, 60, 300]))
    probs = rng.dirichlet(np.full(options, rng.choice([0.1, 1.0, 5.0])), size=rows)
    if seed % 3 == 0:  # coarse scores: ties
        probs = np.round(probs, 1)
        probs[:, 0] += 1 - probs.sum(axis=1)
        probs = np.abs(probs) / np.abs(probs).sum(axis=1, keepdims=True)
    if seed % 7 == 0:
        probs = np.full((rows, options), 1 / options)
    labels = np.full(rows, 1) if seed % 5 == 0 else rng.integers(options, size=rows)
    return probs, labels


@pytest.mark.parametrize("seed", range(200))
def test_agreement_with_scikit_learn_and_torchmetrics(seed):
    import torch
    from torchmetrics.functional import classification as tm

    probs, labels = random_table(seed)
    classes, options = np.arange(probs.shape[1]), probs.shape[1]
    exactly = lambda value: pytest.approx(value, abs=1e-9)  # noqa: E731
    predicted, confidence = probs.argmax(axis=1), probs.max(axis=1)
    correct = predicted == labels
    assert classification_metrics.accuracy(probs, labels) == exactly(sk.accuracy_score(labels, predicted))
    if probs.min() > 1e-10:  # scikit-learn clips at the smallest float, we at 1e-10
        assert classification_metrics.nll(probs, labels) == exactly(sk.log_loss(labels, probs, labels=classes))
    assert classification_metrics.brier(probs, labels) == exactly(sk.brier_score_loss(labels, probs, labels=classes, scale_by_half=False) if options > 2 else 2 * sk.brier_score_loss(labels, probs[:, 1], pos_label=1, labels=[0, 1]))  # fmt: skip
    tensors = torch.from_numpy(confidence), torch.from_numpy(correct).long()
    for norm, metric in (("l1", calibration_metrics.ece), ("max", calibration_metrics.mce)):
        # float64 all the way: torchmetrics keeps the dtype of what it is given.
        assert metric(confidence, correct) == exactly(
            tm.binary_calibration_error(*tensors, n_bins=15, norm=norm).item()
        )
    if options <= 10:
        by_class = [tm.binary_calibration_error(torch.from_numpy(probs[:, k].copy()), torch.from_numpy(labels == k).long(), n_bins=15).item() for k in classes]  # fmt: skip
        assert calibration_metrics.classwise_ece(probs, labels) == exactly(np.mean(by_class))
    if 0 < correct.sum() < len(correct):
        assert ranking_metrics.confidence_auroc(correct, -confidence) == exactly(sk.roc_auc_score(correct, confidence))
        assert ranking_metrics.confidence_aupr(correct, -confidence) == exactly(
            sk.average_precision_score(correct, confidence)
        )
        assert ranking_metrics.aupr(~correct, -confidence) == exactly(
            sk.average_precision_score(~correct, -confidence)
        )
        false, true, _ = sk.roc_curve(correct, confidence, drop_intermediate=False)
        assert ranking_metrics.fpr_at_tpr(correct, confidence) == exactly(
            min(f for f, t in zip(false, true, strict=True) if t >= 0.95 - 1e-12)
        )


@pytest.mark.parametrize("seed", range(30))
def test_equal_mass_bins_are_those_of_sorted_equal_parts(seed):
    rng = np.random.default_rng(seed)
    rows = 15 * int(rng.integers(1, 20))
    confidence = rng.random(rows)
    correct = rng.random(rows) < confidence
    order = np.argsort(confidence)
    parts = np.array_split((confidence - correct)[order], 15)
    expected = sum(abs(part.sum()) for part in parts) / rows
    assert calibration_metrics.equal_mass_ece(confidence, correct) == pytest.approx(expected, abs=1e-12)
    # The order of rows, ties included, plays no part.
    coarse = np.round(confidence, 1)
    shuffled = rng.permutation(rows)
    found = calibration_metrics.equal_mass_ece(coarse[shuffled], correct[shuffled])
    assert found == pytest.approx(calibration_metrics.equal_mass_ece(coarse, correct), abs=1e-12)


def test_ece_floor_is_the_mean_ece_of_a_calibrated_model():
    rng = np.random.default_rng(0)
    for confidence in (np.array([0.7]), rng.random(40) * 0.7 + 0.3, rng.random(2000) * 0.7 + 0.3):
        chance = [calibration_metrics.ece(confidence, rng.random(len(confidence)) < confidence) for _ in range(3000)]
        error = np.std(chance) / np.sqrt(3000)
        assert calibration_metrics.ece_floor(confidence) == pytest.approx(np.mean(chance), abs=5 * error + 1e-9)
    assert calibration_metrics.ece_floor(np.array([0.7])) == pytest.approx(2 * 0.7 * 0.3)


def test_classwise_ece_judges_an_option_where_it_is_offered():
    probs = np.array([[0.6, 0.4, 0.0], [0.2, 0.3, 0.5]])
    # Options A and B on both rows, C on the second alone.
    expected = ((0.4 + 0.2) / 2 + (0.4 + 0.3) / 2 + 0.5) / 3
    assert calibration_metrics.classwise_ece(probs, np.array([0, 2]), np.array([2, 3])) == pytest.approx(expected)


def slow_aurc(correct, uncertainty):
    risks = []
    for shift in range(400):
        order = np.lexsort((np.random.default_rng(shift).random(len(correct)), uncertainty))
        wrong = ~correct[order]
        risks.append((wrong.cumsum() / np.arange(1, len(wrong) + 1)).mean())
    return np.mean(risks)


def test_aurc_by_hand_and_with_ties():
    correct = np.array([1, 0, 1, 1], dtype=bool)
    # 0/1, 1/2, 1/3, 1/4; at best 0, 0, 0, 1/4
    assert ranking_metrics.aurc(correct, np.array([0.1, 0.2, 0.3, 0.4])) == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert ranking_metrics.excess_aurc(correct, np.array([0.1, 0.2, 0.3, 0.4])) == pytest.approx((1 / 2 + 1 / 3) / 4)
    rng = np.random.default_rng(0)
    correct, coarse = rng.random(40) < 0.7, rng.integers(3, size=40)
    assert ranking_metrics.aurc(correct, coarse) == pytest.approx(slow_aurc(correct, coarse), abs=0.01)
    assert ranking_metrics.aurc(correct, np.zeros(40)) == pytest.approx((~correct).mean())
    assert ranking_metrics.aurc(np.ones(3, dtype=bool), np.arange(3)) == 0


def test_risk_and_coverage_are_read_at_thresholds():
    correct = np.array([1, 1, 1, 0, 1], dtype=bool)
    sure = np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    assert ranking_metrics.risk_at_coverage(correct, sure, 0.6) == 0
    assert ranking_metrics.risk_at_coverage(correct, sure, 0.61) == 0.25
    assert ranking_metrics.risk_at_coverage(correct, sure, 1.0) == pytest.approx(0.2)
    assert ranking_metrics.coverage_at_risk(correct, sure, 0.0) == pytest.approx(0.6)
    assert ranking_metrics.coverage_at_risk(correct, sure, 0.2) == 1
    # No threshold separates the tied rows: it answers both or neither.
    tied = np.array([0.1, 0.2, 0.4, 0.4, 0.5])
    assert ranking_metrics.coverage_at_risk(correct, tied, 0.0) == pytest.approx(0.4)
    assert ranking_metrics.risk_at_coverage(correct, tied, 0.5) == 0.25
    assert ranking_metrics.coverage_at_risk(np.zeros(3, dtype=bool), np.arange(3)) == 0
    assert ranking_metrics.coverage_at_risk(np.array([True, False]), np.array([0.1, np.nan]), 0.0) == 0.5
