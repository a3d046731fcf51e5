"""Every fact of the algorithm that holds at every step, in double precision."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import pdvi
from models_for_tests import Regression, algorithm_1, regression_shards
from models_for_tests import states_of as run
from pdvi.core.solver import State
from pdvi.solvers.primal_dual.algorithm import Own, with_mean_dual, with_penalty
from pdvi.solvers.primal_dual.algorithm import start as server_at

EXACT = pdvi.CoordinateDescent(sweeps=500, tol=1e-10, inner=pdvi.Newton(tol=1e-12))


class GenericOnly:
    """A model stripped of its closed forms, so that only autodiff is left."""

    def __init__(self, model):
        self.init_global, self.init_local, self.loss = model.init_global, model.init_local, model.loss


def quadratic(**settings):
    return pdvi.datasets.quadratic(n=12, condition=20, heterogeneity=0.8, linear=0.3, **settings)


def stripped(problem):
    return pdvi.Problem(GenericOnly(problem.model), problem.shards)


CASES = {
    "quadratic, closed form": lambda: (quadratic(), pdvi.JointStep()),
    "quadratic, generic": lambda: (stripped(quadratic()), EXACT),
    "quadratic, coordinate closed forms": lambda: (quadratic(), EXACT),
    "nonconvex quadratic, closed form": lambda: (quadratic(nonconvexity=0.05), pdvi.JointStep()),
    "nonconvex quadratic, generic": lambda: (stripped(quadratic(nonconvexity=0.05)), EXACT),
    "nonconvex regression, generic": lambda: (pdvi.datasets.tanh_regression(12), EXACT),
    "nonconvex regression, unequal shards": lambda: (
        pdvi.Problem(Regression(), regression_shards(np.random.default_rng(0), [2, 3, 1, 4, 2, 3, 3, 2, 1, 2, 1, 2])),
        EXACT,
    ),
}


@cache  # one problem object per case, so that its steps compile once for all tests
def made(name):
    return CASES[name]()


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "_"))
def case(request, x64):
    return made(request.param)


def draws(n_shards, size, steps=12):
    return pdvi.sampling.batches(pdvi.sampling.Uniform(), 0, 0, steps, n_shards, size)


def gradients(problem, state):
    """grad_lam f_b(phi_b, lam_b), all shards, by autodiff."""
    return jax.vmap(jax.grad(problem.loss, argnums=1))(state.local, state.own.copy, problem.shards)


def test_h_is_the_mean_dual_over_D(case):
    problem, oracle = case
    for state in run(problem, pdvi.P2DVI(oracle=oracle), draws(12, 3)):
        server = algorithm_1(state.server)
        np.testing.assert_allclose(server.h, state.own.dual.mean(0) / server.penalty, atol=1e-12)


def test_duals_are_minus_the_gradients_after_an_exact_oracle(case):
    problem, oracle = case
    visited = set()
    for state, batch in zip(run(problem, pdvi.P2DVI(oracle=oracle), draws(12, 3))[1:], draws(12, 3)):
        visited |= set(batch.tolist())
        index = np.array(sorted(visited))
        np.testing.assert_allclose(state.own.dual[index], -gradients(problem, state)[index], atol=1e-7)
        phi_gradients = jax.vmap(jax.grad(problem.loss))(state.local, state.own.copy, problem.shards)
        np.testing.assert_allclose(np.asarray(phi_gradients)[index], 0, atol=1e-6)


def test_with_all_shards_lam0_minimises_the_augmented_lagrangian(case):
    problem, oracle = case
    for state in run(problem, pdvi.P2DVI(oracle=oracle), [np.arange(12)] * 5)[1:]:
        server = algorithm_1(state.server)
        expected = (state.own.copy + state.own.dual / server.penalty).mean(0)
        np.testing.assert_allclose(server.lam0, expected, atol=1e-12)


def test_unvisited_shards_are_bit_identical(case):
    problem, oracle = case
    batches = draws(12, 3)
    states = run(problem, pdvi.P2DVI(oracle=oracle), batches)
    for before, after, batch in zip(states, states[1:], batches):
        others = np.setdiff1d(np.arange(12), batch)
        for old, new in zip(jax.tree.leaves(before[1:]), jax.tree.leaves(after[1:]), strict=True):
            np.testing.assert_array_equal(old[others], new[others])
            assert not np.array_equal(old[batch], new[batch])


def test_equal_block_steps_are_pdvi_to_the_bit(case):
    problem, oracle = case
    blocks = {name: 0.3 for name, _ in problem.blocks}
    one = run(problem, pdvi.PDVI(eta=0.3, oracle=oracle), draws(12, 3))[-1]
    two = run(problem, pdvi.P2DVI(eta=blocks, oracle=oracle), draws(12, 3))[-1]
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two)):
        np.testing.assert_array_equal(a, b)


class Rescaled:
    """The same model with block ``name`` measured in units of 1/s."""

    def __init__(self, model, name, s):
        self.model, self.name, self.s = model, name, s
        self.init_local = model.init_local

    def init_global(self, key):
        start = self.model.init_global(key)
        return {**start, self.name: start[self.name] * self.s}

    def loss(self, local, globals_, shard):
        return self.model.loss(local, {**globals_, self.name: globals_[self.name] / self.s}, shard)


@pytest.mark.parametrize("automatic", [True, False])
def test_rescaling_a_block_and_its_step_rescales_the_run(x64, automatic):
    problem = pdvi.datasets.tanh_regression(12)
    s = 37.0
    other = pdvi.Problem(Rescaled(problem.model, "weight", s), problem.shards)
    one = pdvi.P2DVI(eta=None if automatic else {"weight": 0.2, "gain": 0.1}, oracle=EXACT)
    two = pdvi.P2DVI(eta=None if automatic else {"weight": 0.2 * s**2, "gain": 0.1}, oracle=EXACT)
    for a, b in zip(run(problem, one, draws(12, 3)), run(other, two, draws(12, 3))):
        expected = problem.unravel(a.lam)
        rescaled = problem.unravel(b.lam)
        np.testing.assert_allclose(rescaled["weight"], s * expected["weight"], rtol=1e-6)
        np.testing.assert_allclose(rescaled["gain"], expected["gain"], rtol=1e-6)


def test_a_stationary_point_is_a_fixed_point(case):
    """Found by another method: Newton on all variables at once."""
    problem, oracle = case
    start, unflatten = ravel_pytree(problem.init(jax.random.key(0)))

    def total(x):
        lam, local = unflatten(x)
        return problem.evaluate(lam, local)[0].sum()

    best = jax.jit(lambda x: pdvi.Newton(steps=200, tol=1e-14).minimise(total, x))(start)
    assert float(jnp.abs(jax.grad(total)(best)).max()) < 1e-9
    lam, local = unflatten(best)
    state = State(server_at(lam, jnp.full(lam.size, 4.0)), local, Own(jnp.broadcast_to(lam, (12, lam.size)), None))
    state = state._replace(own=Own(state.own.copy, -gradients(problem, state)))
    state = state._replace(server=with_mean_dual(state.server, state.own.dual.mean(0)))
    for after in run(problem, pdvi.PDVI(eta=0.25, oracle=oracle), draws(12, 3), state)[1:]:
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state)):
            np.testing.assert_allclose(a, b, atol=1e-7)


@pytest.mark.slow
def test_a_run_ends_at_a_stationary_point(case):
    problem, oracle = case
    result = pdvi.fit(problem, pdvi.P2DVI(oracle=oracle), batch_size=3, max_epochs=600, tol=0, grad_tol=1e-6)
    assert result.converged
    lam, local = problem.ravel(result.global_params), result.local_params
    phi_gradient = jax.grad(lambda phi: problem.evaluate(lam, phi)[0].sum())(jnp.asarray(local))
    assert float(jnp.abs(phi_gradient).max()) < 1e-5
    assert result.trace["consensus"].iloc[-1] < 1e-5


def test_the_nonconvex_quadratic_has_nonconvex_shards(x64):
    problem = quadratic(nonconvexity=0.05)
    smallest = np.linalg.eigvalsh(problem.shards["Q"]).min(1)
    assert (smallest < 0).any()
    assert np.linalg.eigvalsh(problem.shards["schur"].mean(0)).min() > 0


def test_changing_D_keeps_point_and_duals(x64):
    problem = quadratic()
    state = run(problem, pdvi.P2DVI(), draws(12, 3))[-1]
    changed = with_penalty(state.server, 4 * state.server.penalty)
    np.testing.assert_array_equal(changed.lam, state.lam)
    np.testing.assert_allclose(changed.h, state.own.dual.mean(0) / (4 * state.server.penalty), rtol=1e-12)
    np.testing.assert_allclose(changed.lam0, state.lam + changed.h, rtol=1e-14)


def test_a_visit_matches_numpy(x64):
    """One step of Algorithm 1 on the quadratic, written again from the paper with a dense solve."""
    problem = quadratic()
    batch = np.array([1, 7, 4])
    eta = 0.4
    before, after = run(problem, pdvi.PDVI(eta=eta), [batch])
    Q, v = np.asarray(problem.shards["Q"]), np.asarray(problem.shards["v"])
    lam0 = np.asarray(before.server.lam0)
    copies = []
    for i in batch:
        D = np.diag([0.0] * 5 + [1 / eta] * 5)
        x = np.linalg.solve(2 * Q[i] + D, np.concatenate([np.zeros(5), lam0 / eta]) - v[i])
        np.testing.assert_allclose(after.local[i], x[:5], rtol=1e-9)
        np.testing.assert_allclose(after.own.dual[i], (x[5:] - lam0) / eta, rtol=1e-8)
        copies.append(x[5:])
    h = (np.array(copies) - lam0).sum(0) / 12
    np.testing.assert_allclose(after.lam, np.mean(copies, 0), rtol=1e-10)
    np.testing.assert_allclose(after.server.lam0, np.mean(copies, 0) + h, rtol=1e-10)
