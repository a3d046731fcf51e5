"""How well the subproblems are minimised, and how the settings steer it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pdvi
from pdvi.shards.stacking import take
from pdvi.solvers.primal_dual.oracles import Direction, default_oracle, descended, with_noise
from test_algorithm import quadratic, stripped


def visit(problem, oracle, lam0, mu, penalty, local=None):
    """What the oracle returns for every shard."""
    local = problem.init(jax.random.key(0))[1] if local is None else local

    @jax.jit
    def all_shards(local, shards):
        return jax.vmap(lambda phi, shard, mu: oracle(problem, phi, shard, lam0, mu, penalty))(local, shards, mu)

    return all_shards(local, problem.shards)


def subproblem(problem, seed=0):
    rng = np.random.default_rng(seed)
    size = problem.n_global
    return rng.standard_normal(size), rng.standard_normal((problem.n_shards, size)), rng.uniform(0.5, 2, size)


@pytest.mark.parametrize("inner", [pdvi.Newton(), pdvi.LBFGS()], ids=["newton", "lbfgs"])
def test_autodiff_reaches_the_closed_form(x64, inner):
    problem = quadratic()
    lam0, mu, penalty = subproblem(problem)
    phi, lam = visit(problem, pdvi.JointStep(), lam0, mu, penalty)
    oracle = pdvi.CoordinateDescent(sweeps=300, tol=1e-9, inner=inner)
    generic_phi, generic_lam = visit(stripped(problem), oracle, lam0, mu, penalty)
    np.testing.assert_allclose(generic_lam, lam, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(generic_phi, phi, rtol=1e-6, atol=1e-6)


def rosenbrock(x):
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


def two_valleys(x):
    return x[0] ** 2 - x[1] ** 2 + x[1] ** 4


def test_newton_finds_the_bottom_of_a_bent_valley(x64):
    found = pdvi.Newton(steps=100, tol=1e-12).minimise(rosenbrock, jnp.array([-1.2, 1.0]))
    np.testing.assert_allclose(found, [1, 1], atol=1e-9)


@pytest.mark.parametrize("y", [0.01, -0.01])
def test_newton_leaves_a_saddle(x64, y):
    """An undamped Newton step from here goes to the saddle at the origin."""
    found = pdvi.Newton(steps=50, tol=1e-12).minimise(two_valleys, jnp.array([1.0, y]))
    np.testing.assert_allclose(found, [0, np.sign(y) * 0.5**0.5], atol=1e-9)


def log_cosh(x):
    return jnp.sum(jnp.logaddexp(x, -x)) - jnp.log(2.0)


def test_newton_never_makes_it_worse(x64):
    """Also where a full step overshoots: from far out, one step at a time."""
    step = jax.jit(lambda x: pdvi.Newton(steps=1).minimise(log_cosh, x))
    points = [jnp.array([5.0])]
    for _ in range(20):
        points.append(step(points[-1]))
    values = [float(log_cosh(x)) for x in points]
    assert (np.diff(values) <= 1e-15).all()
    assert values[-1] < 1e-12


@pytest.mark.parametrize("x", [7.0, 10.0])
def test_newton_comes_back_from_a_flat_tail(x64, x):
    """The curvature at 10 is 8e-9, the Newton step 1e8: 2^-12 of it still overshoots."""
    np.testing.assert_allclose(pdvi.Newton().minimise(log_cosh, jnp.array([x])), 0, atol=1e-6)


def test_newton_stays_where_nothing_is_finite(x64):
    found = pdvi.Newton().minimise(lambda x: jnp.sum(x) + jnp.nan, jnp.ones(2))
    np.testing.assert_array_equal(found, [1, 1])


class Nudge(eqx.Module):
    """An inner method that only adds one, so that a result tells where it started and how often it ran."""

    def minimise(self, objective, start):
        return start + 1


@pytest.mark.parametrize(
    ("settings", "runs"),
    [
        ({}, 1),
        ({"sweeps": 1}, 1),
        ({"sweeps": 4}, 4),
        ({"sweeps": 10, "tol": 0.6}, 2),  # the second sweep's move, 1, is below 0.6 times the distance, 2
        ({"sweeps": 10, "tol": 0.3}, 4),  # 1 <= 0.3 * 4
    ],
)
def test_sweeps_start_from_the_last_locals_and_from_lam0(x64, settings, runs):
    problem = stripped(quadratic())
    lam0, mu, penalty = subproblem(problem)
    local = np.random.default_rng(1).standard_normal((12, 5))
    phi, lam = visit(problem, pdvi.CoordinateDescent(inner=Nudge(), **settings), lam0, mu, penalty, local)
    np.testing.assert_allclose(phi, local + runs, rtol=1e-12)
    np.testing.assert_allclose(lam, np.broadcast_to(lam0 + runs, (12, 5)), rtol=1e-12)


def test_a_single_sweep_ends_with_the_globals_turn(x64):
    """So the dual is minus the gradient in lam, although the locals are not at their minimum."""
    problem = pdvi.datasets.tanh_regression(12)
    lam0, mu, penalty = subproblem(problem)
    oracle = pdvi.CoordinateDescent(sweeps=1, inner=pdvi.Newton(steps=50, tol=1e-13))
    phi, lam = visit(problem, oracle, lam0, mu, penalty)
    by_phi, by_lam = jax.jit(jax.vmap(jax.grad(problem.loss, argnums=(0, 1))))(phi, lam, problem.shards)
    np.testing.assert_allclose(mu + penalty * (lam - lam0), -by_lam, atol=1e-8)
    assert float(jnp.abs(by_phi).max()) > 1e-3


def test_closed_forms_are_used_where_they_exist(x64):
    problem = quadratic()
    assert isinstance(default_oracle(problem), pdvi.JointStep)
    assert isinstance(default_oracle(stripped(problem)), pdvi.CoordinateDescent)
    lam0, mu, penalty = subproblem(problem)
    local = np.zeros((12, 5))
    phi, lam = visit(problem, pdvi.CoordinateDescent(inner=Nudge()), lam0, mu, penalty, local)  # inner is not used
    for b in range(12):
        shard = take(problem.shards, b)
        Q, v = np.asarray(shard["Q"]), np.asarray(shard["v"])
        expected = np.linalg.solve(2 * Q[:5, :5], -2 * Q[:5, 5:] @ lam0 - v[:5])
        np.testing.assert_allclose(phi[b], expected, rtol=1e-9)
        right = penalty * lam0 - mu[b] - 2 * Q[5:, :5] @ expected - v[5:]
        np.testing.assert_allclose(lam[b], np.linalg.solve(2 * Q[5:, 5:] + np.diag(penalty), right), rtol=1e-9)


@pytest.mark.parametrize("sweeps", [0, -1, 2.0, "two", None])
def test_bad_sweeps_are_named(sweeps):
    with pytest.raises(ValueError, match=f"`sweeps` must be a whole number of at least 1, got {sweeps!r}"):
        pdvi.CoordinateDescent(sweeps=sweeps)


def test_digits_that_cancel_are_seen():
    """In single precision, log gamma of e^25 is known to thousands; the value itself, a difference, does not tell."""

    def divergence(x):
        a = jnp.exp(x)
        expected = jax.scipy.special.digamma(a) - jax.scipy.special.digamma(a.sum())
        return jax.scipy.special.gammaln(a.sum()) - jax.scipy.special.gammaln(a).sum() + ((a - 0.5) * expected).sum()

    value, noise = with_noise(divergence, jnp.asarray([0.5, 1.0, 0.0]))
    assert value == pytest.approx(float(divergence(jnp.asarray([0.5, 1.0, 0.0]))))
    assert noise < 1e-4
    assert with_noise(divergence, jnp.asarray([0.5, 25.0, 24.0]))[1] > 1_000


@pytest.mark.parametrize("beyond", [lambda x: -1e4, lambda x: jnp.sin(1e7 * x)])
def test_no_step_goes_to_where_the_value_is_noise(beyond):
    """It falls slowly for ever; beyond 5 there is a cliff that no slope knows of, or noise larger than what is left."""

    def smooth(x):
        return jnp.exp(-x)

    def value(point):
        (x,) = point
        return smooth(x) + jnp.where(x > 5, beyond(x), 0.0)

    def direction(point):
        (x,) = point
        slope, bend = jax.grad(smooth)(x), jax.grad(jax.grad(smooth))(x)
        return Direction((jnp.asarray(-3 * slope / bend),), smooth(x), 3 * slope**2 / bend, jnp.abs(smooth(x)))

    found = descended(value, direction, lambda point, first: 0.0, (jnp.asarray(1.0),), 30)[0]
    assert 1.0 < found <= 5.0
