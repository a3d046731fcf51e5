"""Everything in this process's memory: the steps between two log points run as one compiled loop."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base import room
from pdvi._base.types import Array, PyTree
from pdvi.core.executor import Executor, check_local, traced
from pdvi.core.problem import Problem, shape_of
from pdvi.core.solver import After, LocalUpdateFn, ShardFn, Solver, State, add
from pdvi.executors.fit_program import Outcome, Rules, run_to_stop
from pdvi.executors.steps import compiled, folded, run_steps, visited
from pdvi.shards.stacking import put, take

STATES = 2  # of all shards that are held at once: as it was, and as it is after a step


class Memory(Executor):
    """The default executor."""

    remote = False
    runs_to_stop = True

    def open(self, problem: Problem, key: Array, local: PyTree) -> tuple[Array, State]:
        """Return the model's own start, with other local variables where they are given."""
        if problem.store is not None:
            msg = (
                "`problem` must be in memory for the executor Memory, got one from the store "
                f"{str(problem.store.path)!r}; use problem.load(), or executor=pdvi.Disk()."
            )
            raise ValueError(msg)
        self.problem, self._key = problem, key
        _check_room(problem, problem.local_shape(), "local variables")
        check_local(problem, local)
        if local is None:
            lam, local = problem.init(key)
            return lam, State(None, local, None)
        leaves = [jax.device_put(np.asarray(leaf)) for leaf in jax.tree.leaves(local)]
        given = jax.tree.unflatten(jax.tree.structure(problem.local_shape()), leaves)
        return problem.init_global(key), State(None, given, None)

    def begin(self, state: State, solver: Solver) -> State:
        """Return the state with what ``solver`` keeps for every shard at first."""
        local = self.problem.local_shape()
        kept = shape_of(type(solver).init_shard_state, traced(solver), self.problem, state.lam, local, None)
        _check_room(self.problem, kept, f"what {type(solver).__name__} keeps (copies of the globals, duals)")
        return state._replace(own=_begun(self.problem, traced(solver), state.lam, state.local))

    def run(self, solver: Solver, state: State, batches: np.ndarray) -> State:
        """Return the state after one step per row of ``batches``."""
        return jax.block_until_ready(run_steps(self.problem, traced(solver), state, batches))

    def run_to_stop(
        self, solver: Solver, state: State, good: State | None, batches: np.ndarray, rules: Rules
    ) -> Outcome:
        """Return where a run has come to, from log point to log point, in one compiled program."""
        return run_to_stop(self.problem, traced(solver), state, good, self._key, batches, rules)

    def visit(
        self, state: State, visitor: LocalUpdateFn, told: Any, shards: np.ndarray | None = None
    ) -> tuple[State, PyTree, int]:
        """Return the state after a visit to these shards, and the sum of the messages."""
        batch = None if shards is None else jnp.asarray(shards)
        local, own, total = _visited(self.problem, traced(visitor), told, state.local, state.own, batch)
        return State(state.server, local, own), total, self.problem.n_shards if shards is None else len(shards)

    def look(self, state: State, reader: ShardFn, told: Any, shards: np.ndarray | None = None) -> PyTree:
        """Return the sum of what ``reader`` says of these shards."""
        if isinstance(reader, After):  # each half is compiled once, wherever else it is asked for
            return self.look(self.visit(state, reader.update, told[0], shards)[0], reader.read, told[1], shards)
        batch = None if shards is None else jnp.asarray(shards)
        found = _looked(self.problem, traced(reader), told, state.local, state.own, batch)
        with np.errstate(over="ignore", invalid="ignore"):  # scalars, which are still apart, in double precision
            return jax.tree.map(lambda x: np.asarray(x, float).sum() if x.ndim == 1 else np.asarray(x)[0], found)

    def fold(self, state: State, function: Any, told: Any) -> PyTree:
        """Return the sum of ``function(told, own)`` over all shards."""
        return _folded(traced(function), told, state.own)

    def fresh(self, state: State) -> State:
        """Return the state with the local variables that the run began with."""
        return state._replace(local=self.problem.init(self._key)[1])

    def local_params(self, state: State) -> PyTree:
        """Return the local variables of all shards."""
        return jax.tree.map(np.asarray, state.local)


def _check_room(problem: Problem, one: PyTree, what: str) -> None:
    """Say what will be taken before it is: arrays of all shards, once before and once after a step."""
    per_shard = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one))
    needed, free = STATES * problem.n_shards * per_shard, room.available()
    if needed <= free:
        return
    most = int(free / (STATES * per_shard))
    fewer = f"put more rows into each shard, {most} shards at most; or " if most else ""
    msg = (
        f"`problem` must fit into memory: {what} of {problem.n_shards} shards, for {problem.n_global} globals, "
        f"take {room.in_words(needed)}, {room.in_words(per_shard)} for each shard before and after a step, and "
        f"{room.in_words(free)} are free; {fewer}write it with pdvi.write_store and use executor=pdvi.Disk()."
    )
    raise MemoryError(msg)


@eqx.filter_jit
def _begun(problem: Problem, solver: Solver, lam: Array, local: PyTree) -> PyTree:
    return jax.vmap(lambda phi: solver.init_shard_state(problem, lam, phi, None), axis_size=problem.n_shards)(local)


@compiled
def _visited(
    problem: Problem, visitor: Any, told: Any, local: PyTree, own: PyTree, batch: Array | None
) -> tuple[PyTree, PyTree, PyTree]:
    phi, kept, messages = visited(problem, visitor, told, local, own, batch)
    if batch is not None:
        phi, kept = put(local, batch, phi), put(own, batch, kept)
    return phi, kept, add(messages)


@compiled
def _looked(problem: Problem, reader: Any, told: Any, local: PyTree, own: PyTree, batch: Array | None) -> PyTree:
    kept = own if batch is None else take(own, batch)
    found = problem.map_shards(lambda phi, shard, own: reader(problem, told, phi, own, shard), local, batch, kept)
    return jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else leaf.sum(0)[None], found)


_folded = eqx.filter_jit(folded)
