"""Densities from streaming moments against scikit-learn's estimators on the same arrays."""

import numpy as np
import pytest
from sklearn.covariance import OAS
from sklearn.neighbors import NearestNeighbors

from dappr_llm.core.errors import UserError
from dappr_llm.decisions.density import (
    Gaussian,
    KeptRows,
    Moments,
    combined,
    neighbour_scores,
    normalised,
    oas_shrinkage,
    standard,
)


def features(rows, size=24, groups=2, seed=0):
    draw = np.random.default_rng(seed)
    mixed = draw.normal(size=(rows, groups, size)) @ (draw.normal(size=(size, size)) / 4) + 1
    return normalised(mixed)


def moments_of(rows, labels=None, classes=1, parts=4):
    """Added in batches by several processes, then merged."""
    whole = Moments.empty(rows.shape[1], rows.shape[2], classes)
    for part in np.array_split(np.arange(len(rows)), parts):
        own = Moments.empty(rows.shape[1], rows.shape[2], classes)
        for batch in np.array_split(part, 3):
            own.add(rows[batch], None if labels is None else labels[batch])
        whole.merge(own)
    return whole


@pytest.mark.parametrize("count", [400, 20])  # the latter has fewer rows than dimensions
def test_streaming_moments_give_the_covariance_of_scikit_learn(count):
    rows = features(count)
    found = moments_of(rows)
    for group in range(2):
        reference = OAS(store_precision=False).fit(rows[:, group])
        covariance = found.covariance(group)
        shrinkage = oas_shrinkage(covariance, count)
        assert shrinkage == pytest.approx(reference.shrinkage_, rel=1e-9)
        shrunk = (1 - shrinkage) * covariance + shrinkage * np.trace(covariance) / 24 * np.eye(24)
        np.testing.assert_allclose(shrunk, reference.covariance_, atol=1e-12)


@pytest.mark.parametrize("rows", [400, 60])
def test_a_gaussian_of_full_rank_is_scikit_learns_mahalanobis_distance(rows):
    size = 24 if rows == 400 else 100
    train, test = features(rows, size), features(50, size, seed=1)
    fitted = Gaussian.fit(moments_of(train), 1, rank=size)
    reference = OAS().fit(train[:, 1])
    np.testing.assert_allclose(fitted.score(test[:, 1]), -reference.mahalanobis(test[:, 1]) / 2, rtol=1e-6)


def test_a_gaussian_of_low_rank_is_the_gaussian_of_the_covariance_that_it_stands_for():
    train, test = features(300), features(50, seed=1)
    fitted = Gaussian.fit(moments_of(train), 0, rank=6)
    values, vectors = np.linalg.eigh(OAS().fit(train[:, 0]).covariance_)
    values[:-6] = values[:-6].mean()
    centred = test[:, 0] - train[:, 0].mean(0)
    expected = -((centred @ vectors) ** 2 / values).sum(1) / 2
    np.testing.assert_allclose(fitted.score(test[:, 0]), expected, rtol=1e-6)


def test_classes_share_a_covariance_and_the_nearest_one_counts():
    labels = np.arange(300) % 3
    train = features(300)
    train = normalised(train + np.eye(24)[labels][:, None])
    found = moments_of(train, labels, classes=4)  # the fourth has no rows
    fitted = Gaussian.fit(found, 0, rank=24)
    means = np.stack([train[labels == label, 0].mean(0) for label in range(3)])
    reference = OAS(assume_centered=True).fit(train[:, 0] - means[labels])
    test = features(40, seed=2)[:, 0]
    centred = test[:, None] - means
    distances = np.einsum("nkd,de,nke->nk", centred, reference.precision_, centred)
    np.testing.assert_allclose(fitted.score(test), -distances.min(1) / 2, rtol=1e-6)


def test_neighbours_are_scikit_learns():
    train, test = features(80), features(30, seed=1)
    kept = KeptRows(60)
    keys = [bytes([i]) for i in range(80)]
    for part in (slice(40, 80), slice(0, 40)):  # in another order, by two processes
        other = KeptRows(60)
        other.add(keys[part], train[part])
        kept.merge(other)
    bank = kept.stacked()
    assert bank.shape == (2, 60, 24)
    search = NearestNeighbors(n_neighbors=10, metric="cosine").fit(train[:60, 1])
    expected = -search.kneighbors(test[:, 1])[0][:, -1]
    np.testing.assert_allclose(neighbour_scores(bank[1], test[:, 1]), expected, atol=1e-6)


def test_the_order_of_rows_does_not_matter():
    rows = features(100)
    one, other = moments_of(rows), moments_of(rows[::-1], parts=3)
    first, second = (Gaussian.fit(each, 0).score(rows[:, 0]) for each in (one, other))
    np.testing.assert_allclose(first, second, rtol=1e-8)


def test_scores_of_groups_are_put_on_one_scale():
    scores = np.array([[1.0, 100.0], [3.0, 300.0]])
    centre, spread = standard(scores, ["one", "two"])
    np.testing.assert_allclose(combined(scores, centre, spread), [-1, 1])


def test_what_cannot_be_fitted_is_refused():
    rows = features(60)
    rows[7, 1, 3] = np.nan
    with pytest.raises(UserError, match="row q7 hold NaN"):
        normalised(rows, [f"q{i}" for i in range(60)])
    with pytest.raises(UserError, match="same in all 60 rows"):
        Gaussian.fit(moments_of(np.repeat(features(1), 60, 0)), 0)
    with pytest.raises(UserError, match="at least 50 rows, found 20"):
        Gaussian.fit(moments_of(features(20)), 0)
    with pytest.raises(UserError, match="same for all 3 held-out rows"):
        standard(np.ones((3, 2)), ["one", "two"])
    same = KeptRows()
    same.add([bytes([i]) for i in range(60)], np.repeat(features(1), 60, 0))
    with pytest.raises(UserError, match="same in all rows"):
        same.stacked()
