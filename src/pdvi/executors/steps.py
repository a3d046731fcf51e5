"""The one compiled loop: steps between two log points, for one run or, side by side, for several."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.compiled import quickly_compiled
from pdvi._base.types import Array, PyTree
from pdvi.core.executor import traced
from pdvi.core.model import LocalStep, offers
from pdvi.core.problem import Problem, without_halo
from pdvi.core.solver import Solver, State, add
from pdvi.shards.stacking import put, take

P = ParamSpec("P")
T = TypeVar("T")

LITTLE = 1_000_000  # numbers in all: a program that goes through them runs for less time than it compiles
SHORT = 256  # legs of up to so many steps share what is compiled, longer ones up to the next power of two


def compiled(function: Callable[Concatenate[Problem, P], T]) -> Callable[Concatenate[Problem, P], T]:
    """Return a function of a problem compiled so that it is soon there, where that takes longer than to run it.

    That is so where there is little data, and derivatives of a loss: closed forms are compiled soon in any way.
    """
    usual = eqx.filter_jit(function)
    quick = cache(lambda: eqx.filter_jit(function, **quickly_compiled()))

    @wraps(function)
    def call(problem: Problem, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if offers(problem.model, LocalStep):
            return usual(problem, *args, **kwargs)
        return (quick() if is_little((problem, args, kwargs)) else usual)(problem, *args, **kwargs)

    return call


def is_little(arguments: PyTree, most: int | None = None) -> bool:
    """Return whether there are few numbers in all arrays; not so inside of another program, which has its own way."""
    most = LITTLE if most is None else most
    arrays = [leaf for leaf in jax.tree.leaves(arguments) if eqx.is_array(leaf)]
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in arrays) and sum(a.size for a in arrays) <= most


def step(problem: Problem, solver: Solver, state: State, batch: Array) -> State:
    """Return the state after one step: the shards in ``batch`` are visited, the others are left as they are."""
    server = solver.before_step(problem, state.server, batch.shape[0])
    told = solver.tell(server)
    local, own, messages = visited(problem, solver.visit, told, state.local, state.own, batch)
    server = solver.update(problem, server, add(messages), batch.shape[0], told)
    return State(server, put(state.local, batch, local), put(state.own, batch, own))


def steps(problem: Problem, solver: Solver, state: State, batches: Array, count: Array | int) -> State:
    """Return the state after a step for each of the first rows of ``batches``; the server's sums are made anew first.

    How many is no part of what is compiled: legs of a run differ in their lengths.
    """
    if (total := folded(solver.kept, None, state.own)) is not None:
        state = state._replace(server=solver.refreshed(problem, state.server, total))
    return jax.lax.fori_loop(0, count, lambda i, s: step(problem, solver, s, batches[i]), state)


_compiled_steps = compiled(steps)


def run_steps(problem: Problem, solver: Solver, state: State, batches: np.ndarray) -> State:
    """Return the state after one step per row of ``batches``."""
    room = max(SHORT, 1 << (len(batches) - 1).bit_length())
    rows = np.zeros((room, *batches.shape[1:]), batches.dtype)
    rows[: len(batches)] = batches
    return _compiled_steps(problem, solver, state, jnp.asarray(rows), jnp.asarray(len(batches)))


@eqx.filter_jit
def run_side_by_side(problem: Problem, solvers: Solver, states: State, batches: Array) -> State:
    """Return several states after the same batches; ``solvers`` and ``states`` are stacked."""
    arrays, rest = eqx.partition(solvers, eqx.is_array)
    return jax.vmap(lambda some, state: steps(problem, eqx.combine(some, rest), state, batches, len(batches)))(
        arrays, states
    )


def side_by_side(solvers: list[Solver]) -> Any:
    """Return solvers that differ in real-valued settings only as one, with these stacked."""
    return stacked([traced(solver) for solver in solvers])


def stacked(trees: list[Any]) -> Any:
    """Return pytrees of the same structure as one, arrays stacked."""
    return jax.tree.map(lambda *leaves: jax.numpy.stack(leaves) if eqx.is_array(leaves[0]) else leaves[0], *trees)


def visited(
    problem: Problem, visitor: Any, told: Any, local: PyTree, own: PyTree, batch: Array | None
) -> tuple[PyTree, PyTree, PyTree]:
    """Return new locals, what is kept, and the messages of the shards in ``batch`` (None: all), stacked."""

    def one(phi: PyTree, shard: PyTree, kept: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        new, kept, message = visitor(problem, told, phi, kept, shard)
        return without_halo(new, rows), kept, message

    rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), local)
    return problem.map_shards(one, local, batch, own if batch is None else take(own, batch))


def folded(function: Any, told: Any, own: PyTree) -> PyTree:
    """Return the sum of ``function(told, own)`` over all shards."""
    if not jax.tree.leaves(own):
        return function(told, own)
    return add(jax.vmap(lambda kept: function(told, kept))(own))
