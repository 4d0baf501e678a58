"""Conformal p-values of densities: uniform on rows of the same distribution, by bins of length."""

import numpy as np
import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.decisions.familiarity import LEAST_BIN, Familiarity, bin_edges, one_in


def test_golden_values():
    known = Familiarity.fit(np.arange(99.0), np.zeros(99))
    found = known.p_values(np.array([-1.0, 0.0, 49.0, 98.0, 200.0]), np.zeros(5))
    np.testing.assert_allclose(found, [0.01, 0.02, 0.51, 1.0, 1.0])
    assert np.isnan(known.p_values(np.array([np.nan]), np.zeros(1))).all()


def test_rows_are_compared_with_rows_of_their_length():
    lengths = np.repeat([5, 50], 300)
    densities = np.where(lengths == 5, 0.0, 10.0) + np.random.default_rng(0).normal(size=600)
    known = Familiarity.fit(densities, lengths)
    assert known.edges == (5,) and [len(part) for part in known.densities] == [300, 300]
    short, long = known.p_values(np.array([5.0, 5.0]), np.array([4, 80]))
    assert short == 1.0 and long == pytest.approx(1 / 301)


def test_bins_have_enough_rows_and_equal_lengths_share_one():
    assert bin_edges(np.zeros(1000, dtype=int)) == ()
    assert bin_edges(np.arange(2 * LEAST_BIN - 1)) == ()
    assert bin_edges(np.arange(2 * LEAST_BIN)) == (LEAST_BIN - 1,)
    assert len(bin_edges(np.arange(10_000))) == 3


def test_p_values_are_uniform_and_as_many_rows_are_refused_as_was_asked():
    draw = np.random.default_rng(0)
    refused = []
    for _ in range(200):
        lengths = draw.integers(5, 40, 1600)
        densities = draw.standard_t(3, 1600) / np.sqrt(lengths)
        known = Familiarity.fit(densities[:800], lengths[:800])
        refused.append((known.p_values(densities[800:], lengths[800:]) <= 0.05).mean())
    assert 0.045 < np.mean(refused) < 0.055


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(UserError, match="at least 50 calibration rows, found 3"):
        Familiarity.fit([1, 2, 3], [0, 0, 0])
    with pytest.raises(UserError, match="NaN"):
        Familiarity.fit([np.nan] * 60, [0] * 60)


def test_words():
    assert one_in(0.005) == "as unusual as 1 in 200 of your questions"
    assert one_in(0.7) == "as usual as your questions are"
