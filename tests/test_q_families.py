"""The families of `pdvi.q`: entropies, divergences and expectations against integrals of scipy's densities."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from scipy import integrate, stats

from pdvi import q

pytestmark = pytest.mark.usefixtures("x64")

# a family with the density that scipy knows it by, and another of the same family
ONE_NUMBER = {
    "normal": (q.Normal(0.4, 1.7), stats.norm(0.4, 1.7), q.Normal(-1.0, 0.8)),
    "log-normal": (q.LogNormal(0.3, 0.4), stats.lognorm(0.4, scale=np.exp(0.3)), q.LogNormal(-0.2, 1.1)),
    "gamma": (q.Gamma(2.5, 1.7), stats.gamma(2.5, scale=1 / 1.7), q.Gamma(0.9, 3.0)),
    "gamma, steep": (q.Gamma(0.4, 2.0), stats.gamma(0.4, scale=0.5), q.Gamma(2.0, 1.0)),
    "gamma, narrow": (q.Gamma(300.0, 20.0), stats.gamma(300.0, scale=0.05), q.Gamma(290.0, 20.0)),
    "beta": (q.Beta(0.7, 2.5), stats.beta(0.7, 2.5), q.Beta(1.2, 3.0)),
    "beta, narrow": (q.Beta(200.0, 900.0), stats.beta(200.0, 900.0), q.Beta(180.0, 850.0)),
}
SCIPY = {
    "Normal": lambda x: stats.norm(x.mean, x.sd),
    "LogNormal": lambda x: stats.lognorm(np.sqrt(x.variance_log), scale=np.exp(x.mean_log)),
    "Gamma": lambda x: stats.gamma(x.concentration, scale=1 / x.rate),
    "Beta": lambda x: stats.beta(x.a, x.b),
}


def integral(density, function):
    """E f(x) as an integral over quantiles, in pieces towards both ends."""
    ends = [0, 1e-9, 1e-6, 1e-3, 0.1, 0.5, 0.9, 1 - 1e-3, 1 - 1e-6, 1 - 1e-9, 1]
    pieces = itertools.pairwise(ends)
    return sum(integrate.quad(lambda u: function(density.ppf(u)), a, b, epsrel=1e-9)[0] for a, b in pieces)


@pytest.mark.parametrize("name", ONE_NUMBER)
def test_moments_entropy_and_divergence(name):
    x, density, prior = ONE_NUMBER[name]
    np.testing.assert_allclose([x.mean, x.variance], density.stats("mv"), rtol=1e-12)
    np.testing.assert_allclose(x.mean_square, density.moment(2), rtol=1e-10)
    np.testing.assert_allclose(x.entropy(), density.entropy(), rtol=1e-10, atol=1e-10)
    other = SCIPY[type(prior).__name__](prior)
    divergence = integral(density, lambda t: density.logpdf(t) - other.logpdf(t))
    np.testing.assert_allclose(x.kl(prior), divergence, rtol=1e-7)
    np.testing.assert_allclose(x.kl(x), 0, atol=1e-10)
    if not isinstance(x, q.Normal):
        np.testing.assert_allclose(x.mean_log, integral(density, np.log), rtol=1e-7)
    if isinstance(x, q.Beta):
        np.testing.assert_allclose(x.mean_log1m, integral(density, lambda t: np.log1p(-t)), rtol=1e-7)
    elif not isinstance(x, q.Normal):
        square = integral(density, lambda t: np.log(t) ** 2)
        np.testing.assert_allclose(x.variance_log, square - float(x.mean_log) ** 2, rtol=1e-6)


@pytest.mark.parametrize("name", ONE_NUMBER)
def test_expectations_by_quadrature(name):
    x, density, _ = ONE_NUMBER[name]
    more = {"nodes": 80} if isinstance(x, q.Normal | q.LogNormal) else {}
    found = jax.jit(lambda x: (x.expect(jnp.cos, **more), x.expect(jnp.sin, **more)))(x)
    np.testing.assert_allclose(found, [integral(density, np.cos), integral(density, np.sin)], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("x", "rtol"),
    [
        *[(q.Gamma(shape, 2.0), 1e-12) for shape in (0.02, 0.3, 1.0, 17.0, 40.0, 120.0, 1e4, 1e8)],
        *[(q.Beta(a, b), 1e-9) for a, b in [(0.05, 0.05), (0.3, 50.0), (1, 1), (2, 1e4), (1e3, 2e3), (1e6, 10)]],
        (q.Beta(0.05, 1e3), 1e-5),  # the hardest: a long tail on one side, a steep one on the other
    ],
)
def test_quadrature_knows_the_closed_forms_from_wide_to_narrow(x, rtol):
    first, second = jax.jit(lambda x: (x.expect(lambda t: t), x.expect(jnp.square)))(x)
    np.testing.assert_allclose(first, x.mean, rtol=rtol)
    np.testing.assert_allclose(second, x.mean_square, rtol=rtol)


@pytest.mark.parametrize("prior", [q.Gamma(2.0, 1.5), q.LogNormal(0.3, 0.8)])
@pytest.mark.parametrize("x", [q.LogNormal(-0.2, 0.5), q.Gamma(3.0, 2.0)])
def test_divergences_between_families_of_positive_numbers(x, prior):
    density, other = (SCIPY[type(part).__name__](part) for part in (x, prior))
    np.testing.assert_allclose(x.kl(prior), integral(density, lambda t: density.logpdf(t) - other.logpdf(t)), rtol=1e-7)


def test_a_dirichlet_of_two_is_a_beta():
    x, prior = q.Dirichlet(np.array([2.5, 0.7])), q.Dirichlet(np.array([1.2, 3.0]))
    beta, beta_prior = q.Beta(2.5, 0.7), q.Beta(1.2, 3.0)
    np.testing.assert_allclose(x.entropy(), beta.entropy(), rtol=1e-12)
    np.testing.assert_allclose(x.kl(prior), beta.kl(beta_prior), rtol=1e-12)
    np.testing.assert_allclose(x.mean_log, [beta.mean_log, beta.mean_log1m], rtol=1e-12)


def test_dirichlet():
    alpha = np.array([[0.4, 1.0, 2.7], [30.0, 5.0, 0.2]])
    x = q.Dirichlet(alpha)
    references = [stats.dirichlet(row) for row in alpha]
    np.testing.assert_allclose(x.entropy(), [one.entropy() for one in references], rtol=1e-11)
    np.testing.assert_allclose(x.mean, [one.mean() for one in references], rtol=1e-12)
    np.testing.assert_allclose(x.variance, [one.var() for one in references], rtol=1e-12)
    marginals = x.marginals()
    np.testing.assert_allclose(marginals.a, alpha, rtol=1e-12)
    np.testing.assert_allclose(marginals.b, alpha.sum(1, keepdims=True) - alpha, rtol=1e-12)
    np.testing.assert_allclose(marginals.mean_log, x.mean_log, rtol=1e-10)
    prior = stats.dirichlet([2.0, 3.0, 1.5])  # E log p by numbers, then in expectation, linear in E log x
    at = np.array([0.2, 0.5, 0.3])
    np.testing.assert_allclose(q.Dirichlet(np.array([2.0, 3.0, 1.5])).expected_log(at), prior.logpdf(at), rtol=1e-12)
    expected = prior.logpdf(at) + np.array([1.0, 2.0, 0.5]) @ (np.asarray(x.mean_log) - np.log(at)).T
    np.testing.assert_allclose(x.kl(q.Dirichlet(np.array([2.0, 3.0, 1.5]))), -x.entropy() - expected, rtol=1e-11)


def full_normal(d, seed=0):
    rng = np.random.default_rng(seed)
    below = rng.standard_normal(d * (d - 1) // 2)
    return q.FullNormal(rng.standard_normal(d), rng.uniform(0.5, 2, d), below=below)


def test_full_normal():
    x, prior = full_normal(4), full_normal(4, 1)
    S, P = np.asarray(x.covariance), np.asarray(prior.covariance)
    np.testing.assert_allclose(x.entropy(), stats.multivariate_normal(x.mean, S).entropy(), rtol=1e-12)
    away = np.asarray(prior.mean - x.mean)
    trace, logs = np.trace(np.linalg.solve(P, S)), np.linalg.slogdet(P)[1] - np.linalg.slogdet(S)[1]
    divergence = 0.5 * (trace - 4 + away @ np.linalg.solve(P, away) + logs)
    np.testing.assert_allclose(x.kl(prior), divergence, rtol=1e-10)
    diagonal = q.Normal(prior.mean, prior.sd)
    full = q.FullNormal(np.asarray(prior.mean), np.asarray(prior.sd))
    np.testing.assert_allclose(x.kl(diagonal), x.kl(full), rtol=1e-10)
    np.testing.assert_allclose(full.kl(prior), diagonal.entropy().sum() * -1 - prior.expected_log(diagonal), rtol=1e-10)
    at = np.ones(4)
    np.testing.assert_allclose(prior.expected_log(at), stats.multivariate_normal(prior.mean, P).logpdf(at), rtol=1e-10)
    rows = np.random.default_rng(2).standard_normal((5, 4))
    eta = x.linear(rows)
    np.testing.assert_allclose(eta.mean, rows @ np.asarray(x.mean), rtol=1e-12)
    np.testing.assert_allclose(eta.variance, np.diag(rows @ S @ rows.T), rtol=1e-12)


def test_full_normals_by_row():
    each = [full_normal(3, seed) for seed in range(2)]
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    x = np.random.default_rng(0).standard_normal((2, 5, 3))
    eta = both.linear(x)
    for b in range(2):
        np.testing.assert_allclose(eta.mean[b], each[b].linear(x[b]).mean, rtol=1e-12)
        np.testing.assert_allclose(eta.variance[b], each[b].linear(x[b]).variance, rtol=1e-12)
        np.testing.assert_allclose(both[b].covariance, each[b].covariance, rtol=1e-12)


def test_categorical():
    p = np.array([[0.2, 0.5, 0.3], [0.01, 0.01, 0.98]])
    x, prior = q.Categorical(p), q.Categorical(np.array([0.6, 0.3, 0.1]))
    np.testing.assert_allclose(x.probabilities, p, rtol=1e-12)
    np.testing.assert_allclose(x.entropy(), [stats.entropy(row) for row in p], rtol=1e-12)
    np.testing.assert_allclose(x.kl(prior), [stats.entropy(row, prior.mean) for row in p], rtol=1e-12)
    np.testing.assert_allclose(x.expect(np.array([1.0, 2.0, 5.0])), p @ [1, 2, 5], rtol=1e-12)
    assert x.shape == (2, 3)
    assert x.unconstrained()["logits"].shape == (2, 2)


FAMILIES = [
    (q.Normal(np.array([0.4, -1.0]), 1.7), q.Normal(1.0, 2.0)),
    (q.LogNormal(0.4, 0.7), q.LogNormal(1.0, 2.0)),
    (q.LogNormal(0.4, 0.7), q.Gamma(1.5, 2.0)),
    (q.Gamma(2.5, 1.7), q.Gamma(1.0, 2.0)),
    (q.Gamma(25.0, 17.0), q.LogNormal(0.1, 2.0)),
    (q.Beta(2.5, 0.7), q.Beta(1.0, 2.0)),
    (q.Dirichlet(np.array([0.5, 2.0, 14.0])), q.Dirichlet(np.array([1.0, 2.0, 0.5]))),
    (q.Categorical(np.array([0.2, 0.7, 0.1])), q.Categorical(np.array([0.3, 0.3, 0.4]))),
    (full_normal(3), full_normal(3, 1)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("x", "prior"), FAMILIES)
def test_slopes_and_curvatures_are_those_of_finite_differences(x, prior):
    numbers = jax.tree.map(jnp.asarray, x.unconstrained())
    both = jax.jit(lambda parts: type(x)(**parts).entropy().sum() + 3 * type(x)(**parts).kl(prior).sum())
    check_grads(both, (numbers,), order=2, modes=("rev",), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("x", [q.Gamma(0.6, 1.7), q.Beta(2.5, 0.7)])
def test_quadrature_is_smooth_in_the_parameters(x):
    numbers = jax.tree.map(jnp.asarray, x.unconstrained())
    expected = jax.jit(lambda parts: type(x)(**parts).expect(jnp.tanh))
    check_grads(expected, (numbers,), order=2, modes=("rev",), rtol=1e-4)


@pytest.mark.parametrize("x", [x for x, _ in FAMILIES])
def test_the_unconstrained_numbers_give_the_distribution_back(x):
    again = type(x)(**x.unconstrained())
    assert jax.tree.all(jax.tree.map(np.array_equal, x, again))
    assert again.shape == x.shape == x.mean.shape


def entropy_and_slopes(kind, numbers):
    numbers = jax.tree.map(jnp.asarray, numbers)
    return jax.jit(jax.value_and_grad(lambda parts: kind(**parts).entropy()))(numbers)


def test_single_precision_keeps_the_entropy_of_narrow_families():
    """log Gamma(1e6) is 1e7: formulas that subtract such numbers have no digit left."""
    for x in (q.Gamma(1e6, 3.0), q.Dirichlet(np.array([1e6, 2e6, 5e5]))):
        exact, exact_slopes = entropy_and_slopes(type(x), x.unconstrained())
        with jax.enable_x64(False):
            entropy, slopes = entropy_and_slopes(type(x), x.unconstrained())
        assert entropy.dtype == jnp.float32
        np.testing.assert_allclose(entropy, exact, rtol=1e-5)
        for name, slope in slopes.items():
            np.testing.assert_allclose(slope, exact_slopes[name], rtol=0.02, atol=0.02)


def test_fixed_draws_are_exact_for_cubics_and_close_for_others():
    a, b, c = q.Normal(np.array([0.3, -1.0]), 0.7), q.LogNormal(0.2, 0.3), full_normal(2)

    def cubic(a, c):
        return a[0] * a[1] * c[0] + a[0] ** 2 * c[1] + a[1] ** 3

    m, v, u, S = a.mean, a.variance, c.mean, c.covariance
    truth = m[0] * m[1] * u[0] + (m[0] ** 2 + v[0]) * u[1] + m[1] ** 3 + 3 * m[1] * v[1]
    np.testing.assert_allclose(q.expectation(cubic, a, c), truth, rtol=1e-11)
    second = q.expectation(lambda c: jnp.outer(c, c), c)
    np.testing.assert_allclose(second, S + jnp.outer(u, u), rtol=1e-11)
    np.testing.assert_allclose(q.expectation(lambda a, b: a[0] * b, a, b), m[0] * b.mean, rtol=0.01)
    by_draws = q.expectation(lambda a: jax.nn.softplus(a).sum(), a)
    np.testing.assert_allclose(by_draws, a.expect(jax.nn.softplus).sum(), rtol=0.003)
    moved = jax.jit(lambda parts: q.expectation(lambda x, y: jnp.tanh(x.sum() * y), q.Normal(**parts), b))
    check_grads(moved, (jax.tree.map(jnp.asarray, a.unconstrained()),), order=2, modes=("rev",), rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: q.Normal(0.0, -1.0), ValueError, r"`sd` must be positive and finite, got -1.0"),
        (lambda: q.Normal(np.nan, 1.0), ValueError, r"`mean` must be finite, got nan"),
        (lambda: q.Gamma(0.0, 1.0), ValueError, r"`shape` must be positive"),
        (lambda: q.Dirichlet(1.0), ValueError, r"`alpha` must have at least two entries along its last axis"),
        (lambda: q.Categorical(np.ones(1)), ValueError, r"`probabilities` must have at least two entries"),
        (lambda: q.FullNormal(0.0, 1.0), ValueError, r"`mean` must be a vector for FullNormal.*use Normal"),
        (lambda: full_normal(3)[0], TypeError, r"no rows to choose"),
        (lambda: q.Normal().mean_log, TypeError, r"logarithm is not known in closed form for Normal; use a family of"),
        (
            lambda: q.expectation(jnp.sum, q.Gamma()),
            TypeError,
            r"got Gamma: its draws are not smooth.*`expect`",
        ),
        (lambda: q.expectation(jnp.sum, q.Normal(), draws=7), ValueError, r"`draws` must be even"),
        (lambda: q.expectation(jnp.sum, q.Normal(np.zeros(9)), draws=8), ValueError, r"`draws` must be .* at least 18"),
        (lambda: q.bernoulli_logit_lpmf(1, q.Beta()), TypeError, r"`logits` must be normal, or numbers, got Beta"),
    ],
)
def test_what_cannot_be_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


# Expected log densities: at numbers they are scipy's, and in expectation the integral of scipy's.

NUMBERS = [
    (lambda: q.normal_lpdf(0.3, 1, 2), stats.norm(1, 2).logpdf(0.3)),
    (lambda: q.normal_lpdf(0.3, 1, precision=4), stats.norm(1, 0.5).logpdf(0.3)),
    (lambda: q.lognormal_lpdf(0.3, 1, 2), stats.lognorm(2, scale=np.e).logpdf(0.3)),
    (lambda: q.gamma_lpdf(0.3, 2, 3), stats.gamma(2, scale=1 / 3).logpdf(0.3)),
    (lambda: q.beta_lpdf(0.3, 2, 3), stats.beta(2, 3).logpdf(0.3)),
    (lambda: q.dirichlet_lpdf(np.array([0.3, 0.7]), np.array([2.0, 3])), stats.dirichlet([2, 3]).logpdf([0.3, 0.7])),
    (lambda: q.dirichlet_lpdf(np.array([0.3, 0.7]), 2), stats.dirichlet([2, 2]).logpdf([0.3, 0.7])),
    (lambda: q.categorical_lpmf(np.array([1, 0]), np.array([0.3, 0.7])), np.log([0.7, 0.3])),
    (lambda: q.bernoulli_logit_lpmf(1, 0.4), stats.bernoulli(1 / (1 + np.exp(-0.4))).logpmf(1)),
    (lambda: q.binomial_lpmf(3, 5, 0.4), stats.binom(5, 0.4).logpmf(3)),
    (lambda: q.poisson_lpmf(3, 2.5), stats.poisson(2.5).logpmf(3)),
]


@pytest.mark.parametrize(("call", "wanted"), NUMBERS)
def test_densities_of_numbers_are_scipys(call, wanted):
    np.testing.assert_allclose(call(), wanted, rtol=1e-12)


X, TAU, SD, P = q.Normal(0.4, 0.6), q.Gamma(3.0, 2.0), q.LogNormal(0.2, 0.4), q.Beta(2.5, 3.0)


@pytest.mark.parametrize(
    ("found", "density", "function"),
    [
        (lambda: q.normal_lpdf(X, 1, 2), X, lambda x: stats.norm(1, 2).logpdf(x)),
        (lambda: q.normal_lpdf(1.5, X, 2), X, lambda m: stats.norm(m, 2).logpdf(1.5)),
        (lambda: q.normal_lpdf(1.5, 1, SD), SD, lambda s: stats.norm(1, s).logpdf(1.5)),
        (lambda: q.normal_lpdf(1.5, 1, precision=TAU), TAU, lambda t: stats.norm(1, t**-0.5).logpdf(1.5)),
        (lambda: q.lognormal_lpdf(TAU, 1, 2), TAU, lambda t: stats.lognorm(2, scale=np.e).logpdf(t)),
        (lambda: q.gamma_lpdf(SD, 2, 3), SD, lambda t: stats.gamma(2, scale=1 / 3).logpdf(t)),
        (lambda: q.gamma_lpdf(1.2, 2, TAU), TAU, lambda t: stats.gamma(2, scale=1 / t).logpdf(1.2)),
        (lambda: q.beta_lpdf(P, 2, 3), P, lambda p: stats.beta(2, 3).logpdf(p)),
        (lambda: q.binomial_lpmf(3, 7, P), P, lambda p: stats.binom(7, p).logpmf(3)),
        (lambda: q.poisson_lpmf(3, TAU), TAU, lambda t: stats.poisson(t).logpmf(3)),
        (lambda: q.poisson_lpmf(3, X.exp()), X, lambda x: stats.poisson(np.exp(x)).logpmf(3)),
        (lambda: q.bernoulli_logit_lpmf(1, X), X, lambda x: -np.logaddexp(0, -x)),
    ],
)
def test_densities_in_expectation(found, density, function):
    reference = SCIPY[type(density).__name__](density)
    np.testing.assert_allclose(found(), integral(reference, function), rtol=1e-6)


def test_independent_arguments_spread_together():
    """E log N(x | m, 1/tau) over all three is a threefold integral, of which two are sums."""
    x, m, tau = q.Normal(0.4, 0.6), q.Normal(-0.3, 0.2), q.Gamma(3.0, 2.0)
    square = (x.mean - m.mean) ** 2 + x.variance + m.variance
    wanted = tau.expect(lambda t: 0.5 * jnp.log(t) - 0.5 * t * square) - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(q.normal_lpdf(x, m, precision=tau), wanted, rtol=1e-10)
    z, theta = q.Categorical(np.array([0.2, 0.3, 0.5])), q.Dirichlet(np.array([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(q.categorical_lpmf(z, theta), z.mean @ theta.mean_log, rtol=1e-12)


def test_sums_of_normals():
    beta, u = q.Normal(np.array([1.0, -2.0]), np.array([0.5, 0.3])), q.Normal(np.zeros((4, 2)), 0.7)
    x, z = np.random.default_rng(0).standard_normal((2, 4, 3, 2))
    eta = q.independent_sum(beta.linear(x), u.linear(z), 3.0)
    np.testing.assert_allclose(eta.mean, x @ [1, -2] + 3, rtol=1e-12)
    np.testing.assert_allclose(eta.variance, x**2 @ [0.25, 0.09] + 0.49 * (z**2).sum(-1), rtol=1e-12)


def test_a_sum_without_spread_has_slopes():
    """A row whose predictors are all 0 has variance 0, whose root has no slope."""

    def terms(log_sd):
        eta = q.Normal(location=jnp.ones(2), log_sd=log_sd).linear(np.zeros((1, 2)))
        return q.bernoulli_logit_lpmf(1.0, eta).sum()

    assert np.isfinite(jax.jit(jax.hessian(terms))(jnp.zeros(2))).all()
