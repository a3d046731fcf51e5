"""Where the fits end: bounded forms of benchmarks/mixture_quality.py."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.cluster import KMeans

import pdvi
from pdvi import graphs, metrics
from pdvi.mixtures import empirical_bayes, potts_mixture_problem
from pdvi.partition import along_space, layout, median_cuts

K = 5


def biased(seed, bias=0.95):
    return pdvi.datasets.mixture(20_000, batch_size=500, bias=bias, seed=seed)


def poor(data, settings, seed):
    rows = np.random.default_rng(seed).choice(len(data.X), 200, replace=False)
    return settings._replace(means=KMeans(K, n_init=1, random_state=seed).fit(data.X[rows]).cluster_centers_)


def best_known(data, settings):
    """Coordinate ascent from the true labels."""
    truth = np.array([data.X[data.labels == k].mean(0) for k in range(K)])
    return pdvi.fit(data.problem(settings._replace(means=truth)), pdvi.CAVI(), tol=1e-9, max_epochs=300)


def gap(data, settings, solver, reference):
    result = pdvi.fit(data.problem(settings), solver, tol=1e-8, max_epochs=100)
    return (result.objective - reference.objective) / abs(reference.objective), result


@pytest.mark.parametrize("seed", range(5))
def test_biased_batches_end_at_the_optimum_of_the_true_labels(seed):
    data = biased(seed)
    settings = empirical_bayes(data.X, K, seed=seed)
    reference = best_known(data, settings)
    for solver in (pdvi.P2DVI(), pdvi.PDVI()):
        reached, result = gap(data, settings, solver, reference)
        assert reached < 1e-6
    noise = np.tile(settings.noise_variance, (K, 1))
    ours, best = (
        metrics.wasserstein_matched(r.global_params["mean"], noise, data.means, np.ones((K, 10)))
        for r in (result, reference)
    )
    assert ours < best + 1e-3


def test_poor_starts_end_as_well_as_those_of_coordinate_ascent():
    hits = {"P2DVI": 0, "CAVI": 0, "MemoizedVB": 0}
    for seed in range(5):
        data = biased(seed)
        settings = empirical_bayes(data.X, K, seed=seed)
        reference = best_known(data, settings)
        for solver in (pdvi.P2DVI(), pdvi.CAVI(), pdvi.MemoizedVB()):
            hits[type(solver).__name__] += gap(data, poor(data, settings, seed), solver, reference)[0] < 1e-6
    assert hits["P2DVI"] >= max(hits.values()), hits


def test_bias_costs_at_most_twice_the_epochs():
    def epochs(bias):
        total = 0
        for seed in range(3):
            data = biased(seed, bias)
            settings = empirical_bayes(data.X, K, seed=seed)
            reference = best_known(data, settings)
            _, result = gap(data, settings, pdvi.P2DVI(), reference)
            arrived = (result.trace["objective"] - reference.objective) / abs(reference.objective) < 1e-6
            total += result.trace["epoch"][arrived.idxmax()]
        return total

    assert epochs(0.95) <= 2 * epochs(0.0)


def test_exploring_ends_better_than_a_constant_penalty_from_poor_starts():
    """Well separated domains: the model itself finds exploring worth while."""
    tissue = pdvi.datasets.tissue_features(36_864, n_domains=12, noise=1.6, patchiness=15, seed=0)
    graph = graphs.weights(graphs.nearest(tissue.coordinates, 12), tissue.X)
    where = layout(median_cuts(tissue.coordinates, 16), along_space(tissue.coordinates))
    problem = potts_mixture_problem(tissue.X, graph, empirical_bayes(tissue.X, 12), where, beta=0.5)
    assert problem.model.worth_exploring()
    ends = {"default": [], "constant": []}
    for seed in range(4):
        rows = np.random.default_rng(seed).choice(len(tissue.X), 150, replace=False)
        means = KMeans(12, n_init=1, random_state=seed).fit(tissue.X[rows]).cluster_centers_
        poorly = eqx.tree_at(lambda p: p.model.start, problem, jnp.asarray(means, jnp.float32))
        for name, solver in (("default", pdvi.P2DVI()), ("constant", pdvi.P2DVI(continuation=()))):
            ends[name].append(pdvi.fit(poorly, solver, log_every=2).objective)
    assert np.mean(ends["default"]) <= np.mean(ends["constant"]), ends


def test_overlapping_domains_are_not_explored():
    tissue = pdvi.datasets.tissue_features(4_000, n_features=10, n_domains=6, noise=2.0, patchiness=12)
    graph = graphs.weights(graphs.nearest(tissue.coordinates, 8), tissue.X)
    where = layout(median_cuts(tissue.coordinates, 8))
    problem = potts_mixture_problem(tissue.X, graph, empirical_bayes(tissue.X, 6), where)
    assert not problem.model.worth_exploring()
    one = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=4, tol=0)
    two = pdvi.fit(problem, pdvi.P2DVI(continuation=()), max_epochs=4, tol=0)
    np.testing.assert_allclose(one.trace["objective"], two.trace["objective"], rtol=1e-5)
