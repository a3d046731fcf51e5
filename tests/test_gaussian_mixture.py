"""The Gaussian mixture against an independent NumPy reference, in double precision."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq

import pdvi
from pdvi.mixtures import CONFIG, EmpiricalBayes, empirical_bayes, from_labels, gaussian_mixture_problem
from pdvi.mixtures.density import Density
from pdvi.mixtures.fit_mixture import FitOptions, fit_mixture
from pdvi.mixtures.init import kmeans_labels, one_hot
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.models.closed_forms import log_variance
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


def test_closed_form_steps_are_minimizers(x64):
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
    for name, one in sums[0]._asdict().items():
        if one is not None:  # there are no samples
            np.testing.assert_allclose(getattr(sums[1], name), one, rtol=1e-12)
    np.testing.assert_allclose(sums[0].total, phi.T @ X, rtol=1e-12)
    np.testing.assert_allclose(sums[0].square, (X**2).sum(0), rtol=1e-12)


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


@pytest.mark.parametrize("center", [-50.0, -3.0, 0.0, 50.0])
def test_log_variance_solves_its_equation_at_any_scale(x64, center):
    for a in np.geomspace(1e-6, 1e6, 13):
        for penalty in (1e-6, 1e-2, 1.0, 1e4):
            for half, dual in ((0.5, 0.0), (0.01, 0.3), (0.5, -2.0)):

                def equation(rho, a=a, penalty=penalty, half=half, dual=dual):
                    return a * np.exp(rho) - half + dual + penalty * (rho - center)

                root = float(log_variance(*map(jnp.asarray, (a, half, center, dual, penalty))))
                low, high = min(root, center) - 1e3, min(max(root, center) + 1e3, 600.0)
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


def clouds(n=1_500, seed=0):
    """Three clouds of different sizes with a common, tilted covariance."""
    rng = np.random.default_rng(seed)
    weights, covariance = np.array([0.5, 0.3, 0.2]), np.array([[1.0, 0.6], [0.6, 2.0]])
    truth = rng.choice(3, n, p=weights)
    means = np.array([[0.0, 0.0], [8.0, 0.0], [0.0, 9.0]])
    return means[truth] + rng.multivariate_normal([0, 0], covariance, n), truth, means, covariance, weights


def test_a_constant_feature_gets_a_floor():
    rows, truth, *_ = clouds()
    constant = np.column_stack([rows, np.full(len(rows), 7.0)])
    settings = empirical_bayes(constant, 3)
    assert (settings.noise_variance > 0).all()
    assert (settings.prior_variance > 0).all()
    fitted = pdvi.GaussianMixture(3, random_state=0).fit(constant)
    assert np.isfinite(fitted.elbo_)
    np.testing.assert_allclose(fitted.means_[:, 2], 7.0, rtol=1e-5)
    assert pdvi.metrics.ari(fitted.labels_, truth) > 0.99


@pytest.mark.parametrize("covariance", ["tied", "diagonal"])
def test_one_fit_finds_means_noise_and_weights(covariance):
    rows, truth, means, noise, weights = clouds()
    sharded = ShardedGraph(len(rows), n_shards=5)
    fitted = fit_mixture(rows, sharded, one_hot(kmeans_labels(rows, 3, runs=3), 3), FitOptions(covariance=covariance))
    assert fitted.result.converged
    density = Density(fitted)
    order = [int(np.bincount(fitted.labels[truth == k]).argmax()) for k in range(3)]
    np.testing.assert_allclose(density.means[order], means, atol=0.15)
    np.testing.assert_allclose(np.exp(density.log_weights[order]), weights, atol=0.03)
    expected = noise if covariance == "tied" else np.diag(np.diag(noise))
    np.testing.assert_allclose(density.covariances[0], expected, atol=0.15)


def test_noise_and_weights_are_the_weighted_averages(x64):
    """At the end of a fit, up to one row of the prior for the noise and one for each weight."""
    rows, *_ = clouds(300)
    config = dataclasses.replace(CONFIG, tol=1e-12, max_epochs=500)
    sharded = ShardedGraph(len(rows), n_shards=3)
    start = one_hot(kmeans_labels(rows, 3, runs=3), 3, float)
    fitted = fit_mixture(rows, sharded, start, FitOptions(config=config))
    phi, blocks = fitted.probabilities, fitted.result.global_params
    np.testing.assert_allclose(np.exp(blocks["log_weight"]), (phi.sum(0) + 1) / (len(rows) + 3), rtol=1e-5)
    seen = (rows - fitted.offset) @ fitted.whitening.T
    residuals = seen[:, None] - blocks["mean"]
    scatter = np.einsum("nk,nkd,nke->de", phi, residuals, residuals) + np.diag(phi.sum(0) @ np.exp(blocks["log_var"]))
    expected = (scatter + np.eye(2)) / (len(rows) + 1)
    np.testing.assert_allclose(np.linalg.inv(blocks["precision"]), expected, rtol=1e-5, atol=1e-6)


def test_absent_components_change_no_number(x64):
    """So that fits with several numbers of components can be one program."""
    rows, *_ = clouds(300)
    sharded = ShardedGraph(len(rows), n_shards=3)
    start = one_hot(kmeans_labels(rows, 3, runs=3), 3, float)
    alone = fit_mixture(rows, sharded, start, FitOptions())
    padded = fit_mixture(rows, sharded, np.pad(start, ((0, 0), (0, 2))), FitOptions(n_present=3))
    np.testing.assert_allclose(padded.probabilities[:, :3], alone.probabilities, atol=1e-7)
    assert not padded.probabilities[:, 3:].any()
    np.testing.assert_allclose(padded.result.global_params["mean"][:3], alone.result.global_params["mean"], atol=1e-5)


def test_the_order_of_the_rows_and_their_shards_does_not_matter(x64):
    rows, *_ = clouds(300)
    config = dataclasses.replace(CONFIG, tol=1e-10, max_epochs=500)
    start = one_hot(kmeans_labels(rows, 3, runs=3), 3, float)
    one = fit_mixture(rows, ShardedGraph(300, n_shards=2), start, FitOptions(config=config))
    order = np.random.default_rng(1).permutation(300)
    two = fit_mixture(rows[order], ShardedGraph(300, n_shards=5, seed=3), start[order], FitOptions(config=config))
    assert two.objective == pytest.approx(one.objective, rel=1e-9)
    np.testing.assert_allclose(two.probabilities, one.probabilities[order], atol=1e-4)
