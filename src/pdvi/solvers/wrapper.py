"""What solvers share that wrap another: they pass on all they do not change."""

from __future__ import annotations

from typing import Any, ClassVar

import equinox as eqx

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem
from pdvi.core.solver import Dialogue, Left, Solver, State


class Wrapper(Solver):
    """A solver around another. What its server holds has the field ``inner``, which is the other's."""

    solver: eqx.AbstractVar[Any]
    any_order: ClassVar[bool] = True

    def own(self, problem: Problem, server: Any, local: PyTree) -> PyTree:
        """Return what the inner solver keeps."""
        return self.solver.own(problem, server.inner, local)

    def recall(self, problem: Problem, lam: Array, local: PyTree, shard: PyTree) -> PyTree:
        """Return what the inner solver would have kept."""
        return self.solver.recall(problem, lam, local, shard)

    def tell(self, server: Any) -> Any:
        """Return what the inner solver tells."""
        return self.solver.tell(server.inner)

    def visit(
        self, problem: Problem, told: Any, local: PyTree, own: PyTree, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Visit as the inner solver does."""
        return self.solver.visit(problem, told, local, own, shard)

    def update(self, problem: Problem, server: Any, total: PyTree, count: int, told: Any) -> Any:
        """Update as the inner solver does."""
        return server._replace(inner=self.solver.update(problem, server.inner, total, count, told))

    def kept(self, told: Any, own: PyTree) -> PyTree:
        """Return what the inner solver's sums are made of."""
        return self.solver.kept(told, own)

    def refreshed(self, problem: Problem, server: Any, total: PyTree) -> Any:
        """Refresh as the inner solver does."""
        return server._replace(inner=self.solver.refreshed(problem, server.inner, total))

    def metrics(self, lam: Any, own: PyTree) -> dict[str, Array]:
        """Return the inner solver's."""
        return self.solver.metrics(lam, own)

    def left(self, problem: Problem, state: State) -> Dialogue[Left]:
        """Return what the inner solver says."""
        return (yield from self.solver.left(problem, state._replace(server=state.server.inner)))

    def notes(self, server: Any) -> dict[str, float]:
        """Return the inner solver's."""
        return self.solver.notes(server.inner)
