"""The Gaussian mixture against an independent NumPy reference, in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq

import pdvi
from pdvi.mixtures import EmpiricalBayes, empirical_bayes, from_labels, gaussian_mixture_problem
from pdvi.models.gaussian_mixture import log_variance
from pdvi.shards.partition import consecutive, layout
from pdvi.shards.stacking import take

N, D, K = 90, 3, 4
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, D)) * [1.0, 2.0, 0.5] + 3.0
SETTINGS = EmpiricalBayes(
    RNG.standard_normal((K, D)) + 3, RNG.standard_normal(D), np.array([1.5, 0.7, 2.0]), np.array([0.6, 1.3, 0.2])
)
PARTITIONS = {
    "one": np.zeros(N, int),
    "equal": consecutive(N, 9),
    "uneven": RNG.integers(0, 5, N),
    "single rows": np.arange(N),
}


def negative_elbo(phi, mean, log_var, settings=SETTINGS, weights=None):
    """From the formulas for the expectations, nothing shared with the library."""
    weights = np.full(K, 1 / K) if weights is None else weights
    total = 0.0
    for i in range(N):
        for k in range(K):
            if phi[i, k] > 0:
                squares = (X[i] - mean[k]) ** 2 + np.exp(log_var[k])
                normal = -0.5 * np.sum(np.log(2 * np.pi * settings.noise_variance) + squares / settings.noise_variance)
                total -= phi[i, k] * (normal + np.log(weights[k]) - np.log(phi[i, k]))
    prior = settings.prior_variance
    for k in range(K):
        squares = (mean[k] - settings.prior_mean) ** 2 + np.exp(log_var[k])
        total += 0.5 * np.sum(np.log(2 * np.pi * prior) + squares / prior)
        total -= 0.5 * np.sum(np.log(2 * np.pi * np.e * np.exp(log_var[k])))
    return total


def random_point():
    rng = np.random.default_rng(5)
    phi = rng.dirichlet(np.ones(K) * 0.3, N)
    return phi, rng.standard_normal((K, D)), rng.standard_normal((K, D)) - 2


def flat(problem, mean, log_var):
    return problem.ravel({"mean": jnp.asarray(mean), "log_var": jnp.asarray(log_var)})


def masked(where, phi):
    return jnp.asarray(where.shard(phi) * where.mask[..., None])


@pytest.mark.parametrize("name", PARTITIONS)
def test_shard_losses_add_up_to_the_negative_elbo(x64, name):
    where = layout(np.unique(PARTITIONS[name], return_inverse=True)[1])
    problem = gaussian_mixture_problem(X, SETTINGS, where)
    phi, mean, log_var = random_point()
    losses, _ = problem.evaluate(flat(problem, mean, log_var), masked(where, phi))
    np.testing.assert_allclose(losses.sum(), negative_elbo(phi, mean, log_var), rtol=1e-11)


@pytest.mark.parametrize("solver", [pdvi.P2DVI(), pdvi.CAVI(), pdvi.MemoizedVB()], ids=lambda s: type(s).__name__)
def test_the_answer_is_a_stationary_point_of_the_reference(x64, solver):
    where = layout(PARTITIONS["uneven"])
    problem = gaussian_mixture_problem(X, SETTINGS, where)
    result = pdvi.fit(problem, solver, max_epochs=3000, tol=0, grad_tol=1e-10, log_every=20)
    assert result.converged
    phi = where.unshard(result.local_params)
    mean, log_var = result.global_params["mean"], result.global_params["log_var"]
    np.testing.assert_allclose(result.objective, negative_elbo(phi, mean, log_var), rtol=1e-10)

    rows = (X[:, None] - mean) ** 2 + np.exp(log_var)
    logits = -0.5 * (rows / SETTINGS.noise_variance).sum(-1)
    best = np.exp(logits - logits.max(1, keepdims=True))
    best /= best.sum(1, keepdims=True)
    np.testing.assert_allclose(phi, best, atol=1e-7)

    mass = phi.sum(0)[:, None]
    gradient_mean = (mass * mean - phi.T @ X) / SETTINGS.noise_variance
    gradient_mean += (mean - SETTINGS.prior_mean) / SETTINGS.prior_variance
    np.testing.assert_allclose(gradient_mean, 0, atol=1e-6)
    precision = mass / SETTINGS.noise_variance + 1 / SETTINGS.prior_variance
    np.testing.assert_allclose(np.exp(log_var) * precision, 1, atol=1e-7)


def test_closed_form_steps_are_minimisers(x64):
    where = layout(PARTITIONS["uneven"])
    problem = gaussian_mixture_problem(X, SETTINGS, where)
    phi, mean, log_var = random_point()
    rng = np.random.default_rng(1)
    shard, local = take(problem.shards, 1), masked(where, phi)[1]
    augmentation = problem.augmentation(
        flat(problem, mean, log_var),
        jnp.asarray(rng.standard_normal(2 * K * D)) * 0.1,
        jnp.asarray(rng.uniform(0.5, 2, 2 * K * D)),
    )
    best = problem.model.global_step(problem.model.statistics(local, shard), augmentation)
    slope = jax.grad(lambda g: problem.model.loss(local, g, shard) + augmentation(g))(best)
    np.testing.assert_allclose(problem.ravel(slope), 0, atol=1e-10)


def test_statistics_add_over_shards(x64):
    phi, *_ = random_point()
    sums = []
    for patch in (PARTITIONS["one"], PARTITIONS["uneven"]):
        where = layout(patch)
        problem = gaussian_mixture_problem(X, SETTINGS, where)
        table = problem.map_shards(problem.model.statistics, masked(where, phi))
        sums.append(jax.tree.map(lambda leaf: np.asarray(leaf.sum(0)), table))
    for a, b in zip(*sums):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_curvature_is_the_hessian_where_it_says(x64):
    """At equal weights, and for the log-variances at their optimum."""
    where = layout(PARTITIONS["equal"])
    problem = gaussian_mixture_problem(X, SETTINGS, where)
    shard, phi = take(problem.shards, 0), jnp.full((10, K), 1 / K)
    shares = jnp.asarray(N / K / SETTINGS.noise_variance + 1 / SETTINGS.prior_variance)
    globals_ = {"mean": jnp.zeros((K, D)), "log_var": jnp.broadcast_to(-jnp.log(shares), (K, D))}
    lam = problem.ravel(globals_)
    exact = jnp.diagonal(jax.hessian(lambda x: problem.loss(phi, x, shard))(lam))
    np.testing.assert_allclose(problem.ravel(problem.model.curvature(phi, globals_, shard)), exact, rtol=1e-10)


@pytest.mark.parametrize("centre", [-50.0, -3.0, 0.0, 50.0])
def test_log_variance_solves_its_equation_at_any_scale(x64, centre):
    for a in np.geomspace(1e-6, 1e6, 13):
        for penalty in (1e-6, 1e-2, 1.0, 1e4):
            for half, dual in ((0.5, 0.0), (0.01, 0.3), (0.5, -2.0)):

                def equation(rho, a=a, penalty=penalty, half=half, dual=dual):
                    return a * np.exp(rho) - half + dual + penalty * (rho - centre)

                root = float(log_variance(*map(jnp.asarray, (a, half, centre, dual, penalty))))
                low, high = min(root, centre) - 1e3, min(max(root, centre) + 1e3, 600.0)
                while equation(low) > 0:
                    low *= 10
                expected = brentq(equation, low, high, xtol=1e-13, rtol=1e-14)
                np.testing.assert_allclose(root, expected, rtol=1e-9, atol=1e-9)


def test_log_variance_without_a_penalty_is_the_coordinate_ascent_update(x64):
    root = log_variance(*map(jnp.asarray, (3.0, 0.5, 7.0, 0.0, 0.0)))
    np.testing.assert_allclose(root, np.log(0.5 / 3.0), rtol=1e-12)


def test_log_variance_in_single_precision():
    for a in np.geomspace(1e-6, 1e6, 13):
        root = float(log_variance(*map(jnp.asarray, (a, 0.5, -50.0, 0.0, 1e-3))))
        residual = a * np.exp(root) - 0.5 + 1e-3 * (root + 50)
        assert abs(residual) < 1e-4 * (a * np.exp(root) + 0.5 + 1e-3 * abs(root + 50))


def test_empirical_bayes_is_the_papers(x64):
    labels = np.arange(N) % 3
    means = np.array([X[labels == k].mean(0) for k in range(3)])
    settings = from_labels(X, labels, means)
    np.testing.assert_allclose(settings.prior_mean, X.mean(0))
    np.testing.assert_allclose(settings.noise_variance, np.mean([X[labels == k].var(0) for k in range(3)], 0))
    np.testing.assert_allclose(settings.prior_variance, means.var(0))


def test_a_constant_feature_gets_a_floor():
    constant = np.column_stack([X, np.full(N, 7.0)])
    settings = empirical_bayes(constant, K)
    assert (settings.noise_variance > 0).all()
    assert (settings.prior_variance > 0).all()
    fitted = pdvi.GaussianMixture(K, random_state=0).fit(constant)
    assert np.isfinite(fitted.elbo_)
    np.testing.assert_allclose(fitted.means_[:, 3], 7.0, rtol=1e-5)
