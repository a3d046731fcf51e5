"""Groups of rows that stand for a large tissue."""

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.base import clone

import pdvi
from pdvi import graphs, metrics
from pdvi.mixtures import Config, graph_estimators
from pdvi.mixtures.coarsen import coarsen

SMALL = Config(group_above=900, group_size=4)  # for which the tissue below is large


@pytest.fixture(scope="module")
def tissue():
    return pdvi.datasets.tissue_features(4_001, n_features=6, n_domains=5, patchiness=8, seed=1)


@pytest.fixture(scope="module")
def graph(tissue):
    return graphs.weights(graphs.nearest(tissue.coordinates, 6), tissue.X)


def test_groups_are_small_compact_and_complete(tissue, graph):
    means, _, centers, group = coarsen(tissue.X, graph, tissue.coordinates, 4)
    sizes = np.bincount(group)
    assert sizes.max() == 4
    assert (sizes == 4).sum() >= len(sizes) - 1
    away = np.linalg.norm(tissue.coordinates - centers[group], axis=1)
    assert np.mean(away < 1.5) > 0.95  # spots of a grid: two by two
    for k in (0, 17, len(sizes) - 1):
        np.testing.assert_allclose(means[k], tissue.X[group == k].mean(0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(centers[k], tissue.coordinates[group == k].mean(0), rtol=1e-5, atol=1e-5)


def test_groups_are_coupled_as_rows_were(tissue, graph):
    _, between, _, group = coarsen(tissue.X, graph, tissue.coordinates, 4)
    assert abs(between - between.T).max() < 1e-5
    assert between.diagonal().max() == 0
    assert between.sum() / between.shape[0] == pytest.approx(graph.sum() / len(tissue.X), rel=1e-4)
    row, column = sp.coo_array(graph).coords
    a, b = group[row[0]], group[column[0]]
    assert a == b or between[a, b] > 0


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_neighbors_on_the_curve_are_neighbors_in_space(dim):
    points = np.random.default_rng(0).uniform(size=(2_000, dim))
    along = points[pdvi.partition.along_curve(points)]
    steps = np.linalg.norm(np.diff(along, axis=0), axis=1)
    at_random = np.linalg.norm(np.diff(points, axis=0), axis=1)
    assert np.median(steps) < 0.3 * np.median(at_random)


@pytest.fixture
def fitted_rows(monkeypatch):
    """How many rows each fit of a Potts mixture had."""
    rows, inner = [], graph_estimators.fit_mixture

    def watched(X, *arguments):
        rows.append(len(X))
        return inner(X, *arguments)

    monkeypatch.setattr(graph_estimators, "fit_mixture", watched)
    return rows


@pytest.mark.slow
def test_a_large_tissue_begins_with_groups_and_ends_as_well(tissue, graph, fitted_rows):
    fit = {"graph": graph, "coordinates": tissue.coordinates}
    plain = pdvi.PottsMixture(5, random_state=0).fit(tissue.X, **fit)
    assert set(fitted_rows) == {4_001}
    fitted_rows.clear()
    on_groups = pdvi.PottsMixture(5, random_state=0, config=SMALL)
    large, again = (clone(on_groups).fit(tissue.X, **fit) for _ in range(2))
    half = fitted_rows[: len(fitted_rows) // 2]
    assert list(dict.fromkeys(half)) == [251, 1_001, 4_001]  # from the coarsest to the rows themselves
    assert metrics.ari(tissue.labels, large.labels_) > metrics.ari(tissue.labels, plain.labels_) - 0.02
    np.testing.assert_array_equal(large.labels_, again.labels_)
    assert large.fit_seconds_ > large.result_.trace["seconds"].iloc[-1]


def test_given_probabilities_and_rows_without_places_are_fitted_as_they_are(tissue, graph, fitted_rows):
    known = np.eye(5)[tissue.labels]
    mixture = pdvi.PottsMixture(5, random_state=0, config=SMALL)
    started = clone(mixture).fit(tissue.X, graph=graph, coordinates=tissue.coordinates, start=known)
    assert metrics.ari(tissue.labels, started.labels_) > 0.8
    clone(mixture).fit(tissue.X, graph=graph)
    assert set(fitted_rows) == {4_001}
