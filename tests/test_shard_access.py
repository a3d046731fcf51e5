"""What hooks do with all shards is the same through an executor and inside of a compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pdvi
from models_for_tests import begun, tissue_problem
from pdvi._base.compiled import quickly_compiled
from pdvi.core.executor import HostShards, measure
from pdvi.core.solver import After
from pdvi.executors.steps import NOTES, TracedShards, precise_sum
from pdvi.solvers.conjugate import statistics_of
from pdvi.solvers.local_variables import as_it_is, local_step


@pytest.fixture
def run(x64):
    return begun(tissue_problem(160, 4), pdvi.MemoizedVB())


def both(run, function):
    """What a function of the handle returns, and the state after it: on the host, and compiled."""
    host = HostShards(run.executor, run.state)
    on_host = function(host), host.state

    @jax.jit
    def program(state):
        traced = TracedShards(run.problem, state, jax.random.key(run.seed))
        return function(traced), traced.state

    return on_host, program(run.state)


def assert_close(one, two):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


FUNCTIONS = {
    "sum": lambda shards: shards.sum(measure, shards.lam),
    "sum of a subset": lambda shards: shards.sum(measure, shards.lam, np.array([1, 3])),
    "sum after an update": lambda shards: shards.sum(After(local_step, statistics_of), (shards.lam, None)),
    "sum of states": lambda shards: shards.sum_states(as_it_is, None),
    "update": lambda shards: shards.update(local_step, shards.lam),
    "update and reset": lambda shards: (shards.update(local_step, shards.lam), shards.reset())[1],
    "when it holds": lambda shards: shards.when(
        shards.lam.sum() > -jnp.inf, lambda inside: inside.update(local_step, inside.lam)
    ),
    "when it does not": lambda shards: shards.when(
        shards.lam.sum() > jnp.inf, lambda inside: inside.update(local_step, inside.lam)
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_the_same_compiled(run, name):
    assert_close(*both(run, FUNCTIONS[name]))


def test_an_update_changes_the_state_and_a_reset_takes_it_back(run):
    shards = HostShards(run.executor, run.state)
    shards.update(local_step, shards.lam)
    assert not np.array_equal(shards.state.local, run.state.local)
    shards.reset()
    np.testing.assert_array_equal(shards.state.local, run.state.local)


def test_a_note_is_written_only_where_its_condition_holds(run):
    @jax.jit
    def program(state, value):
        shards = TracedShards(run.problem, state)
        shards.when(value > 0, lambda inside: inside.note("positive"))
        shards.when(value > 10, lambda inside: inside.note("large"))
        return shards.notes

    found = {value: int(program(run.state, value)) for value in (-1, 1, 11)}
    bits = {text: 1 << NOTES.index(text) for text in ("positive", "large")}
    assert found == {-1: 0, 1: bits["positive"], 11: bits["positive"] | bits["large"]}


def test_what_is_for_the_host_is_left_to_it(run):
    def never(shards):
        raise AssertionError

    @jax.jit
    def program(state, value):
        shards = TracedShards(run.problem, state)
        shards.when(value > 0, never, on_host=True)
        shards.when(value > -10, lambda inside: inside.update(local_step, inside.lam))  # not before the host was asked
        return shards.needs_host, shards.state

    needs_host, state = program(run.state, 1)
    assert needs_host
    np.testing.assert_array_equal(state.local, run.state.local)
    needs_host, state = program(run.state, -1)
    assert not needs_host
    assert not np.array_equal(state.local, run.state.local)


@pytest.mark.parametrize("size", [1, 2, 3, 100, 10_007])
def test_a_sum_has_twice_the_digits(size):
    x = np.random.default_rng(size).lognormal(0, 3, size).astype(np.float32)
    for options in ({}, quickly_compiled()):
        high, low = (np.asarray(part, float) for part in jax.jit(precise_sum, **options)(x))
        assert high + low == pytest.approx(x.astype(float).sum(), rel=1e-12)
    infinite = jax.jit(precise_sum)(np.array([1.0, np.inf, 2.0], np.float32))
    assert [float(part) for part in infinite] == [np.inf, 0.0]
