"""What executors share whose shards are elsewhere, and keep there what is theirs.

The state is what the server holds, so it is small, and a snapshot of it costs nothing. Going back to one (after a
fault, an interruption, from a checkpoint) rebuilds the shards' part from the data: phi_b fits lam, and what a
method keeps for a shard is recalled from it.
"""

from __future__ import annotations

from abc import abstractmethod

from pdvi._base.types import Array, PyTree
from pdvi.core.executor import Executor, check_local
from pdvi.core.problem import Problem
from pdvi.core.solver import State


class Remote(Executor):
    """An executor for problems from a store."""

    key: Array

    def open(self, problem: Problem, key: Array, local: PyTree) -> tuple[Array, State]:
        """Return the model's own start of the globals, and a state without anything that is a shard's."""
        if problem.store is None:
            msg = (
                f"`problem` must come from a store for the executor {type(self).__name__}, got one in memory; "
                "use pdvi.write_store(path, problem) and pdvi.Problem.from_store(path)."
            )
            raise ValueError(msg)
        template = problem.local_shape()
        if local is not None:
            check_local(problem, local)
        self.problem, self.key = problem, key
        self._open(template, local)
        return problem.init_global(key), State(None, None, None)

    @abstractmethod
    def _open(self, template: PyTree, local: PyTree) -> None:
        """Begin the shards' part: their local variables."""
