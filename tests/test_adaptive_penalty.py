"""Models without closed forms: a penalty that follows the run, as a matrix where it may be, and an end that is true."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import pdvi
from models_for_tests import algorithm_1, begun, states_of
from pdvi.core.solver import RemainingGain
from pdvi.run.stopping import Tolerances, little
from pdvi.solvers.adaptive_penalty import next_update
from pdvi.solvers.primal_dual.arrow import arrow, as_rows, positive_inverse, rows_are_independent
from pdvi.solvers.primal_dual.curvature import changed, nats_left
from pdvi.solvers.primal_dual.metric import applied, from_units, into_units, root, solved, squared, to_coordinates
from pdvi.solvers.primal_dual.oracles import CoordinateDescent, JointNewton
from test_algorithm import draws, gradients, quadratic, stripped

pytestmark = pytest.mark.slow


class Groups:
    """y ~ N(x beta + u, 1), u ~ N(0, tau^2) by group, q(u) normal; beta and log tau are point estimates."""

    def __init__(self, p, prior=1e-3):
        self.p, self.prior = p, prior

    def init_global(self, key):
        return {"beta": jnp.zeros(self.p), "log_tau": jnp.zeros(())}

    def init_local(self, key, shard):
        return {"mean": jnp.zeros(shard["y"].shape[0]), "log_sd": jnp.zeros(shard["y"].shape[0])}

    def loss(self, local, globals_, shard):
        mean = shard["x"] @ globals_["beta"] + local["mean"][:, None]
        rows = 0.5 * ((shard["y"] - mean) ** 2 + jnp.exp(2 * local["log_sd"])[:, None])
        scaled = (local["mean"] ** 2 + jnp.exp(2 * local["log_sd"])) * jnp.exp(-2 * globals_["log_tau"])
        effects = 0.5 * scaled - local["log_sd"] + globals_["log_tau"]
        return rows.sum() + effects.sum()


def groups(scales=(1.0, 1.0, 1.0), correlation=0.0, n_shards=20, size=4, seed=0):
    rng = np.random.default_rng(seed)
    p = len(scales)
    common = rng.standard_normal((n_shards, size, 5, 1))
    x = np.sqrt(1 - correlation) * rng.standard_normal((n_shards, size, 5, p)) + np.sqrt(correlation) * common
    u = 0.7 * rng.standard_normal((n_shards, size, 1))
    y = x @ np.linspace(1, -1, p) + u + rng.standard_normal((n_shards, size, 5))
    return pdvi.Problem(Groups(p), {"x": x * np.asarray(scales), "y": y})


def marginal_optimum(problem, scales):
    """The objective and beta by maximum marginal likelihood, q(u) being exact: least squares inside, tau outside."""
    x, y = (np.asarray(problem.shards[name], float) for name in ("x", "y"))
    x, y = x.reshape(-1, *x.shape[-2:]) / scales, y.reshape(-1, y.shape[-1])
    size = y.shape[1]

    def at(log_tau):
        V = np.eye(size) + np.exp(2 * log_tau)
        inverse, (_, logdet) = np.linalg.inv(V), np.linalg.slogdet(V)
        beta = np.linalg.solve(np.einsum("gip,ij,gjq->pq", x, inverse, x), np.einsum("gip,ij,gj->p", x, inverse, y))
        residual = y - x @ beta
        return 0.5 * np.einsum("gi,ij,gj->", residual, inverse, residual) + 0.5 * len(y) * logdet, beta

    best = scipy.optimize.minimize_scalar(lambda t: at(t)[0], bracket=(-2, 0, 1), tol=1e-12).x
    # minus the entropy of q(u) has -log sd where KL has -log sd - 1/2
    return at(best)[0] + 0.5 * len(y), at(best)[1]


# ---------------------------------------------------------------------------------------------------- what D is


def test_a_matrix_is_what_a_diagonal_is(x64):
    rng = np.random.default_rng(0)
    A = rng.standard_normal((5, 5))
    full = jnp.asarray(A @ A.T + np.eye(5))
    x = jnp.asarray(rng.standard_normal(5))
    for D in (full, jnp.diagonal(full)):
        R = root(D)
        np.testing.assert_allclose(solved(D, applied(D, x)), x, rtol=1e-10)
        np.testing.assert_allclose(squared(D, x), to_coordinates(R, x) @ to_coordinates(R, x), rtol=1e-12)
        np.testing.assert_allclose(from_units(R, to_coordinates(R, x)), x, rtol=1e-10)
        np.testing.assert_allclose(from_units(R, into_units(R, x)), solved(D, x), rtol=1e-10)
    diagonal = jnp.diagonal(full)
    np.testing.assert_allclose(applied(jnp.diag(diagonal), x), applied(diagonal, x), rtol=1e-12)


def test_the_arrow_is_the_hessian(x64):
    """Against jax.hessian on everything: rows are independent, so all else is zero."""
    problem = groups()
    lam, local = problem.init(jax.random.key(0))
    shard = jax.tree.map(lambda leaf: leaf[3], problem.shards)
    rng = np.random.default_rng(0)
    phi = jax.tree.map(lambda leaf: leaf[0] + 0.3 * rng.standard_normal(leaf.shape[1:]), local)
    lam = lam + 0.3 * rng.standard_normal(lam.shape)
    x, back = as_rows(phi, True)
    found = arrow(lambda x, lam: problem.loss(back(x), lam, shard), x, lam)
    size = x.size
    H = jax.hessian(lambda z: problem.loss(back(z[:size].reshape(x.shape)), z[size:], shard))(
        jnp.concatenate([x.ravel(), lam])
    )
    expected = H[size:, size:] - H[size:, :size] @ np.linalg.solve(H[:size, :size], H[:size, size:])
    np.testing.assert_allclose(found.profiled, expected, rtol=1e-8, atol=1e-10)


def test_units_do_not_change_an_inverse(x64):
    H = np.array([[2.0, 0.3], [0.3, 1.0]])
    size = np.array([1e-6, 1e6])
    found = positive_inverse(jnp.asarray(H * np.outer(size, size)))
    np.testing.assert_allclose(found * np.outer(size, size), np.linalg.inv(H), rtol=1e-9)
    np.testing.assert_allclose(positive_inverse(jnp.asarray(-H)), np.linalg.inv(H), rtol=1e-9)


def test_independent_rows_are_found_out(x64):
    assert rows_are_independent(groups())

    class Chained(Groups):
        def loss(self, local, globals_, shard):
            return super().loss(local, globals_, shard) + 0.1 * jnp.sum(local["mean"][1:] * local["mean"][:-1])

    assert not rows_are_independent(pdvi.Problem(Chained(3), groups().shards))

    class Says(Chained):
        def independent_rows(self):
            return True

    assert rows_are_independent(pdvi.Problem(Says(3), groups().shards))


def test_d_falls_at_most_tenfold_and_rises_at_once(x64):
    D, cut_short = changed(jnp.asarray([1.0, 2.0, 3.0]), np.array([1e-5, 1.0, 1e3]), 1.0)
    np.testing.assert_allclose(D, [0.1, 2.0, 3e3])
    assert cut_short
    rng = np.random.default_rng(0)
    A = rng.standard_normal((4, 4))
    full = jnp.asarray(A @ A.T + np.eye(4))
    same, cut_short = changed(full, np.eye(4) / 3, 3.0)
    np.testing.assert_allclose(same, full, rtol=1e-10)
    assert not cut_short


def test_changes_become_rare():
    found, epoch = [], 0
    for _ in range(10):
        epoch = int(next_update(epoch))
        found.append(epoch)
    assert found == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]


# ---------------------------------------------------------------------------------------- the facts, with a matrix


@pytest.fixture
def full_states(x64):
    problem = stripped(quadratic(nonconvexity=0.05))
    return problem, pdvi.P2DVI(oracle=JointNewton(steps=30, tol=0.0), preconditioner="full")


def test_with_a_matrix_h_is_the_mean_dual_in_its_units(full_states):
    problem, solver = full_states
    for state in states_of(problem, solver, draws(12, 3)):
        server = algorithm_1(state.server)
        assert server.penalty.shape == (5, 5)
        np.testing.assert_allclose(applied(server.penalty, server.h), state.own.dual.mean(0), atol=1e-10)


def test_with_a_matrix_duals_are_minus_the_gradients(full_states):
    problem, solver = full_states
    state = states_of(problem, solver, [np.arange(12)] * 3)[-1]
    np.testing.assert_allclose(state.own.dual, -gradients(problem, state), atol=1e-8)
    by_phi = jax.vmap(jax.grad(problem.loss))(state.local, state.own.copy, problem.shards)
    np.testing.assert_allclose(by_phi, 0, atol=1e-8)


def test_a_diagonal_matrix_is_the_diagonal(x64):
    """The oracle on one shard, D given in both forms."""
    problem = stripped(quadratic())
    rng = np.random.default_rng(0)
    lam0, mu, D = rng.standard_normal(5), rng.standard_normal(5), rng.uniform(0.5, 2, 5)
    shard, phi = jax.tree.map(lambda leaf: leaf[0], problem.shards), jnp.zeros(5)
    found = [
        jax.jit(lambda penalty: JointNewton(tol=0.0)(problem, phi, shard, lam0, mu, penalty))(jnp.asarray(form))
        for form in (D, np.diag(D))
    ]
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(found[1])):
        np.testing.assert_allclose(a, b, rtol=1e-9)


# ------------------------------------------------------------------------------------------------ what a run does


def fit(problem, solver=None, **settings):
    return pdvi.fit(problem, solver or pdvi.P2DVI(), **{"max_epochs": 60, **settings})


def epochs_to(result, best, near=0.1):
    there = result.trace["epoch"][result.trace["objective"] < best + near]
    return there.min() if len(there) else np.inf


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1e2, 1e4])
def test_units_change_neither_the_answer_nor_the_epochs(x64, scale):
    scales = np.array([1.0, scale, 1.0])
    best, beta = marginal_optimum(groups(), np.ones(3))
    usual, found = fit(groups()), fit(groups(scales))
    for result, size in ((usual, np.ones(3)), (found, scales)):
        assert result.converged
        assert result.objective == pytest.approx(best, abs=0.02)
        np.testing.assert_allclose(result.global_params["beta"] * size, beta, atol=0.02)
    assert epochs_to(usual, best) / 2 <= epochs_to(found, best) <= 2 * epochs_to(usual, best)


@pytest.mark.parametrize("correlation", [0.9, 0.99, 0.999])
def test_correlated_predictors_cost_nothing(x64, correlation):
    usual, found = fit(groups()), fit(groups(correlation=correlation))
    bests = [marginal_optimum(groups(correlation=c), np.ones(3))[0] for c in (0, correlation)]
    assert found.converged
    assert found.objective == pytest.approx(bests[1], abs=0.02)
    assert epochs_to(found, bests[1]) <= 2 * epochs_to(usual, bests[0])


def test_with_a_diagonal_they_do(x64):
    problem = groups(correlation=0.999)
    best, _ = marginal_optimum(problem, np.ones(3))
    alternating = CoordinateDescent(sweeps=9, tol=1e-2)  # no Newton steps first: the start is the model's
    matrix, diagonal = (
        fit(problem, pdvi.P2DVI(oracle=alternating, preconditioner=form)) for form in ("full", "diagonal")
    )
    assert epochs_to(matrix, best) < 0.5 * epochs_to(diagonal, best)


def test_a_resumed_run_is_the_uninterrupted_one(x64, tmp_path):
    problem, path = groups(), tmp_path / "run.zarr"
    pdvi.fit(problem, pdvi.P2DVI(), max_epochs=2.5, tol=0, log_every=0.5, checkpoint=path)
    resumed = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=5, tol=0, log_every=0.5, start=path)
    whole = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=5, tol=0, log_every=0.5)
    for name, array in whole.state.items():
        np.testing.assert_array_equal(resumed.state[name], array)
    np.testing.assert_array_equal(resumed.trace["objective"], whole.trace["objective"])
    assert {"constant", "penalty"} <= set(whole.trace)


def test_disk_is_memory(x64, tmp_path):
    problem, path = groups(n_shards=6), tmp_path / "store.zarr"
    pdvi.write_store(path, problem)
    stored = pdvi.Problem.from_store(path, problem.model)
    one, two = (fit(p, max_epochs=4, tol=0) for p in (problem, stored))
    np.testing.assert_allclose(one.trace["objective"], two.trace["objective"], rtol=1e-9)
    np.testing.assert_allclose(one.trace["penalty"], two.trace["penalty"], rtol=1e-7)


def test_pdvi_follows_too(x64):
    problem = groups()
    result = fit(problem, pdvi.PDVI(), max_epochs=3, tol=0)
    assert result.trace["penalty"].nunique() > 1
    D = result.state["server.inner.penalty"]
    np.testing.assert_array_equal(D, np.full_like(D, D[0]))


def test_bad_preconditioners_are_named():
    with pytest.raises(ValueError, match=r"`preconditioner` must be one of \('full', 'diagonal'\), got 'half'"):
        pdvi.P2DVI(preconditioner="half")
    with pytest.raises(ValueError, match="`eta` must be left out with preconditioner"):
        pdvi.P2DVI(preconditioner="full", eta=0.1)


# ------------------------------------------------------------------------------------------------- a true ending


def test_what_is_left_is_the_gap_of_a_quadratic(x64):
    rng = np.random.default_rng(0)
    A = rng.standard_normal((4, 4))
    H, slope, sizes = A @ A.T + np.eye(4), rng.standard_normal(4), rng.uniform(0.5, 2, 4)
    gap = 0.5 * slope @ np.linalg.solve(H, slope)
    assert nats_left(sizes, slope, H / np.outer(sizes, sizes), 0.6) == pytest.approx(gap + 0.3)


def test_a_little_is_a_hundredth_of_a_nat_or_what_tol_lets_pass():
    assert little(RemainingGain(0.01, 0.0), 1e3, Tolerances(1e-6))
    assert not little(RemainingGain(0.05, 0.0), 1e3, Tolerances(1e-6))
    assert little(RemainingGain(0.05, 0.1), 1e3, Tolerances(1e-6))  # rounding
    assert little(RemainingGain(0.05, 0.0), 1e6, Tolerances(1e-6))  # a tenth of an epoch's change


def test_what_moves_slowly_has_not_converged(x64):
    """Far too firm a penalty: an epoch changes next to nothing, and the objective is far above its minimum."""
    problem = groups()
    best, _ = marginal_optimum(problem, np.ones(3))
    result = fit(problem, pdvi.P2DVI(scale=1e7), max_epochs=6)
    assert result.objective > best + 1
    assert result.status is pdvi.Status.STALLED


class Bottomless:
    """An objective that no discrete model can have, of which the model says so."""

    def init_global(self, key):
        return {"lam": jnp.ones(2)}

    def init_local(self, key, shard):
        return jnp.zeros(())

    def lower_bound(self):
        return 0.0

    def loss(self, local, globals_, shard):
        return local**2 + jnp.sum(globals_["lam"] * shard) + 1


def test_an_objective_below_the_models_bound_is_divergence(x64):
    problem = pdvi.Problem(Bottomless(), np.ones((4, 2)))
    with pytest.warns(pdvi.SafeguardWarning, match="below 0, the least that the model says it can be"):
        result = pdvi.fit(problem, pdvi.P2DVI(eta=0.1), max_epochs=200)
    assert result.status is pdvi.Status.DIVERGED
    assert result.objective >= 0


def test_newton_finds_the_locals_of_independent_rows(x64):
    problem = groups()
    lam, local = problem.init(jax.random.key(0))
    phi, shard = (jax.tree.map(lambda leaf: leaf[2], tree) for tree in (local, problem.shards))
    oracle = CoordinateDescent(independent_rows=True)
    found = jax.jit(lambda phi: oracle.local_step(problem, phi, lam, shard))(phi)
    slopes = jax.grad(problem.loss)(found, lam, shard)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(slopes)) < 1e-6


def test_the_constant_grows_after_a_rise_and_comes_back(x64):
    run = begun(groups(), pdvi.P2DVI())
    server = run.state.server._replace(judged=jnp.asarray(100.0))
    usual = float(server.least)
    assert run.solver._judge(server, 101.0).constant == pytest.approx(3 * usual)
    firm = server._replace(constant=9 * server.least)
    assert run.solver._judge(firm, 99.0).constant == pytest.approx(3 * usual)
    assert run.solver._judge(server, 99.0).constant == pytest.approx(usual)


def test_a_constant_that_failed_twice_is_not_tried_again(x64):
    run = begun(groups(), pdvi.P2DVI())
    server = run.state.server._replace(judged=jnp.asarray(100.0))
    usual, seen = float(server.least), []
    for loss in (101.0, 99.0, 101.0, 99.0, 99.0):
        server = run.solver._judge(server, loss)
        seen.append(float(server.constant) / usual)
    np.testing.assert_allclose(seen, [3, 1, 3, 3, 3])
