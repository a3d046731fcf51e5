"""Memoized (incremental) variational Bayes."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from pdvi.core.problem import Problem
from pdvi.shards.stacking import put, take
from pdvi.solvers.conjugate import add, best_globals, require
from pdvi.solvers.primal_dual.oracles import CoordinateDescent

Array = jax.Array
PyTree = Any


class MemoizedState(NamedTuple):
    """The point, every shard's statistics, their sum, and which shards have been seen."""

    lam: Array
    local: PyTree
    table: PyTree
    total: PyTree
    seen: Array


class MemoizedVB(eqx.Module):
    """Each visit replaces a shard's statistics in the sum (Neal, Hinton 1998; Hughes, Sudderth 2013).

    phi_b = argmin f_b(phi, lam),   t = t - t_b + t_b',   lam = argmin of the loss with statistics t

    No step size, and biased batches do no harm; needs the model's ``statistics`` and ``global_step``. The globals
    stay at their start until every shard has been seen once.
    """

    sweeps: int = 1

    def init(self, problem: Problem, lam: Array, local: PyTree, batch_size: int) -> MemoizedState:
        """The state before the first step."""
        require(self, problem, "statistics", "global_step")
        table = jax.tree.map(jnp.zeros_like, problem.map_shards(problem.model.statistics, local))
        return MemoizedState(lam, local, table, add(table), jnp.zeros(problem.n_shards, bool))

    def step(self, problem: Problem, state: MemoizedState, batch: Array) -> MemoizedState:
        """Visit the shards in ``batch``."""

        def visit(phi: PyTree, shard: PyTree) -> tuple[PyTree, PyTree]:
            phi = CoordinateDescent().local_step(problem, phi, state.lam, shard)
            return phi, problem.model.statistics(phi, shard)

        local = state.local
        for _ in range(self.sweeps):
            phi, statistics = problem.map_shards(visit, local, batch)
            local = put(local, batch, phi)
        change = jax.tree.map(jnp.subtract, statistics, take(state.table, batch))
        total = jax.tree.map(jnp.add, state.total, add(change))
        seen = state.seen.at[batch].set(True)
        lam = jax.lax.cond(seen.all(), lambda: best_globals(problem, total), lambda: state.lam)
        return MemoizedState(lam, local, put(state.table, batch, statistics), total, seen)

    def tidy(self, state: MemoizedState) -> MemoizedState:
        """The sum rebuilt from the table: in single precision the running sum drifts."""
        return state._replace(total=add(state.table))
