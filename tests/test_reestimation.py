"""Variational EM: each step lowers the objective, and its fixed point is right."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import pdvi
from models_for_tests import offset_problem, two_samples
from pdvi.mixtures import EmpiricalBayes, empirical_bayes, gaussian_mixture_problem
from pdvi.mixtures.build import point_at
from pdvi.mixtures.em import variational_em
from pdvi.mixtures.reestimate import reestimate, reweighted
from pdvi.mixtures.reseed import briefly, reseeded
from pdvi.mixtures.restarts import best_of
from pdvi.shards.partition import consecutive, layout

DATA = pdvi.datasets.mixture(3_000, dim=4, n_components=3, batch_size=500, separation=2.0, seed=0)
X = DATA.X.astype(float) * [1.0, 2.0, 0.5, 1.0]
WHERE = layout(consecutive(3_000, 7))  # unequal shards, so that padding would show


def problem_of():
    return gaussian_mixture_problem(X, empirical_bayes(X, 3, seed=0), WHERE)


@pytest.mark.parametrize(("noise", "weights"), [("diagonal", False), (None, True), ("diagonal", True)])
def test_a_step_lowers_the_objective(x64, noise, weights):
    problem = problem_of()
    result = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=3, tol=0)
    better, point, _ = reestimate(problem, result.point, noise=noise, weights=weights)
    losses, _ = better.evaluate(better.ravel(point.global_params), point.local_params)
    assert float(losses.sum()) < result.objective


def test_diagonal_noise_and_weights_are_the_weighted_averages(x64):
    problem = problem_of()
    result = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=3, tol=0)
    better, *_ = reestimate(problem, result.point, noise="diagonal", weights=True)
    phi = WHERE.unshard(result.local_params)
    mean, variance = result.global_params["mean"], np.exp(result.global_params["log_var"])
    squares = np.einsum("nk,nkd->d", phi, (X[:, None] - mean) ** 2 + variance)
    np.testing.assert_allclose(better.model.noise_variance, squares / len(X), rtol=1e-9)
    np.testing.assert_allclose(np.exp(better.model.log_weights), phi.mean(0), rtol=1e-9)


def test_tied_noise_whitens_the_residuals(x64):
    problem = problem_of()
    result = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=3, tol=0)
    better, point, step = reestimate(problem, result.point, noise="tied", weights=False)
    phi = WHERE.unshard(result.local_params)
    mean, variance = result.global_params["mean"], np.exp(result.global_params["log_var"])
    scatter = sum(phi[:, k, None, None] * ((X - mean[k])[:, :, None] * (X - mean[k])[:, None]) for k in range(3)).mean(
        0
    ) + np.diag((phi @ variance).mean(0))
    np.testing.assert_allclose(step @ scatter @ step.T, np.eye(4), atol=1e-5)
    np.testing.assert_allclose(WHERE.unshard(better.shards["x"]), X @ step.T, rtol=1e-9)
    np.testing.assert_allclose(better.model.log_scale, np.linalg.slogdet(step)[1], rtol=1e-9)
    np.testing.assert_allclose(point.global_params["mean"], mean @ step.T, rtol=1e-9)
    np.testing.assert_allclose(better.shards["square"].sum(0), (np.asarray(X @ step.T) ** 2).sum(0), rtol=1e-9)


def test_weights_of_responsibilities_are_those_of_a_reestimation(x64):
    problem = problem_of()
    local = np.random.default_rng(1).dirichlet(np.arange(1.0, 4.0), WHERE.rows.shape) * WHERE.mask[..., None]
    found = reweighted(problem, local)
    expected, *_ = reestimate(problem, point_at(problem, local), noise=None, weights=True)
    np.testing.assert_allclose(found.model.log_weights, expected.model.log_weights, rtol=1e-12)
    np.testing.assert_array_equal(found.model.noise_variance, problem.model.noise_variance)
    assert not np.allclose(found.model.log_weights, problem.model.log_weights)


def test_so_they_are_in_a_mixture_of_samples_with_offsets(x64):
    problem, where = offset_problem(two_samples(300), 3)
    local = np.random.default_rng(1).dirichlet(np.arange(1.0, 5.0), where.rows.shape) * where.mask[..., None]
    found = reweighted(problem, local)
    expected, *_ = reestimate(problem, point_at(problem, local), noise=None, weights=True)
    np.testing.assert_allclose(found.model.mixture.log_weights, expected.model.mixture.log_weights, rtol=1e-12)
    np.testing.assert_array_equal(found.model.offset_variance, problem.model.offset_variance)


def with_an_unused_component(weights=False, apart=8.0):
    """Two clusters share a mean, and the third mean falls back to the middle, where there is nothing."""
    rng = np.random.default_rng(0)
    centres = np.array([[50.0, 0.0], [-50.0, -apart / 2], [-50.0, apart / 2]])
    rows = centres[np.arange(3_000) % 3] + rng.standard_normal((3_000, 2))
    start = np.array([[50.0, 0.0], [-50.0, 0.0], [0.0, 500.0]])
    settings = EmpiricalBayes(start, rows.mean(0), np.full(2, 2_000.0), np.ones(2))
    problem = gaussian_mixture_problem(rows, settings, WHERE)
    common = {"noise": None, "weights": weights, "max_epochs": 60}
    return variational_em(problem, pdvi.CAVI(), **common)


def test_an_unused_component_is_put_to_use():
    fitted = with_an_unused_component()
    left = fitted.result
    assert np.asarray(left.local_params).sum((0, 1)).min() < 1
    mended = reseeded(fitted, briefly(pdvi.CAVI(), left.status, tol=1e-5)).result
    assert mended.objective < left.objective
    assert mended.status is left.status
    assert np.asarray(mended.local_params).sum((0, 1)).min() > 500
    assert "component 2 reseeded" in mended.trace["event"].tolist()


def test_an_unused_component_of_no_weight_is_put_to_use():
    """A learned weight of next to nothing keeps rows away, whatever they are like."""
    fitted = with_an_unused_component(weights=True, apart=5.0)
    attempt = briefly(pdvi.CAVI(), fitted.result.status, tol=1e-5)
    assert float(fitted.problem.model.log_weights.min()) < -12
    as_it_was, mended = reseeded(fitted, attempt), reseeded(fitted, attempt, weights=True)
    assert np.asarray(as_it_was.result.local_params).sum((0, 1)).min() < 50
    assert np.asarray(mended.result.local_params).sum((0, 1)).min() > 500
    assert mended.result.objective < as_it_was.result.objective - 1_000
    np.testing.assert_allclose(np.exp(mended.problem.model.log_weights), 1 / 3, atol=0.01)


def test_a_trial_that_ends_worse_is_not_kept():
    fitted, tried = with_an_unused_component(), []

    def worse(problem, start, left):
        tried.append(start)
        trace = fitted.result.trace
        result = dataclasses.replace(fitted.result, trace=trace.assign(objective=trace["objective"] + 1))
        return fitted._replace(result=result)

    assert reseeded(fitted, worse) is fitted
    assert len(tried) == 1


def test_restarts_are_what_single_runs_reach():
    """The vectorised runs against one fit at a time, on the same draws; P2D-VI alone would listen to the objective."""
    problem = problem_of()
    rng = np.random.default_rng(0)
    starts = [
        {**problem.model.init_global(None), "mean": jnp.asarray(X[rng.choice(3_000, 3)], jnp.float32)} for _ in range(4)
    ]
    found = best_of(problem, pdvi.MemoizedVB(), starts, epochs=5, batch_size=1, seed=3)
    single = []
    for start in starts:
        moved = eqx.tree_at(lambda p: p.model.start, problem, start["mean"])
        single.append(pdvi.fit(moved, pdvi.MemoizedVB(), max_epochs=5, tol=0, seed=3, batch_size=1))
    np.testing.assert_allclose(found.objectives, [result.objective for result in single], rtol=1e-4)
    best = single[int(np.argmin(found.objectives))]
    np.testing.assert_allclose(found.best.global_params["mean"], best.global_params["mean"], rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_annealing_begins_soft_and_ends_at_the_models_temperature():
    tissue = pdvi.datasets.tissue_features(1_600, n_features=10, n_domains=4, noise=1.2, patchiness=8, seed=1)
    graph = pdvi.graphs.weights(pdvi.graphs.nearest(tissue.coordinates, 6), tissue.X)
    plain, annealed = (
        pdvi.PottsMixture(4, beta=0.5, random_state=0, anneal_from=start).fit(tissue.X, graph=graph)
        for start in (None, 5.0)
    )
    assert annealed.elbo_ == pytest.approx(plain.elbo_, rel=0.02)
    assert pdvi.metrics.ari(tissue.labels, annealed.labels_) > 0.7
    with pytest.raises(ValueError, match=r"`anneal_from` must be above `temperature` \(1.0\), got 0.5"):
        pdvi.PottsMixture(4, anneal_from=0.5).fit(tissue.X, graph=graph)


@pytest.mark.slow
def test_with_offsets_a_step_lowers_the_objective(x64):
    problem, _ = offset_problem(two_samples(300), 3)
    result = pdvi.fit(problem, pdvi.CAVI(), max_epochs=3, tol=0)
    before = result.objective
    for noise, weights in (("diagonal", False), ("tied", False), ("tied", True)):
        better, point, _ = reestimate(problem, result.point, noise=noise, weights=weights)
        losses, _ = better.evaluate(better.ravel(point.global_params), point.local_params)
        assert float(losses.sum()) < before


def test_features_that_are_0_change_nothing(x64):
    """Columns of 0 with a narrow prior, as views of fewer components have them, stay out of the noise."""
    settings = empirical_bayes(X, 3, seed=0)
    wider = EmpiricalBayes(
        np.hstack([settings.means, np.zeros((3, 2))]),
        np.append(settings.prior_mean, [0, 0]),
        np.append(settings.prior_variance, [1e-9, 1e-9]),
        np.append(settings.noise_variance, [1, 1]),
    )
    found = []
    for rows, start in ((X, settings), (np.hstack([X, np.zeros((len(X), 2))]), wider)):
        problem = gaussian_mixture_problem(rows, start, WHERE)
        fitted = variational_em(problem, pdvi.CAVI(), noise="tied", weights=True, max_epochs=30)
        found.append(fitted)
    np.testing.assert_allclose(found[1].result.local_params, found[0].result.local_params, atol=1e-4)
    np.testing.assert_allclose(found[1].whitening[:4, :4], found[0].whitening, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(found[1].whitening[4:, 4:], np.eye(2), atol=1e-12)
