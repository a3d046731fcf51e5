"""Coordinate ascent variational inference: the full batch, every step."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from pdvi.core.problem import Problem
from pdvi.solvers.conjugate import add, best_globals, require
from pdvi.solvers.primal_dual.oracles import CoordinateDescent

Array = jax.Array
PyTree = Any


class CAVIState(NamedTuple):
    """Nothing but the point."""

    lam: Array
    local: PyTree


class CAVI(eqx.Module):
    """All locals for the current globals, then the globals for all locals; no step size (Bishop 2006, ch. 10).

    phi_b = argmin f_b(phi, lam) for every b,      lam = argmin sum_b f_b(phi_b, lam)

    Needs the model's ``statistics`` and ``global_step``; ``sweeps`` local sweeps per step.
    """

    sweeps: int = 1
    full_batch: ClassVar[bool] = True

    def init(self, problem: Problem, lam: Array, local: PyTree, batch_size: int) -> CAVIState:
        """The state before the first step."""
        require(self, problem, "statistics", "global_step")
        return CAVIState(lam, local)

    def step(self, problem: Problem, state: CAVIState, batch: Array) -> CAVIState:
        """One pass over all shards."""
        local = state.local
        for _ in range(self.sweeps):
            local = problem.map_shards(
                lambda phi, shard: CoordinateDescent().local_step(problem, phi, state.lam, shard), local
            )
        statistics = problem.map_shards(problem.model.statistics, local)
        return CAVIState(best_globals(problem, add(statistics)), jax.tree.map(jnp.asarray, local))
