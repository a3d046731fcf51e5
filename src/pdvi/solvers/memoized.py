"""Memoized (incremental) variational Bayes."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pdvi._base.types import Array, PyTree
from pdvi.core.model import Conjugate, require
from pdvi.core.problem import Problem
from pdvi.core.solver import Shards, Solver
from pdvi.solvers.conjugate import best_globals
from pdvi.solvers.local_variables import as_it_is, like, optimise


class Memo(NamedTuple):
    """A shard's statistics at its last visit, and whether there was one; at the server, their sums."""

    statistics: PyTree
    seen: Array


class MemoizedServer(NamedTuple):
    """The globals, the sum of all shards' statistics, and how many shards have been seen."""

    lam: Array
    total: Memo


class MemoizedVB(Solver):
    """Each visit replaces a shard's statistics in the sum (Neal, Hinton 1998; Hughes, Sudderth 2013).

    phi_b = argmin f_b(phi, lam),   t = t - t_b + t_b',   lam = argmin of the loss with statistics t

    No step size, and biased batches do no harm; needs the model's ``statistics`` and ``global_step``. The globals
    stay at their start until every shard has been seen once.
    """

    sweeps: int = 1

    def init(self, problem: Problem, shards: Shards, lam: Array, batch_size: int) -> MemoizedServer:
        """Return the server's state before the first step."""
        require(type(self).__name__, problem.model, Conjugate)
        return MemoizedServer(lam, _nothing(problem))

    def init_shard_state(self, problem: Problem, lam: Array, local: PyTree, shard: PyTree | None) -> Memo:
        """Return statistics of nothing; at given locals theirs."""
        return _nothing(problem) if shard is None else Memo(problem.model.statistics(local, shard), jnp.ones(()))

    def local_update(
        self, problem: Problem, broadcast: Array, local: PyTree, shard_state: Memo, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return the locals that fit the globals, their statistics, and by how much these changed."""
        local = optimise(problem, local, broadcast, shard, self.sweeps, 0.0)
        memo = Memo(problem.model.statistics(local, shard), jnp.ones(()))
        return local, memo, jax.tree.map(jnp.subtract, memo, shard_state)

    def server_update(
        self, problem: Problem, server: MemoizedServer, total: Memo, count: int, broadcast: Array
    ) -> MemoizedServer:
        """Return the globals that fit the new sum of statistics, once all shards are in it."""
        total = jax.tree.map(jnp.add, server.total, total)
        complete = total.seen > problem.n_shards - 0.5
        best = partial(best_globals, problem, total.statistics, server.lam)
        lam = jax.lax.cond(complete, best, lambda: server.lam)
        return MemoizedServer(lam, total)

    def rebuild_sums(self, problem: Problem, shards: Shards) -> None:
        """Rebuild the sum of all statistics."""
        server = shards.server
        shards.server = server._replace(total=like(server.total, shards.sum_states(as_it_is, None)))


def _nothing(problem: Problem) -> Memo:
    shapes: Any = jax.eval_shape(problem.model.statistics, problem.local_shape(halo=True), problem.shard_shape())
    return Memo(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), jnp.zeros(()))
