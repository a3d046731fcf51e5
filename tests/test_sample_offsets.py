"""Offsets of samples: against an independent reference, the joint optimum, and what they are for."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp

import pdvi
from models_for_tests import offset_problem, two_samples
from pdvi.mixtures.fit_mixture import FitOptions, fit_mixture
from pdvi.mixtures.init import kmeans_labels, one_hot
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.shards.stacking import take

evaluate = eqx.filter_jit(lambda problem, lam, local: problem.evaluate(lam, local)[0].sum())


def reference(tissue, model, phi, globals_):
    """The negative ELBO without log Z, row by row and edge by edge."""
    noise, prior = 1 / np.asarray(model.precision), np.asarray(model.prior_variance)
    mean, log_var = globals_["mean"], globals_["log_var"]
    offset, offset_log_var = globals_["offset"], globals_["offset_log_var"]
    total = 0.0
    for x, s, q in zip(tissue.X, tissue.sample, phi):
        square = (x - mean - offset[s]) ** 2 + np.exp(log_var) + np.exp(offset_log_var[s])
        normal = -0.5 * (np.log(2 * np.pi * noise) + square / noise).sum(1)
        total += np.sum(q * (np.log(q) - normal + np.log(len(q))))
    for i, j, r in zip(*sp.find(sp.triu(0.3 * tissue.graph, k=1))):
        total -= r * phi[i] @ phi[j]
    gap = (mean - np.asarray(model.prior_mean)) ** 2 + np.exp(log_var)
    total += 0.5 * np.sum(gap / prior + np.log(prior) - log_var - 1)
    s2 = np.asarray(model.offset_variance)[:, None]
    return total + 0.5 * np.sum((offset**2 + np.exp(offset_log_var)) / s2 + np.log(s2) - offset_log_var - 1)


@pytest.mark.parametrize("n_patches", [1, 5])
def test_the_objective_is_that_of_the_textbook_however_the_tissue_is_cut(x64, n_patches):
    tissue = two_samples(120)
    problem, where = offset_problem(tissue, n_patches)
    rng = np.random.default_rng(0)
    lam = problem.init(jax.random.key(0))[0] + 0.3 * rng.standard_normal(problem.n_global)
    phi = rng.dirichlet(np.ones(4), len(tissue.X))
    local = jnp.asarray(where.shard(phi) * where.mask[..., None])
    globals_ = jax.tree.map(np.asarray, problem.unravel(lam))
    np.testing.assert_allclose(
        evaluate(problem, lam, local), reference(tissue, problem.model, phi, globals_), rtol=1e-10
    )


def test_the_offsets_are_found_with_the_means(x64):
    """The best of both at once: the gradient of a whole sweep's objective vanishes in all globals."""
    problem, _ = offset_problem(two_samples(600), 1)
    result = pdvi.fit(problem, pdvi.CAVI(), max_epochs=300, tol=1e-13)
    lam = problem.ravel(result.global_params)
    shard = take(problem.shards, 0)
    slope = jax.grad(problem.loss, argnums=1)(problem.read(result.local_params, jnp.asarray(0)), lam, shard)
    np.testing.assert_allclose(slope, 0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", [pdvi.PDVI, pdvi.P2DVI, pdvi.MemoizedVB, pdvi.SVI])
def test_every_kind_of_method_runs_it(method, x64):
    problem, _ = offset_problem(two_samples(600), 6)
    best = pdvi.fit(problem, pdvi.CAVI(), max_epochs=100).objective
    found = pdvi.fit(problem, method(), max_epochs=100, seed=0).objective
    assert found < best + (0.1 if method is pdvi.SVI else 0.01) * abs(best)  # SVI's steps shrink too fast to arrive


def test_a_batch_effect_does_not_become_domains(x64):
    tissue = two_samples(1_200, shift=6.0)
    problem, where = offset_problem(tissue, 1)
    result = pdvi.fit(problem, pdvi.CAVI(), max_epochs=100)
    labels = where.unshard(result.local_params).argmax(1)
    assert pdvi.metrics.ari(tissue.truth, labels) > 0.9
    difference = result.global_params["offset"][1] - result.global_params["offset"][0]
    np.testing.assert_allclose(difference + tissue.mean[1] - tissue.mean[0], tissue.shift, atol=0.3)


@pytest.mark.parametrize("covariance", ["tied", "diagonal"])
def test_one_fit_finds_offsets_noise_and_weights(covariance):
    """The shift between the samples is large, and domains have other sizes in each."""
    tissue = two_samples(1_200, shift=6.0)
    X = tissue.X + tissue.mean[tissue.sample]
    options = {"n_shards": 6, "beta": 0.3, "sample": tissue.sample}
    sharded = ShardedGraph(len(X), tissue.graph.astype(float), tissue.coordinates, **options)
    start = one_hot(kmeans_labels(tissue.X, 4, runs=4), 4)
    fitted = fit_mixture(X, sharded, start, FitOptions(covariance=covariance))
    assert pdvi.metrics.ari(tissue.truth, fitted.labels) > 0.95
    back = np.linalg.inv(fitted.whitening)
    offset = fitted.offset + np.asarray(fitted.result.global_params["offset"]) @ back.T
    np.testing.assert_allclose(offset[1] - offset[0], tissue.shift, atol=0.1)
    precision = np.asarray(fitted.result.global_params["precision"])
    noise = back @ (np.linalg.inv(precision) if covariance == "tied" else np.diag(1 / precision)) @ back.T
    np.testing.assert_allclose(noise, 0.25 * np.eye(3), atol=0.03)


def test_samples_without_a_shift_are_fitted_as_one(x64):
    tissue = two_samples(600, shift=0.0)
    X = tissue.X + tissue.mean[tissue.sample]
    start = one_hot(tissue.truth, 4)
    where = {"n_shards": 3, "beta": 0.3}
    graph = tissue.graph.astype(float)
    with_offsets = ShardedGraph(len(X), graph, tissue.coordinates, sample=tissue.sample, **where)
    apart, together = (
        fit_mixture(X, sharded, start, FitOptions())
        for sharded in (with_offsets, ShardedGraph(len(X), graph, tissue.coordinates, **where))
    )
    assert pdvi.metrics.ari(apart.labels, together.labels) > 0.98
    offset = apart.offset + np.asarray(apart.result.global_params["offset"]) @ np.linalg.inv(apart.whitening).T
    np.testing.assert_allclose(offset[1] - offset[0], 0, atol=0.15)
