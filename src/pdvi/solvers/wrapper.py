"""What solvers share that wrap another: they pass on all they do not change."""

from __future__ import annotations

from typing import Any, ClassVar

import equinox as eqx

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem
from pdvi.core.solver import RemainingGain, Shards, Solver


class Wrapper(Solver):
    """A solver around another. What its server holds has the field ``inner``, which is the other's."""

    solver: eqx.AbstractVar[Any]
    any_order: ClassVar[bool] = True

    def init_shard_state(self, problem: Problem, lam: Array, local: PyTree, shard: PyTree | None) -> PyTree:
        """Return the inner solver's."""
        return self.solver.init_shard_state(problem, lam, local, shard)

    def broadcast(self, server: Any) -> Any:
        """Return the inner solver's."""
        return self.solver.broadcast(server.inner)

    def local_update(
        self, problem: Problem, broadcast: Any, local: PyTree, shard_state: PyTree, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Update as the inner solver does."""
        return self.solver.local_update(problem, broadcast, local, shard_state, shard)

    def server_update(self, problem: Problem, server: Any, total: PyTree, count: int, broadcast: Any) -> Any:
        """Update as the inner solver does."""
        return server._replace(inner=self.solver.server_update(problem, server.inner, total, count, broadcast))

    def rebuild_sums(self, problem: Problem, shards: Shards) -> None:
        """Rebuild the inner solver's."""
        with shards.inner():
            self.solver.rebuild_sums(problem, shards)

    def log_metrics(self, problem: Problem, shards: Shards) -> dict[str, Any]:
        """Return the inner solver's."""
        with shards.inner():
            return self.solver.log_metrics(problem, shards)

    def remaining_gain(self, problem: Problem, shards: Shards) -> RemainingGain:
        """Return what the inner solver says."""
        with shards.inner():
            return self.solver.remaining_gain(problem, shards)
