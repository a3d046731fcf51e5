"""One start reaches what several would: components are exchanged as long as that helps."""

from dataclasses import replace

import numpy as np
import pytest

import pdvi
from pdvi.mixtures.recipe import RECIPE

pytestmark = pytest.mark.slow

POOR = replace(RECIPE, kmeans_rows=10)  # k-means sees ten rows


def data(seed):
    drawn = pdvi.datasets.mixture(5_000, dim=10, n_components=5, separation=3.0, seed=seed)
    order = np.argsort(drawn.labels, kind="stable")
    return drawn.X[order], drawn.labels[order]


def fitted(X, seed, **settings):
    return pdvi.GaussianMixture(5, covariance="tied", random_state=seed, recipe=POOR, **settings).fit(X)


def scores(**settings):
    found = []
    for seed in range(6):
        X, labels = data(seed)
        found.append(pdvi.metrics.ari(labels, fitted(X, seed, **settings).labels_))
    return np.array(found)


def test_poor_starts_end_where_good_ones_do():
    assert (scores(exchange=False) < 0.9).any()  # otherwise this test would show nothing
    assert (scores() > 0.99).all()


def test_an_exchange_never_ends_worse_and_is_told():
    exchanged = 0
    for seed in range(6):
        X, _ = data(seed)
        without, mixture = fitted(X, seed, exchange=False), fitted(X, seed)
        assert mixture.elbo_ >= without.elbo_ - 1e-6 * abs(without.elbo_)
        assert mixture.result_.trace["epoch"].iloc[-1] <= RECIPE.max_epochs
        exchanged += mixture.result_.trace["event"].str.contains("reseeded").any()
    assert exchanged


@pytest.mark.parametrize("covariance", ["diagonal", "tied"])
def test_nothing_is_exchanged_where_all_is_well(covariance):
    X, labels = data(0)
    mixture = pdvi.GaussianMixture(5, covariance=covariance, random_state=0).fit(X)
    assert not mixture.result_.trace["event"].str.contains("reseeded").any()
    assert pdvi.metrics.ari(labels, mixture.labels_) > 0.99
