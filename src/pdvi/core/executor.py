"""What an executor is: the place where shards are, and where what is theirs is kept.

A new executor has to open a problem, and to `visit`, `look` at and `fold` its shards; all else is made of these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.device import on_device
from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem
from pdvi.core.solver import LocalUpdateFn, ShardFn, Shards, ShardStateFn, Solver, State
from pdvi.shards.store import Store


class NoShards(RuntimeError):
    """Nobody is left who could take the shards."""


class Executor(ABC):
    """Where shards are. States go in and come out; an executor that is ``remote`` keeps the shards' part itself.

    A state is then what the server holds: it is small, and a snapshot of it costs nothing. Going back to one (after a
    fault, an interruption, from a checkpoint) rebuilds the shards' part from the data: phi_b fits lam, and what a
    method keeps for a shard is recalled from it.
    """

    remote: bool = True  # local variables and what methods keep for a shard are not in the state
    runs_to_stop: bool = False  # has a compiled program that goes on from log point to log point (see `Memory`)
    problem: Problem
    _told: tuple[str, ...] = ()

    # ---------------------------------------------------------------------------------------------- to be written

    @abstractmethod
    def open(self, problem: Problem, key: Array, local: PyTree) -> tuple[Array, State]:
        """Return the model's own start of the globals from ``key``, and a state with local variables and nothing else.

        The local variables are ``local``, or the model's own start too.
        """

    @abstractmethod
    def begin(self, state: State, solver: Solver) -> State:
        """Return the state with what ``solver`` keeps for every shard at first; no data need be read."""

    @abstractmethod
    def visit(
        self, state: State, visitor: LocalUpdateFn, told: Any, shards: np.ndarray | None = None
    ) -> tuple[State, PyTree, int]:
        """Return the state after a visit to these shards (None: all), the sum of the messages, and how many answered.

        All of them see the halo rows as they were before.
        """

    @abstractmethod
    def look(self, state: State, reader: ShardFn, told: Any, shards: np.ndarray | None = None) -> PyTree:
        """Return the sum of what ``reader`` says of these shards; scalars are added in double precision."""

    @abstractmethod
    def fold(self, state: State, function: Any, told: Any) -> PyTree:
        """Return the sum of ``function(told, own)`` over all shards."""

    @abstractmethod
    def fresh(self, state: State) -> State:
        """Return the state with the local variables that the run began with."""

    @abstractmethod
    def local_params(self, state: State) -> PyTree:
        """Return the local variables of all shards, stacked."""

    # ---------------------------------------------------------------------------------------------- with a default

    def run(self, solver: Solver, state: State, batches: np.ndarray) -> State:
        """Return the state after one step per row of ``batches``."""
        state = self.rebuilt(state, solver)
        for batch in batches:
            broadcast = solver.broadcast(state.server)
            state, total, count = self.visit(state, solver.local_update, broadcast, batch)
            if count:
                state = state._replace(server=updated(self.problem, solver, state.server, total, count, broadcast))
            if self.disturbed():
                state = self.rebuilt(state, solver)
        return jax.block_until_ready(state)

    def run_to_stop(self, solver: Solver, state: State, good: State | None, batches: np.ndarray, rules: Any) -> Any:
        """Return where a run has come to, from log point to log point: where the executor ``runs_to_stop``."""
        raise NotImplementedError

    def rebuilt(self, state: State, solver: Solver) -> State:
        """Return the state with the server's running sums rebuilt from the shard states."""
        shards = HostShards(self, state)
        solver.rebuild_sums(self.problem, shards)
        return shards.state

    def evaluate(self, state: State, solver: Solver) -> dict[str, float]:
        """Return objective, gradient norms and the solver's own metrics."""
        objective, gradient = self.look(state._replace(own=None), measure, state.lam)
        gradient = np.asarray(gradient, float)
        with np.errstate(over="ignore", invalid="ignore"):  # a run that diverges is for the safeguard to judge
            norms = [float(np.linalg.norm(gradient[part])) for part in self.problem.block_slices.values()]
        return row_of(self.problem, objective, norms, solver.log_metrics(self.problem, HostShards(self, state)))

    def disturbed(self) -> bool:
        """Return whether shards were rebuilt since the last call."""
        return False

    def interrupted(self) -> None:
        """Take notice that whoever waits for the run wants it to end now."""
        return

    def close(self) -> None:
        """Let go of what the run held; called once, however it ended."""
        return

    # ---------------------------------------------------------------------------------------------- for everybody

    def tell(self, event: str) -> None:
        """Keep a note for the trace."""
        self._told += (event,)

    def events(self) -> list[str]:
        """Return what was told since the last call."""
        told, self._told = self._told, ()
        return list(told)


class HostShards(Shards):
    """All shards of a run, through its executor."""

    is_traced: ClassVar[bool] = False

    def __init__(self, executor: Executor, state: State, *, warm: bool = False):
        self.executor, self.problem, self.state, self.warm = executor, executor.problem, state, warm

    def sum(self, fn: ShardFn, broadcast: Any, subset: np.ndarray | None = None) -> PyTree:
        """Return the sum of ``fn`` over shards."""
        return self.executor.look(self.state._replace(own=None), fn, broadcast, subset)

    def sum_states(self, fn: ShardStateFn, broadcast: Any) -> PyTree:
        """Return the sum of ``fn`` over shard states."""
        return self.executor.fold(self.state, fn, broadcast)

    def update(self, fn: LocalUpdateFn, broadcast: Any) -> None:
        """Change what is the shards'."""
        self.state = self.executor.visit(self.state, fn, broadcast)[0]

    def reset(self) -> None:
        """Set the local variables to those at the start."""
        self.state = self.executor.fresh(self.state)

    def note(self, text: str) -> None:
        """Write a note into the next row of the trace."""
        self.executor.tell(text)

    def when(self, condition: Any, fn: Callable[[Shards], None], *, on_host: bool = False) -> None:
        """Call ``fn`` if ``condition`` holds."""
        if condition:
            fn(self)


def measure(problem: Problem, lam: Array, local: PyTree, own: PyTree, shard: PyTree) -> tuple[Array, Array]:
    """Return a shard's loss and its gradient in the globals: a reader."""
    return jax.value_and_grad(problem.loss, argnums=1)(local, lam, shard)


def row_of(problem: Problem, objective: Any, norms: list[float], metrics: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a log point as the trace has them; ``norms`` are those of the gradient by block."""
    return {
        "objective": float(objective),
        "grad_norm": float(np.hypot.reduce(norms)),
        **{f"grad_norm_{name}": norm for (name, _), norm in zip(problem.blocks, norms)},
        **{name: float(value) for name, value in metrics.items()},
    }


def check_local(problem: Problem, local: PyTree) -> None:
    """Raise if local variables, stacked over shards, are not such as the problem has; None is what it begins with."""
    wanted = [((problem.n_shards, *leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(problem.local_shape())]
    found = [(np.shape(leaf), np.asarray(leaf).dtype) for leaf in jax.tree.leaves(local)]
    if local is not None and wanted != found:
        msg = f"the local variables of `start` must fit the problem: expected arrays {wanted}, got {found}."
        raise ValueError(msg)


def store_of(problem: Problem, executor: Executor) -> Store:
    """Return the store that a problem comes from; raise if it is in memory."""
    if problem.store is None:
        msg = (
            f"`problem` must come from a store for the executor {type(executor).__name__}, got one in memory; "
            "use pdvi.write_store(path, problem) and pdvi.Problem.from_store(path)."
        )
        raise ValueError(msg)
    return problem.store


def traced(solver: Any) -> Any:
    """Return a solver with its real-valued settings as arrays: a grid over step sizes then compiles once."""
    return jax.tree.map(lambda leaf: on_device(leaf) if isinstance(leaf, float) else leaf, solver)


def updated(problem: Problem, solver: Solver, server: Any, total: PyTree, count: int, told: Any) -> Any:
    """Return the server's state after an update, compiled."""
    total = jax.tree.map(jnp.asarray, total)
    return _updated(problem, traced(solver), server, total, count, told)


@eqx.filter_jit
def _updated(problem: Problem, solver: Solver, server: Any, total: PyTree, count: int, told: Any) -> Any:
    return solver.server_update(problem, server, total, count, told)
