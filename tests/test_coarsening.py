"""Groups of rows that stand for a large tissue."""

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.base import clone

import pdvi
from pdvi import graphs, metrics
from pdvi.mixtures import Recipe, pipeline
from pdvi.mixtures.coarse import coarsened

SMALL = Recipe(group_above=900, group_size=4)  # for which the tissue below is large


@pytest.fixture(scope="module")
def tissue():
    return pdvi.datasets.tissue_features(4_001, n_features=6, n_domains=5, patchiness=8, seed=1)


def test_groups_are_small_compact_and_complete(tissue):
    graph = graphs.nearest(tissue.coordinates, 6)
    coarse = coarsened(tissue.X, graph, tissue.coordinates, 4)
    sizes = np.bincount(coarse.group)
    assert sizes.max() == 4
    assert (sizes == 4).sum() >= len(sizes) - 1
    away = np.linalg.norm(tissue.coordinates - coarse.coordinates[coarse.group], axis=1)
    assert np.mean(away < 1.5) > 0.95  # spots of a grid: two by two
    for k in (0, 17, len(sizes) - 1):
        np.testing.assert_allclose(coarse.X[k], tissue.X[coarse.group == k].mean(0), rtol=1e-5, atol=1e-5)


def test_groups_are_coupled_as_rows_were(tissue):
    graph = graphs.weights(graphs.nearest(tissue.coordinates, 6), tissue.X)
    coarse = coarsened(tissue.X, graph, tissue.coordinates, 4)
    assert abs(coarse.graph - coarse.graph.T).max() < 1e-5
    assert coarse.graph.diagonal().max() == 0
    assert coarse.graph.sum() / coarse.graph.shape[0] == pytest.approx(graph.sum() / len(tissue.X), rel=1e-4)
    row, column = sp.coo_array(graph).coords
    a, b = coarse.group[row[0]], coarse.group[column[0]]
    assert a == b or coarse.graph[a, b] > 0


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_neighbours_on_the_curve_are_neighbours_in_space(dim):
    points = np.random.default_rng(0).uniform(size=(2_000, dim))
    along = points[pdvi.partition.along_curve(points)]
    steps = np.linalg.norm(np.diff(along, axis=0), axis=1)
    at_random = np.linalg.norm(np.diff(points, axis=0), axis=1)
    assert np.median(steps) < 0.3 * np.median(at_random)


@pytest.mark.slow
def test_a_large_tissue_begins_with_groups_and_ends_as_well(tissue, monkeypatch):
    graph = graphs.weights(graphs.nearest(tissue.coordinates, 6), tissue.X)
    rows = []
    inner = pipeline.fit_rows

    def watched(given, *arguments, **named):
        rows.append(len(given.X))
        return inner(given, *arguments, **named)

    monkeypatch.setattr(pipeline, "fit_rows", watched)
    fit = {"graph": graph, "coordinates": tissue.coordinates}
    plain = pdvi.PottsMixture(5, random_state=0).fit(tissue.X, **fit)
    on_groups = pdvi.PottsMixture(5, random_state=0, recipe=SMALL)
    large, again = (clone(on_groups).fit(tissue.X, **fit) for _ in range(2))
    assert rows[:4] == [4_001, 251, 1_001, 4_001]  # from the coarsest to the rows themselves
    assert metrics.ari(tissue.labels, large.labels_) > metrics.ari(tissue.labels, plain.labels_) - 0.02
    np.testing.assert_array_equal(large.labels_, again.labels_)
    by_hand = clone(on_groups).fit(tissue.X, start=on_groups.of_groups(tissue.X, **fit), **fit)
    np.testing.assert_array_equal(large.labels_, by_hand.labels_)
    started = clone(on_groups).fit(tissue.X, start=plain.probabilities_, **fit)
    assert rows[-3:] == [251, 1_001, 4_001]  # groups of known probabilities too
    assert metrics.ari(tissue.labels, started.labels_) > metrics.ari(tissue.labels, plain.labels_) - 0.02
    assert large.fit_seconds_ > large.result_.trace["seconds"].iloc[-1]


def test_fixed_noise_and_rows_without_places_are_fitted_as_they_are(tissue):
    """The noise of a group's mean is not that of its rows."""
    graph = graphs.weights(graphs.nearest(tissue.coordinates, 6), tissue.X)
    fixed = pdvi.PottsMixture(5, estimate_noise=False, recipe=SMALL)
    assert fixed.of_groups(tissue.X, graph=graph, coordinates=tissue.coordinates) is None
    assert pdvi.PottsMixture(5, recipe=SMALL).of_groups(tissue.X, graph=graph, coordinates=None) is None
