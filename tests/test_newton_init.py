"""Where Algorithm 1 begins on a model without closed forms: near the optimum of the shards that are looked at."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pdvi
from models_for_tests import begun
from pdvi.core.solver import After, State
from pdvi.solvers.newton_init import OptimizeLocals, _lower, newton_step
from pdvi.solvers.primal_dual.arrow import rows_are_independent
from pdvi.solvers.primal_dual.curvature import At, Derivatives, Profile
from test_adaptive_penalty import Groups, groups, marginal_optimum

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(12)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


class Logistic:
    """y ~ Bernoulli(x beta), beta ~ N(0, (10 / scale)^2), q(beta) normal: wide at first where predictors are large."""

    def __init__(self, scales):
        self.scales = tuple(scales)

    def init_global(self, key):
        return {"mean": jnp.zeros(len(self.scales)), "log_sd": jnp.zeros(len(self.scales))}

    def init_local(self, key, shard):
        return {}

    def loss(self, local, g, shard):
        mean, var = shard["x"] @ g["mean"], shard["x"] ** 2 @ jnp.exp(2 * g["log_sd"])
        nodes = mean[:, None] + jnp.sqrt(var)[:, None] * jnp.asarray(NODES, mean.dtype)
        rows = jax.nn.softplus(nodes) @ jnp.asarray(WEIGHTS, mean.dtype) - shard["y"] * mean
        prior = 10 / jnp.asarray(self.scales)
        kl = 0.5 * ((g["mean"] ** 2 + jnp.exp(2 * g["log_sd"])) / prior**2 - 1) - g["log_sd"] + jnp.log(prior)
        return rows.sum() + shard["fraction"] * kl.sum()


def logistic(scales, n_shards=40, size=20):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n_shards, size, len(scales)))
    y = (rng.random((n_shards, size)) < 1 / (1 + np.exp(-x @ np.linspace(1, -1, len(scales))))).astype(float)
    shards = {"x": x * np.asarray(scales), "y": y, "fraction": np.full(n_shards, 1 / n_shards)}
    return pdvi.Problem(Logistic(scales), shards)


@pytest.mark.parametrize("scales", [(1, 0.01, 1000), pytest.param((1e-4, 1, 1e4), marks=pytest.mark.slow)])
def test_units_that_make_the_start_absurd_change_nothing(scales):
    """With sd 1 and predictors of 1,000 the first loss is a thousand times the last, and no D of the start is right."""
    usual = pdvi.fit(logistic((1, 1, 1)), pdvi.P2DVI(), max_epochs=40, seed=0)
    found = pdvi.fit(logistic(scales), pdvi.P2DVI(), max_epochs=40, seed=0)
    assert usual.converged
    assert found.converged
    assert found.objective == pytest.approx(usual.objective, abs=0.05)
    np.testing.assert_allclose(found.global_params["mean"] * scales, usual.global_params["mean"], atol=0.01)
    assert found.trace["event"].str.contains("Newton steps on 40 shards first").sum() == 1
    assert len(found.trace) <= 2 * len(usual.trace)


def test_a_newton_step_is_newtons_whatever_the_units(x64):
    rng = np.random.default_rng(0)
    A = rng.standard_normal((4, 4))
    H, slope = A @ A.T + 0.1 * np.eye(4), rng.standard_normal(4)
    units = np.array([1e-5, 1.0, 1e3, 1e6])
    outside = H * np.outer(units, units), slope * units
    for R, curvature in ((np.ones(4), outside[0]), (units, H), (np.diag(units), H)):
        move, gain, _ = newton_step(jnp.asarray(R), outside[1], curvature)
        np.testing.assert_allclose(move * units, -np.linalg.solve(H, slope), rtol=1e-7)
        assert gain == pytest.approx(slope @ np.linalg.solve(H, slope), rel=1e-7)


def test_negative_curvature_still_leads_down(x64):
    move, gain, _ = newton_step(jnp.ones(2), np.array([1.0, 1.0]), np.diag([2.0, -4.0]))
    np.testing.assert_allclose(move, [-0.5, -0.25])
    assert gain == pytest.approx(0.75)
    assert np.isnan(newton_step(jnp.ones(2), np.array([1.0, np.nan]), np.eye(2))[1])


def test_a_step_is_nowhere_longer_than_it_may_be(x64):
    """It gains more than the whole of it made shorter would, in any units."""
    turned = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    H, slope = turned @ np.diag([1e-8, 1.0, 2.0]) @ turned.T, turned @ np.array([1e-3, 0.3, 0.2])
    plain, _, whole = newton_step(jnp.ones(3), slope, H)
    assert np.abs(plain).max() > 1e4
    np.testing.assert_allclose(newton_step(jnp.ones(3), slope, H, 1e9)[0], plain)

    def gained(move):
        return -slope @ move - 0.5 * move @ H @ move

    shorter = plain * 4.0 / np.abs(plain).max()
    for units in (np.ones(3), np.array([1e-3, 1.0, 1e4])):
        longest = 4.0 / units
        move, gain, all_of_it = newton_step(jnp.asarray(units), slope * units, H, longest)
        assert all_of_it == pytest.approx(whole)
        assert 0.9 < np.abs(move / longest).max() <= 1
        assert gain == pytest.approx(-(slope * units) @ move)
        assert gained(move * units) > 5 * gained(shorter)


def told(loss, curvature=1.0, noise=0.0):
    square = np.full((2, 2), curvature)
    return Derivatives(loss, np.ones(2), square, square, np.ones(2), 0.0, 0.0, noise)


@pytest.mark.parametrize(
    ("after", "taken"),
    [
        (told(99.0), True),
        (told(100.1), False),
        (told(-1e9), False),
        (told(99.0, np.nan), False),
        (told(99.0, noise=1.0), True),
        (told(99.0, noise=3.0), False),
    ],
)
def test_a_step_must_bring_what_its_slope_promised_and_not_far_more(after, taken):
    """Far more is rounding noise, where the loss has run off: logs of Dirichlet parameters of e^70, say."""
    assert _lower(told(100.0), after, 2.0) is taken


class Counted(Groups):
    """How often the loss is called: each of these is traced, differentiated and compiled."""

    calls = 0

    def loss(self, local, globals_, shard):
        type(self).calls += 1
        return super().loss(local, globals_, shard)


def test_no_derivative_is_compiled_twice():
    """Rows told apart, objective, gradient, derivatives, noise; for a visit and for locals alone: step and length."""
    problem = pdvi.Problem(Counted(3), groups().shards)
    Counted.calls = 0
    first = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=30, seed=0)
    assert first.converged
    assert Counted.calls <= 9
    Counted.calls = 0
    pdvi.fit(problem, pdvi.P2DVI(), max_epochs=30, seed=1)
    assert Counted.calls == 0


def test_what_is_read_after_a_visit_is_read_where_it_leads(x64):
    problem = groups()
    lam, local = problem.init(jax.random.key(0))
    lam = lam + 0.3
    state, told = State(None, local, None), (lam, At(lam, jnp.eye(lam.size)))
    reader = After(OptimizeLocals(True), Profile(True, True))
    executor = pdvi.Memory()
    executor.open(problem, jax.random.key(0), None)
    found = executor.look(state, reader, told)
    by_shard = [
        reader(
            problem, told, *(jax.tree.map(lambda leaf, b=b: leaf[b], part) for part in (local, None, problem.shards))
        )
        for b in range(problem.n_shards)
    ]
    for name, value in found._asdict().items():
        np.testing.assert_allclose(value, sum(getattr(one, name) for one in by_shard), rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(state.local["mean"], 0)
    assert np.abs(found.decrement) < 1e-6


@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (0, 4), (3, 4)])
def test_two_rows_that_meet_are_found_among_many(pair):
    i, j = pair

    class Pair(Groups):
        def loss(self, local, globals_, shard):
            return super().loss(local, globals_, shard) + 0.1 * local["mean"][i] * local["log_sd"][j]

    problem = groups(n_shards=3, size=5)
    assert rows_are_independent(problem)
    assert not rows_are_independent(pdvi.Problem(Pair(3), problem.shards))


@pytest.mark.slow
def test_it_goes_on_from_near_the_optimum_with_the_duals_of_that_point(x64):
    problem = groups(scales=(1.0, 100.0, 0.01))
    best, _ = marginal_optimum(problem, np.array([1.0, 100.0, 0.01]))
    run = begun(problem, pdvi.P2DVI())
    run.next_segment()
    assert run.executor.evaluate(run.state, run.solver)["objective"] < best + problem.n_global
    lam = run.state.lam
    slopes = jax.vmap(jax.grad(problem.loss, argnums=1), in_axes=(0, None, 0))(run.state.local, lam, problem.shards)
    np.testing.assert_allclose(run.state.own.dual, -slopes, atol=1e-8)


@pytest.mark.slow
def test_a_known_optimum_stays_put(x64):
    problem = groups()
    first = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=60, seed=0)
    again = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=2, start=first.point, seed=1)
    assert not again.trace["event"].str.contains("Newton").any()
    assert again.objective == pytest.approx(first.objective, abs=1e-3)


@pytest.mark.slow
def test_on_a_disk_it_begins_in_the_same_place(x64, tmp_path):
    problem = logistic((1, 0.01, 1000))
    pdvi.write_store(tmp_path / "store", problem)
    stored = pdvi.Problem.from_store(tmp_path / "store", problem.model)
    settings = {"max_epochs": 3, "tol": 0, "seed": 0}
    here = pdvi.fit(problem, pdvi.P2DVI(), **settings)
    there = pdvi.fit(stored, pdvi.P2DVI(), executor=pdvi.Disk(), **settings)
    np.testing.assert_allclose(there.trace["objective"], here.trace["objective"], rtol=1e-7)
