import numpy as np
import pytest
from random_tables import make_table

from dappr_llm.core.errors import UserError
from dappr_llm.evaluation import bootstrap as intervals
from dappr_llm.evaluation import bootstrap_metrics as weighted
from dappr_llm.evaluation.bootstrap import Paired, Summary, bootstrap, over_seeds, paired_bootstrap
from dappr_llm.evaluation.evaluators import evaluate_tables
from dappr_llm.evaluation.ood_baselines import trivial_sides
from dappr_llm.evaluation.prediction_table import PredictionTable

COUNTS = {"n", "n_unlabelled", "n_nan", "ece_floor", "chance"}


def repeated(table, weights):
    """The table a vector of weights stands for: each row as often as it was drawn."""
    rows = np.repeat(np.arange(len(table)), weights.astype(int))
    arrays = {
        name: getattr(table, name)[rows] for name in ("labels", "num_options", "probs", "aleatoric", "epistemic")
    }
    alpha = None if table.alpha is None else table.alpha[rows]
    return PredictionTable(ids=np.arange(len(rows)).astype(str), alpha=alpha, meta=table.meta, **arrays)


def is_metric(key):
    return key.rpartition("/")[2] not in COUNTS and "/options/" not in key


CASES = [
    {"options": 4},
    {"options": 2, "levels": 3},
    {"options": 5, "mixed": True, "unlabelled": 7},
    {"options": 4, "levels": 1},
    {"options": 30, "levels": 8, "mixed": True},
    {"options": 4, "alpha": False},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_stand_for_repeated_rows(case):
    reference, other = make_table(60, **case), make_table(45, seed=1, sharp=1.5, **{**case, "unlabelled": 0})
    trivial = trivial_sides(reference, {"x": other})
    evaluation = weighted.Evaluation(reference, {"x": other}, trivial=trivial)
    rng = np.random.default_rng(2)
    id_weights = np.concatenate([np.ones((1, 60)), rng.multinomial(60, np.full(60, 1 / 60), size=4)])
    ood_weights = np.concatenate([np.ones((1, 45)), rng.multinomial(45, np.full(45, 1 / 45), size=4)])
    found = evaluation(id_weights, {"x": ood_weights})
    for number, (one, two) in enumerate(zip(id_weights, ood_weights, strict=True)):
        # The trivial detectors know the whole ID table, whichever rows were drawn.
        drawn = {
            suffix: tuple(np.repeat(side, w.astype(int)) for side, w in zip(pair, (one, two), strict=True))
            for suffix, pair in trivial["x"].items()
        }
        tables = repeated(reference, one), {"x": repeated(other, two)}
        expected = evaluate_tables(*tables, trivial={"x": drawn})
        expected = {key: value for key, value in expected.items() if is_metric(key)}
        assert set(found) == set(expected)
        for key, value in expected.items():
            assert found[key][number] == pytest.approx(value, abs=1e-9, nan_ok=True), key


def test_intervals_have_the_keys_of_the_results_and_hold_the_numbers():
    reference, other = make_table(300), make_table(200, seed=1, sharp=1.0, task="x")
    results = evaluate_tables(reference, {"x": other})
    found = bootstrap(reference, {"x": other}, resamples=300)
    assert set(found) == {key for key in results if is_metric(key)}
    for key, (low, high) in found.items():
        assert low <= results[key] <= high and low < high, key
    assert found["ood/x/auroc"] != found["ood/x/auroc_max_prob"]


def test_accuracy_interval_is_the_binomial_one():
    reference = make_table(2000, sharp=2.0)
    accuracy = evaluate_tables(reference, {})["id/accuracy"]
    low, high = bootstrap(reference, {}, resamples=2000)["id/accuracy"]
    half = 1.96 * np.sqrt(accuracy * (1 - accuracy) / 2000)
    assert (low, high) == (pytest.approx(accuracy - half, abs=0.002), pytest.approx(accuracy + half, abs=0.002))
    narrow = bootstrap(reference, {}, resamples=2000, level=0.5)["id/accuracy"]
    assert low < narrow[0] < narrow[1] < high


def test_seed_decides_and_neither_chunks_nor_other_tasks_matter(monkeypatch):
    reference, other = make_table(50), make_table(40, seed=1, task="x")
    first = bootstrap(reference, {"x": other}, resamples=64)
    assert first == bootstrap(reference, {"x": other}, resamples=64)
    assert first != bootstrap(reference, {"x": other}, resamples=64, seed=1)
    alone = bootstrap(reference, {}, resamples=64)
    assert all(first[key] == alone[key] for key in alone)
    monkeypatch.setattr(intervals, "_CHUNK", 500)
    chunked = bootstrap(reference, {"x": other}, resamples=64)
    assert {k: pytest.approx(v, abs=1e-12) for k, v in chunked.items()} == first


def test_undefined_metrics_have_no_interval():
    always_right = PredictionTable.from_arrays(
        ["a", "b", "c"], [0, 0, 1], np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    )
    found = bootstrap(always_right, {}, resamples=50)
    assert np.isnan(found["id/conf_auroc"]).all() and np.isnan(found["id/conf_aupr"]).all()
    assert found["id/accuracy"] == (1, 1) and found["id/aurc"] == (0, 0)
    assert bootstrap(PredictionTable.from_arrays(["a"], probs=np.eye(2)[:1]), {}, resamples=5) == {}
    empty = make_table(3).select([])
    assert all(np.isnan(pair).all() for pair in bootstrap(empty, {"x": empty}, resamples=5).values())
    assert np.isnan(bootstrap(make_table(3), {"x": empty}, resamples=5)["ood/x/auroc"]).all()
    one = bootstrap(PredictionTable.from_arrays(["a"], [0], np.array([[0.25, 0.75]])), {}, resamples=5)
    assert one["id/accuracy"] == (0, 0) and one["id/ece"] == (0.75, 0.75)


def test_a_broken_row_ranks_last_in_every_resample():
    probs = np.array([[0.9, 0.1], [0.8, 0.2], [np.nan, np.nan]])
    meta = {"task": "t", "num_choices": 2, "task_num_choices": 2}
    broken = PredictionTable.from_arrays(list("abc"), [0, 0, 0], probs, meta=meta, allow_nan=True)
    good = PredictionTable.from_arrays(list("xyz"), [0, 0, 0], probs[[1, 1, 1]] * 0 + 0.5, meta=meta)
    values = weighted.Evaluation(good, {"x": broken})(np.ones((1, 3)), {"x": np.array([[0.0, 0.0, 3.0]])})
    assert values["ood/x/auroc"] == 1 and values["ood/x/aupr_ood"] == 1 and np.isnan(values["ood/x/nll"])


def seeds(count, shift=0.0, rows=200):
    runs = []
    for seed in range(count):
        base = make_table(rows, seed=5)
        noise = np.random.default_rng(100 + seed).random(base.alpha.shape)
        alpha = base.alpha + 0.3 * noise + shift * np.eye(4)[base.labels]
        other = make_table(150, seed=6, task="x", sharp=1.0)
        runs.append(
            (
                PredictionTable.from_arrays(base.ids, base.labels, alpha=alpha, meta=base.meta),
                {"x": PredictionTable.from_arrays(other.ids, other.labels, alpha=other.alpha, meta=other.meta)},
            )
        )
    return runs


def test_a_paired_comparison_finds_what_differs():
    first, second = seeds(2), seeds(2, shift=1.0)
    found = paired_bootstrap(first, second, resamples=300)
    better = found["id/nll"]
    expected = np.mean(
        [evaluate_tables(*b)["id/nll"] - evaluate_tables(*a)["id/nll"] for a, b in zip(first, second, strict=True)]
    )
    assert better.difference == pytest.approx(expected)
    assert better.low < better.difference < better.high < 0 and better.p_value == pytest.approx(2 / 301)
    same = paired_bootstrap(first, first, resamples=50)
    assert set(same.values()) == {Paired(0.0, 0.0, 0.0, 1.0)}
    # Paired resamples cancel what both share; two separate intervals could not.
    low, high = bootstrap(*first[0], resamples=300)["id/nll"]
    assert better.high - better.low < high - low


def test_a_paired_comparison_without_a_difference_rarely_finds_one():
    p = [paired_bootstrap(seeds(2)[:1], seeds(2)[1:], resamples=200)[k].p_value for k in ("id/nll", "id/accuracy")]
    assert min(p) > 0.01


def test_a_paired_comparison_refuses_other_items():
    (one,), (two,) = seeds(1), seeds(1)
    two[0].ids[3] = "other"
    with pytest.raises(UserError, match=r"Run 2 .*in distribution in ids\[3\]: other against toy-3"):
        paired_bootstrap([one], [two])
    with pytest.raises(UserError, match="Run 2 has 10 items in distribution, the first has 200"):
        paired_bootstrap([one], seeds(1, rows=10))
    with pytest.raises(UserError, match=r"tested on \[\], the first on \['x'\]"):
        paired_bootstrap([one], [(one[0], {})])
    with pytest.raises(UserError, match="equally many seeds, not 1 and 2"):
        paired_bootstrap([one], [one, one])
    with pytest.raises(UserError, match="level between 0 and 1"):
        bootstrap(one[0], {}, level=95)


def test_over_seeds():
    found = over_seeds([0.8, 0.9, 1.0])
    # t with 2 degrees of freedom: 4.302653
    half = 4.302653 * 0.1 / np.sqrt(3)
    assert found == Summary(*(pytest.approx(v, abs=1e-6) for v in (0.9, 0.1, 0.9 - half, 0.9 + half)), 3)
    one = over_seeds([0.5])
    assert (one.mean, one.n) == (0.5, 1) and np.isnan([one.std, one.low, one.high]).all()
    with pytest.raises(UserError, match="at least one value"):
        over_seeds([])


def test_nominal_intervals_cover():
    """A light version of scripts/interval_coverage.py: 150 simulated tables; the binomial spread of the share is 1.8 points."""
    rng = np.random.default_rng(0)
    truth_rows, rows, covered = 100_000, 300, {"id/accuracy": 0, "id/nll": 0, "ood/x/auroc": 0}

    def simulate(count, scale):
        alpha = 1 + rng.gamma(0.7, scale, (count, 4))
        labels = (rng.random((count, 1)) > (alpha / alpha.sum(1, keepdims=True)).cumsum(1)).sum(1).clip(0, 3)
        meta = {"task": "x", "num_choices": 4, "task_num_choices": 4}
        return PredictionTable.from_arrays(np.arange(count).astype(str), labels, alpha=alpha, meta=meta)

    truth = evaluate_tables(simulate(truth_rows, 3.0), {"x": simulate(truth_rows, 1.5)})
    for seed in range(150):
        found = bootstrap(simulate(rows, 3.0), {"x": simulate(rows, 1.5)}, resamples=200, seed=seed)
        for key in covered:
            covered[key] += found[key][0] <= truth[key] <= found[key][1]
    assert all(0.88 <= count / 150 <= 0.99 for count in covered.values()), covered
