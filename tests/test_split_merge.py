"""Moves between local optima: what is proposed, that a move is kept only if it helps, and what it is for."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.cluster import KMeans

import pdvi
from pdvi.mixtures import split_merge
from pdvi.mixtures.density import component_means
from pdvi.mixtures.fit_mixture import FitOptions, fit_mixture
from pdvi.mixtures.init import one_hot
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.mixtures.split_merge import propose_move, split_and_merge

CENTERS = np.array([[0, 0], [12, 0], [0, 12], [12, 12.0]])


def clouds(n=400, centers=CENTERS, seed=0):
    rng = np.random.default_rng(seed)
    truth = np.arange(n) % len(centers)
    return centers[truth] + rng.normal(size=(n, 2)), truth


def means_of(X, probabilities):
    mass = probabilities.sum(0)[:, None]
    return np.where(mass > 0, probabilities.T @ X / np.maximum(mass, 1e-9), X.mean(0))


# ------------------------------------------------------------------------------------------------------- proposals


def test_an_unused_component_takes_one_of_two_clouds_that_share_another():
    X, truth = clouds()
    phi = one_hot(np.array([0, 1, 2, 2])[truth], 4, float)
    found = propose_move(phi, means_of(X, phi), X, None, merge=False)
    np.testing.assert_allclose(found.sum(1), 1)
    assert pdvi.metrics.ari(found.argmax(1), truth) == 1
    np.testing.assert_array_equal(found[truth < 2], phi[truth < 2])  # the others stay as they are


def test_all_unused_components_move_at_once():
    X, truth = clouds()
    phi = one_hot(np.array([0, 0, 2, 2])[truth], 4, float)
    found = propose_move(phi, means_of(X, phi), X, None, merge=False)
    assert pdvi.metrics.ari(found.argmax(1), truth) == 1


def test_where_all_components_are_used_nothing_moves_unless_they_may_be_merged():
    X, truth = clouds()
    labels = np.array([0, 2, 3, 3])[truth]
    labels[(truth == 0) & (X[:, 0] > 0)] = 1  # one cloud in two halves, two clouds in one component
    phi = one_hot(labels, 4, float)
    assert propose_move(phi, means_of(X, phi), X, None, merge=False) is None
    found = propose_move(phi, means_of(X, phi), X, None, merge=True)
    assert pdvi.metrics.ari(found.argmax(1), truth) == 1


def test_where_all_is_well_nothing_is_proposed():
    X, truth = clouds()
    phi = one_hot(truth, 4, float)
    assert propose_move(phi, means_of(X, phi), X, None, merge=True) is None


def test_a_component_of_few_rows_is_not_split():
    X, _ = clouds(3, CENTERS[:3])
    phi = one_hot(np.zeros(3, int), 2, float)
    assert propose_move(phi, means_of(X, phi), X, None, merge=True) is None


def test_the_proposal_leaves_what_it_was_given_alone():
    X, truth = clouds()
    phi = one_hot(np.array([0, 1, 2, 2])[truth], 4, float)
    before = phi.copy()
    propose_move(phi, means_of(X, phi), X, None, merge=True)
    np.testing.assert_array_equal(phi, before)


def test_neighbors_show_two_domains_where_single_rows_do_not():
    """Two halves of a grid that are one standard deviation apart: a split of single rows finds next to nothing."""
    side = 40
    rng = np.random.default_rng(0)
    places = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(-1, 2).astype(float)
    truth = (places[:, 0] >= side / 2).astype(int)
    X = truth[:, None] * np.array([1.0, 0.0]) + rng.normal(size=(side**2, 2))
    phi = one_hot(np.zeros(side**2, int), 2, float)
    graph = sp.csr_array(pdvi.graphs.nearest(places, 8), dtype=float)
    found = propose_move(phi, means_of(X, phi), X, graph, merge=False)
    assert pdvi.metrics.ari(found.argmax(1), truth) > 0.6
    alone = propose_move(phi, means_of(X, phi), X, None, merge=False)
    assert alone is None or pdvi.metrics.ari(alone.argmax(1), truth) < 0.3


# ---------------------------------------------------------------------------------------------------------- moves


def fit_from(X, graph, **options):
    return lambda start: fit_mixture(X, graph, start, FitOptions(**options))


def seen_by(fitted, X):
    return (X - fitted.offset) @ fitted.whitening.T


@pytest.mark.parametrize("covariance", ["tied", "diagonal", "diag", "full"])
@pytest.mark.parametrize("weights", [False, True])
def test_an_unused_component_is_put_to_use(covariance, weights):
    """Whatever its weight has become: a learned one of next to nothing keeps rows away."""
    X, truth = clouds(600, np.array([[50.0, 0.0], [-50.0, -4.0], [-50.0, 4.0]]))
    refit = fit_from(X, ShardedGraph(600, n_shards=3), covariance=covariance, learn_weight=weights)
    left = refit(one_hot(np.minimum(truth, 1), 3))
    assert left.probabilities.sum(0).min() < 1
    mended = split_and_merge(left, seen_by(left, X), refit)
    assert mended.objective < left.objective
    assert pdvi.metrics.ari(mended.labels, truth) > 0.99
    if weights:
        np.testing.assert_allclose(np.exp(mended.result.global_params["log_weight"]), 1 / 3, atol=0.02)


def tissue(beta):
    """Three domains of a noisy tissue: two of them share a component, and the third component begins empty."""
    drawn = pdvi.datasets.tissue_features(1_600, n_features=10, n_domains=3, patchiness=6, seed=2)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3, 10))[drawn.labels] + 1.5 * rng.normal(size=(1_600, 10))
    graph = sp.csr_array(pdvi.graphs.nearest(drawn.coordinates, 12, mutual=False), dtype=float)
    refit = fit_from(X, ShardedGraph(1_600, graph, drawn.coordinates, n_shards=4, beta=beta), learn_weight=False)
    return X, drawn.labels, graph, refit, refit(one_hot(np.minimum(drawn.labels, 1), 3))


def test_on_a_graph_two_domains_that_share_a_component_are_told_apart():
    X, truth, graph, refit, left = tissue(beta=0.8)
    assert left.probabilities.sum(0).min() < 1
    mended = split_and_merge(left, seen_by(left, X), refit, graph=graph)
    assert mended.objective < left.objective - 100
    assert pdvi.metrics.ari(truth, left.labels) < 0.6
    assert pdvi.metrics.ari(truth, mended.labels) > 0.95


def test_a_sliver_is_given_up_where_components_may_be_merged():
    X, truth, graph, refit, left = tissue(beta=0.3)
    assert 30 < left.probabilities.sum(0).min() < 100  # rows here and there
    assert split_and_merge(left, seen_by(left, X), refit, graph=graph) is left
    mended = split_and_merge(left, seen_by(left, X), refit, graph=graph, merge=True)
    assert mended.objective < left.objective - 100
    assert pdvi.metrics.ari(truth, mended.labels) > 0.9


def standing_still(objective, X, truth):
    """A fit with an unused component, of any objective."""
    phi = one_hot(np.array([0, 1, 2, 2])[truth], 4, float)
    result = SimpleNamespace(global_params={"mean": means_of(X, phi)})
    model = SimpleNamespace(covariance="diagonal")
    return SimpleNamespace(probabilities=phi, result=result, model=model, objective=objective)


@pytest.mark.parametrize(("trial", "kept"), [(11.0, False), (10.0, False), (np.nan, False), (9.0, True)])
def test_a_trial_is_kept_only_if_it_ends_better(trial, kept):
    X, truth = clouds()
    left, tried = standing_still(10.0, X, truth), []

    def refit(start):
        tried.append(start)
        return standing_still(trial, X, truth)

    found = split_and_merge(left, X, refit, max_moves=1)
    assert len(tried) == 1
    assert (found is not left) == kept


@pytest.mark.parametrize("max_moves", [0, 1, 3])
def test_there_are_no_more_moves_than_asked_for(max_moves):
    X, truth = clouds()
    tried = []

    def refit(start):
        tried.append(start)
        return standing_still(10.0 - len(tried), X, truth)  # always better, and always one component unused

    found = split_and_merge(standing_still(10.0, X, truth), X, refit, max_moves=max_moves)
    assert len(tried) == max_moves
    assert found.objective == 10.0 - max_moves


def test_means_in_frames_of_their_own_are_found_where_the_rows_are():
    X, truth = clouds()
    fitted = fit_from(X, ShardedGraph(400, n_shards=2), covariance="full")(one_hot(truth, 4))
    own = np.stack([seen_by(fitted, X)[truth == k].mean(0) for k in range(4)])
    np.testing.assert_allclose(component_means(fitted), own, atol=0.05)


# ------------------------------------------------------------------------------------------------ what it is for


def drawn(seed, n=3_000):
    data = pdvi.datasets.mixture(n, dim=10, n_components=5, separation=3.0, seed=seed)
    return data.X, data.labels


def poor_start(X, seed):
    """K-means of ten rows."""
    rows = np.random.default_rng(seed).choice(len(X), 10, replace=False)
    return KMeans(5, n_init=1, random_state=seed).fit(X[rows]).cluster_centers_


def test_poor_starts_end_where_good_ones_do():
    poor, moved = [], []
    for seed in range(6):
        X, truth = drawn(seed)
        graph = ShardedGraph(len(X), n_shards=6)
        refit = fit_from(X, graph, covariance="tied")
        distance = ((X[:, None] - poor_start(X, seed)) ** 2).sum(-1)
        left = refit(one_hot(distance.argmin(1), 5))
        found = split_and_merge(left, seen_by(left, X), refit, merge=True)
        assert found.objective <= left.objective
        poor.append(pdvi.metrics.ari(truth, left.labels))
        moved.append(pdvi.metrics.ari(truth, found.labels))
    assert min(poor) < 0.9  # otherwise this test would show nothing
    assert min(moved) > 0.99, (poor, moved)


@pytest.mark.parametrize("covariance", ["diagonal", "tied"])
def test_nothing_is_moved_where_all_is_well(covariance, monkeypatch):
    X, truth = drawn(0)
    results = []

    def told(fitted, rows, refit, **options):
        results.append((fitted, split_and_merge(fitted, rows, refit, **options)))
        return results[-1][1]

    monkeypatch.setattr("pdvi.mixtures.estimators.split_and_merge", told)
    mixture = pdvi.GaussianMixture(5, covariance=covariance, n_init=3, random_state=0).fit(X)
    ((before, after),) = results
    assert after is before
    assert pdvi.metrics.ari(truth, mixture.labels_) > 0.99


def test_a_split_is_judged_against_that_of_a_normal_cloud():
    rng = np.random.default_rng(0)
    one = rng.normal(size=(4_000, 3)) * [3, 1, 1]
    away = np.array([8, 0, 0])
    two = np.concatenate([one[:2_000] + away, one[2_000:] - away])
    gain_of_one, gain_of_two = (split_merge._split(rows)[0] for rows in (one, two))
    assert abs(gain_of_one) < 0.02 * (one**2).sum()
    assert gain_of_two > 0.2 * (two**2).sum()
    side = split_merge._split(two)[1]
    assert len(side) == pytest.approx(2_000, abs=50)
    of_one_half = (side >= 2_000).mean()
    assert min(of_one_half, 1 - of_one_half) < 0.02
