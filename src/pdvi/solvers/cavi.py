"""Coordinate ascent variational inference: the full batch, every step."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from pdvi._base.types import Array, PyTree
from pdvi.core.model import Conjugate, require
from pdvi.core.problem import Problem
from pdvi.core.solver import Shards, Solver
from pdvi.solvers.conjugate import best_globals
from pdvi.solvers.local_variables import optimise


class CAVIServer(NamedTuple):
    """Nothing but the globals."""

    lam: Array


class CAVI(Solver):
    """All locals for the current globals, then the globals for all locals; no step size (Bishop 2006, ch. 10).

    phi_b = argmin f_b(phi, lam) for every b,      lam = argmin sum_b f_b(phi_b, lam)

    Needs the model's ``statistics`` and ``global_step``; ``sweeps`` local sweeps per step.
    """

    sweeps: int = 1
    full_batch: ClassVar[bool] = True

    def init(self, problem: Problem, shards: Shards, lam: Array, batch_size: int) -> CAVIServer:
        """Return the server's state before the first step."""
        require(type(self).__name__, problem.model, Conjugate)
        return CAVIServer(lam)

    def local_update(
        self, problem: Problem, broadcast: Array, local: PyTree, shard_state: PyTree, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return the locals that fit the globals, and their statistics."""
        local = optimise(problem, local, broadcast, shard, self.sweeps, 0.0)
        return local, shard_state, problem.model.statistics(local, shard)

    def server_update(
        self, problem: Problem, server: CAVIServer, total: PyTree, count: int, broadcast: Array
    ) -> CAVIServer:
        """Return the globals that fit all statistics."""
        return CAVIServer(best_globals(problem, total, server.lam))
