import math

import numpy as np
import pytest
from scipy.special import digamma, logsumexp
from sklearn.metrics import roc_auc_score

from dappr_llm.core.errors import UserError
from dappr_llm.evaluation.evaluators import evaluate_id, evaluate_ood, evaluate_tables
from dappr_llm.evaluation.prediction_table import PredictionTable, entropy
from dappr_llm.evaluation.scores import SCORES, uncertainty


def meta(task_num_choices, **facts):
    return {"task": "toy", "num_choices": 4, "task_num_choices": task_num_choices, **facts}


def id_table():
    alpha = np.array([[9, 2, 2, 1.5, 1], [1, 6, 1, 1, 1], [1, 2, 5, 4, 1], [2, 2, 2, 3, 9]])
    return PredictionTable.from_arrays(list("abcd"), [0, 1, 3, -1], alpha=alpha, num_options=[4] * 4, meta=meta(4))


def ood_table(**facts):
    alpha = np.array([[9, 2, 2, 1.5, 1], [1, 6, 1, 1, 1], [1, 2, 5, 4, 1]])
    return PredictionTable.from_arrays(
        list("xyz"), [0, 4, 2], alpha=alpha, num_options=[4, 5, 3], meta=meta(5, **facts)
    )


def test_evaluate_id_by_hand():
    results = evaluate_id(id_table())
    assert set(results) == {
        "accuracy", "chance", "balanced_accuracy", "macro_f1", "nll", "brier", "ece", "ece_floor", "ece_equal_mass", "ece_classwise", "mce", "conf_aupr", "conf_auroc",
        "aurc", "excess_aurc", "risk_at_coverage_80", "coverage_at_risk_5", "n", "n_unlabelled",
    }  # fmt: skip
    assert results["accuracy"] == pytest.approx(2 / 3)
    assert results["chance"] == pytest.approx(np.mean(1 / id_table().num_options[id_table().labels >= 0]))
    assert results["nll"] == pytest.approx(-(math.log(9 / 14.5) + math.log(6 / 9) + math.log(4 / 12)) / 3)
    # Confidences 9/14.5, 6/9, 5/12 lie in three bins.
    assert results["ece"] == pytest.approx(((1 - 9 / 14.5) + (1 - 6 / 9) + 5 / 12) / 3)
    assert results["mce"] == pytest.approx(5 / 12)
    assert results["conf_aupr"] == results["conf_auroc"] == 1
    # The wrong answer is the least sure one: 0, 0, 1/3 wrong among the first 1, 2, 3.
    assert (results["aurc"], results["excess_aurc"]) == (pytest.approx(1 / 9), pytest.approx(0))
    assert (results["risk_at_coverage_80"], results["coverage_at_risk_5"]) == (
        pytest.approx(1 / 3),
        pytest.approx(2 / 3),
    )
    assert (results["n"], results["n_unlabelled"]) == (3, 1)


def test_evaluate_id_masks_absent_options():
    # The fifth letter would win, but the item does not offer it.
    table = PredictionTable.from_arrays(["a"], [1], np.array([[0.1, 0.3, 0.6]]), num_options=[2])
    results = evaluate_id(table)
    assert results["accuracy"] == 1
    assert results["nll"] == pytest.approx(-math.log(0.75), abs=1e-6)
    assert results["brier"] == pytest.approx(2 * 0.25**2, abs=1e-6)


def test_evaluate_id_without_labels_only_counts():
    assert evaluate_id(PredictionTable.from_arrays(["a", "b"], probs=np.eye(2))) == {"n": 0, "n_unlabelled": 2}


def test_evaluate_id_counts_nan_rows():
    probs = np.array([[np.nan, np.nan], [0.9, 0.1]])
    results = evaluate_id(PredictionTable.from_arrays(["a", "b"], [0, 0], probs, allow_nan=True))
    assert (results["accuracy"], results["n_nan"], results["conf_aupr"]) == (0.5, 1, 1)


def test_matched_and_published_readings_differ_by_the_letters():
    # The same evidence on both sides: matched letters cannot tell them apart, unequal ones pretend to.
    same = id_table().select([0, 1, 2])
    matched = evaluate_ood(same, ood_table())
    published = evaluate_ood(same, ood_table(), slots="task")
    half = pytest.approx(0.5)
    assert matched == {"auroc": 0.5, "aupr": half, "aupr_ood": half, "fpr95": 1, "n_id": 3, "n_ood": 3}
    assert published["auroc"] > 0.6
    k_over_alpha0 = [4 / 14.5, 4 / 9, 4 / 12, 5 / 15.5, 5 / 10, 5 / 13]
    expected = roc_auc_score([1, 1, 1, 0, 0, 0], -np.array(k_over_alpha0))
    assert published["auroc"] == pytest.approx(expected)


def dirichlet_information(alpha):
    """Entropy of the mean minus the mean entropy of a Dirichlet distribution."""
    total = alpha.sum(axis=1, keepdims=True)
    mean = alpha / total
    mean_entropy = (mean * (digamma(total + 1) - digamma(alpha + 1))).sum(axis=1)
    return entropy(mean) - mean_entropy


def test_mutual_information_golden_and_by_sampling():
    alpha = np.array([[3.12692801, 1.97407698, 1.31326169, 1.69314718]])
    found = uncertainty(PredictionTable.from_arrays(["a"], alpha=alpha), 4, "mutual_information")
    assert found[0] == pytest.approx(0.16459757, abs=1e-6)
    draws = np.random.default_rng(0).dirichlet(alpha[0], size=200_000)
    assert found[0] == pytest.approx(entropy(draws.mean(axis=0)) - entropy(draws).mean(), abs=2e-3)
    members = np.array([[[2.0, 0.5, -1.0, 0.0]], [[1, 1.5, -0.5, 0.2]], [[2.5, -0.5, 0, -1]]])
    members = np.exp(members) / np.exp(members).sum(axis=-1, keepdims=True)
    table = PredictionTable.from_arrays(["a"], members=members, epistemic=np.array([0.9]))
    assert uncertainty(table, 4, "mutual_information")[0] == pytest.approx(0.146984, abs=1e-6)


def test_scores_that_a_table_cannot_give_are_named():
    bare = PredictionTable.from_arrays(["a"], probs=np.full((1, 4), 0.25), meta=meta(4))
    with pytest.raises(UserError, match="'mutual_information' needs alpha or members, .* 'toy' lacks"):
        evaluate_ood(bare, bare, score="mutual_information")
    with pytest.raises(UserError, match="'evidence' needs alpha"):
        evaluate_ood(bare, bare, score="evidence")
    for score, needs in {
        "energy": "logits",
        "max_logit": "logits",
        "density": "density",
        "max_evidence": "alpha",
    }.items():
        with pytest.raises(UserError, match=f"'{score}' needs {needs}"):
            evaluate_ood(bare, bare, score=score)
    results = evaluate_tables(bare, {"x": bare})
    assert "ood/x/auroc_entropy" in results and "ood/x/auroc_mutual_information" not in results


def test_infinite_evidence_is_a_broken_row_not_a_sure_one():
    table = PredictionTable.from_arrays(
        ["a"], alpha=np.array([[np.inf, 1, 1, 1]]), epistemic=np.zeros(1), aleatoric=np.zeros(1), meta=meta(4),
        probs=np.full((1, 4), 0.25), allow_nan=True, logits=np.zeros((1, 4)), density=np.zeros(1),
    )  # fmt: skip
    assert all(np.isnan(uncertainty(table, 4, score)[0]) for score in SCORES)


@pytest.mark.parametrize("score", SCORES)
def test_each_score_ranks_by_its_own_uncertainty(score):
    rng = np.random.default_rng(0)
    tables = []
    for rows, scale in ((50, 4.0), (70, 2.0)):
        alpha = 1 + rng.gamma(0.5, scale, (rows, 4))
        ids = [f"{scale}-{row}" for row in range(rows)]
        given = {"aleatoric": rng.random(rows), "epistemic": rng.random(rows), "density": rng.normal(size=rows)}
        given["logits"] = rng.normal(scale=scale, size=(rows, 4))
        tables.append(PredictionTable.from_arrays(ids, alpha=alpha, meta=meta(4), **given))
    expected = {
        "epistemic": [table.epistemic for table in tables],
        "aleatoric": [table.aleatoric for table in tables],
        "entropy": [entropy(table.probs) for table in tables],
        "max_prob": [1 - table.probs.max(axis=1) for table in tables],
        "mutual_information": [dirichlet_information(table.alpha) for table in tables],
        "evidence": [4 - table.alpha.sum(axis=1) for table in tables],
        "max_evidence": [-table.alpha.max(axis=1) for table in tables],
        "energy": [-logsumexp(table.logits, axis=1) for table in tables],
        "max_logit": [-table.logits.max(axis=1) for table in tables],
        "density": [-table.density for table in tables],
    }[score]
    area = roc_auc_score([1] * 50 + [0] * 70, -np.concatenate(expected))
    assert evaluate_ood(*tables, score=score)["auroc"] == pytest.approx(area)


def test_max_prob_tells_saturated_rows_apart():
    sides = [
        PredictionTable.from_arrays(["a"], probs=np.array([[1.0, small]]), meta=meta(2, num_choices=2))
        for small in (1e-12, 1e-9)
    ]
    assert evaluate_ood(*sides, score="max_prob")["auroc"] == 1


def test_evaluate_tables_gives_the_flat_results():
    reference, other = id_table(), ood_table()
    unlabelled = PredictionTable.from_arrays(["u"], alpha=np.ones((1, 5)), meta=meta(5))
    results = evaluate_tables(reference, {"arc_c": other, "new": unlabelled})
    for name, value in evaluate_id(reference).items():
        assert results[f"id/{name}"] == value
    for name in ("auroc", "aupr", "aupr_ood", "fpr95"):
        assert results[f"ood/arc_c/{name}"] == evaluate_ood(reference, other)[name]
        assert results[f"ood/arc_c/{name}_published"] == evaluate_ood(reference, other, slots="task")[name]
    assert results["ood/arc_c/auroc"] != results["ood/arc_c/auroc_published"]
    assert results["ood/arc_c/auroc_max_prob"] == evaluate_ood(reference, other, score="max_prob")["auroc"]
    for name in ("entropy", "mutual_information"):
        assert results[f"ood/arc_c/auroc_{name}"] == evaluate_ood(reference, other, score=name)["auroc"]
    by_aleatoric = evaluate_tables(reference, {"arc_c": other}, score="aleatoric")
    assert by_aleatoric["ood/arc_c/auroc"] == evaluate_ood(reference, other, score="aleatoric")["auroc"]
    for name in ("accuracy", "nll", "brier", "ece", "ece_floor"):
        assert results[f"ood/arc_c/{name}"] == evaluate_id(other)[name]
        assert f"ood/new/{name}" not in results
    assert results["id/options/4"] == 4
    assert [results[f"ood/arc_c/options/{count}"] for count in (3, 4, 5)] == [1, 1, 1]
    assert (results["ood/arc_c/n"], results["ood/new/n"], results["ood/new/n_unlabelled"]) == (3, 1, 1)
    assert all(key.split("/")[0] in ("id", "ood") for key in results)


def test_bad_input_is_a_user_error():
    with pytest.raises(UserError, match=r"score must be one of epistemic, .* not 'entrpy'"):
        evaluate_ood(id_table(), ood_table(), score="entrpy")
    with pytest.raises(UserError, match="slots must be one of train, task"):
        evaluate_ood(id_table(), ood_table(), slots="own")
    with pytest.raises(UserError, match="different models: one was trained on 4 options, the other on 5"):
        evaluate_ood(id_table(), ood_table(num_choices=5))
    bare = PredictionTable.from_arrays(["a"], probs=np.full((1, 4), 0.25))
    with pytest.raises(UserError, match="must state num_choices"):
        evaluate_ood(bare, ood_table())
    with pytest.raises(UserError, match="must state task_num_choices"):
        evaluate_ood(id_table(), bare, slots="task")
    narrow = PredictionTable.from_arrays(["a"], probs=np.full((1, 4), 0.25), meta=meta(5))
    with pytest.raises(UserError, match="from 2 to 4, not 5"):
        evaluate_ood(id_table(), narrow, slots="task")


def test_the_trainer_knows_which_metrics_should_fall(tmp_path):
    """Read from the metrics' declarations; with a wrong direction the worst checkpoint would be kept as the best."""
    from dappr_llm.training.config import DAPPrConfig

    rises = {"accuracy", "balanced_accuracy", "macro_f1", "conf_aupr", "conf_auroc", "coverage_at_risk_5"}
    neutral = {"chance", "ece_floor", "n", "n_unlabelled"}
    for name in {"loss", *evaluate_id(id_table())} - neutral:
        args = DAPPrConfig(str(tmp_path), metric_for_best_model=f"eval_{name}", report_to="none")
        assert args.greater_is_better is (name in rises), name
