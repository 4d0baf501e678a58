"""Conformal scores: golden values, a brute-force check of the possibility, coverage, invariances."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from dappr_llm.core.errors import UserError
from dappr_llm.decisions.conformal import (
    log_possibility,
    option_scores,
    possibility_scores,
    threshold,
    uniform_numbers,
)

ALPHA = np.array([[6.0, 3.0, 2.0, 1.0]])
FOUR = np.array([4])


def test_lac_and_aps_by_hand():
    probs = np.array([[0.5, 0.3, 0.2, 0.0]])
    assert option_scores("lac", probs, None, np.array([3]), np.zeros(1))[0] == pytest.approx([0.5, 0.7, 0.8, np.inf])
    # Ranked 0.5, 0.3, 0.2; what is above plus half of one's own.
    aps = option_scores("aps", probs, None, np.array([3]), np.array([0.5]))[0]
    assert aps == pytest.approx([0.25, 0.65, 0.9, np.inf])
    shuffled = option_scores("aps", probs[:, [1, 2, 0, 3]], None, np.array([3]), np.array([0.5]))[0]
    assert shuffled == pytest.approx([0.65, 0.9, 0.25, np.inf])


def test_possibility_by_hand():
    """Levelling the second option with the first: both at 4.5; the third pools with both only as far as needed."""
    found = log_possibility(ALPHA, FOUR)[0]
    assert found[0] == 0
    assert found[1] == pytest.approx(6 * math.log(4.5 / 6) + 3 * math.log(4.5 / 3))
    # (6 + 2)/2 = 4 lies above 3, so the second option stays where it is.
    assert found[2] == pytest.approx(6 * math.log(4 / 6) + 2 * math.log(4 / 2))
    assert (np.diff(found) < 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_possibility_is_the_supremum_of_the_possibility_function(seed):
    """Against a numerical search over the simplex under p_k >= p_j."""
    draw = np.random.default_rng(seed)
    alpha = draw.gamma(1.5, 3, size=4) + 0.1
    mode = alpha / alpha.sum()
    closed = log_possibility(alpha[None], FOUR)[0]
    for k in range(4):
        constraints = [{"type": "eq", "fun": lambda p: p.sum() - 1}]
        constraints += [{"type": "ineq", "fun": lambda p, j=j, k=k: p[k] - p[j]} for j in range(4) if j != k]
        best = minimize(
            lambda p: -(alpha * np.log(np.maximum(p, 1e-12) / mode)).sum(),
            np.full(4, 0.25),
            constraints=constraints,
            bounds=[(1e-9, 1)] * 4,
            options={"ftol": 1e-12, "maxiter": 500},
        )
        assert closed[k] == pytest.approx(-best.fun, abs=1e-4)


def test_possibility_of_many_options_is_that_of_each_level_tried_in_turn():
    """With ties, and rows of different numbers of options."""
    draw = np.random.default_rng(0)
    counts = draw.integers(1, 40, 30)
    alpha = draw.gamma(0.5, 5, (30, 40)) + 1e-3
    alpha[::3] = np.round(alpha[::3]) + 1
    found = log_possibility(alpha, counts)
    for own, said, count in zip(alpha, found, counts, strict=True):
        ranked = np.sort(own[:count])[::-1]
        for k in range(count):
            above = ranked[ranked > own[k]]
            sizes = [
                m for m in range(len(above) + 1) if m == len(above) or above[m] <= (above[:m].sum() + own[k]) / (m + 1)
            ]
            pooled = np.append(above[: sizes[0]], own[k])
            wanted = (pooled * np.log(pooled.mean() / pooled)).sum()
            assert said[k] == pytest.approx(min(wanted, 0.0), abs=1e-9)
        assert (said[count:] == -np.inf).all()


def test_little_evidence_makes_everything_possible_and_more_of_it_decides():
    weak, strong = (possibility_scores(scale * ALPHA, FOUR)[0] for scale in (0.01, 10))
    assert np.ptp(weak) < 0.1 < np.ptp(strong)
    assert strong[0] < 0 < strong[1] and (np.argsort(strong) == np.argsort(weak)).all()


def test_possibility_ignores_columns_beyond_a_rows_options():
    wide = np.concatenate([ALPHA, [[9.0]]], axis=1)
    assert log_possibility(wide, FOUR)[0, :4] == pytest.approx(log_possibility(ALPHA, FOUR)[0])
    assert option_scores("possibility", wide / wide.sum(), wide, FOUR, np.zeros(1))[0, 4] == np.inf


def test_threshold_is_the_right_order_statistic():
    assert threshold(np.arange(1, 100.0), 0.1) == 90  # ceil(100 * 0.9)
    assert threshold(np.arange(1, 10.0), 0.1) == 9
    assert threshold(np.arange(1, 9.0), 0.1) == math.inf  # 8 rows cannot promise 90 %


@pytest.mark.parametrize("kind", ["lac", "aps", "possibility"])
def test_coverage_is_nominal_for_a_bad_model(kind):
    """Probabilities that know little of the labels still give sets that cover, neither less nor much more."""
    draw = np.random.default_rng(0)
    covered = []
    for _ in range(150):
        alpha = draw.gamma(1.0, 2.0, size=(600, 4)) + 0.5
        alpha[:, 3] = 0
        alpha[:200, 3] = 1.3
        counts = np.where(np.arange(600) < 200, 4, 3)
        probs = alpha / alpha.sum(axis=1, keepdims=True)
        labels = np.where(draw.random(600) < 0.5, probs.argmax(axis=1), draw.integers(0, 3, 600))
        order = draw.permutation(600)
        scores = option_scores(kind, probs, alpha, counts, draw.random(600))
        right = scores[np.arange(600), labels]
        limit = threshold(right[order[:300]], 0.1)
        covered.append((right[order[300:]] <= limit).mean())
    assert np.mean(covered) == pytest.approx(0.9, abs=0.01)


def test_uniform_numbers_depend_on_the_key_alone():
    names = [f"item {i}" for i in range(2000)]
    draws = uniform_numbers(names)
    assert (draws == uniform_numbers(iter(names))).all()
    assert draws[::-1].tolist() == uniform_numbers(names[::-1]).tolist()
    assert draws.mean() == pytest.approx(0.5, abs=0.03) and 0 <= draws.min() < draws.max() < 1


def test_unknown_scores_and_missing_alpha_are_named():
    with pytest.raises(UserError, match="lac"):
        option_scores("lack", np.ones((1, 2)) / 2, None, np.array([2]), np.zeros(1))
    with pytest.raises(UserError, match="Dirichlet"):
        option_scores("possibility", np.ones((1, 2)) / 2, None, np.array([2]), np.zeros(1))
