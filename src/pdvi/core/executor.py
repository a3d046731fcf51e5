"""What an executor is: the place where shards are, and where what is theirs is kept.

A new executor has to open a problem, and to `visit`, `look` at and `fold` its shards; steps, evaluation and all that
solvers ask for are made of these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem
from pdvi.core.solver import Begin, Dialogue, Fresh, Look, Reader, Solver, State, Tell, Tidy, Visit, Visitor


class NoShards(RuntimeError):
    """Nobody is left who could take the shards."""


class Executor(ABC):
    """Where shards are. States go in and come out; an executor that is ``remote`` keeps the shards' part itself."""

    remote: bool = True  # local variables and what methods keep for a shard are not in the state
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
        self, state: State, visitor: Visitor, told: Any, shards: np.ndarray | None = None
    ) -> tuple[State, PyTree, int]:
        """Return the state after a visit to these shards (None: all), the sum of the messages, and how many answered.

        All of them see the halo rows as they were before.
        """

    @abstractmethod
    def look(self, state: State, reader: Reader, told: Any, shards: np.ndarray | None = None) -> PyTree:
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
        state = self.tidied(state, solver)
        for batch in self.announced(batches):
            server = _before_step(self.problem, traced(solver), state.server, len(batch))
            told = solver.tell(server)
            state, total, count = self.visit(state._replace(server=server), Step(solver), told, batch)
            if count:
                state = state._replace(server=updated(self.problem, solver, state.server, total, count, told))
            if self.disturbed():
                state = self.tidied(state, solver)
        return jax.block_until_ready(state)

    def tidied(self, state: State, solver: Solver) -> State:
        """Return the state with the server's running sums made anew from what shards keep."""
        total = self.fold(state, Kept(solver), None)
        if total is None:
            return state
        return state._replace(server=_refreshed(self.problem, traced(solver), state.server, total))

    def evaluate(self, state: State, solver: Solver) -> dict[str, float]:
        """Return objective, gradient norms and the solver's own metrics."""
        measured = self.look(state._replace(own=None), measure, state.lam)
        metrics = self.fold(state, Metrics(solver), state.lam)
        return {**report(self.problem, measured, metrics), **solver.notes(state.server)}

    def announced(self, batches: np.ndarray) -> np.ndarray:
        """Return ``batches``, after telling who should know what comes."""
        return batches

    def disturbed(self) -> bool:
        """Return whether shards were rebuilt since the last call."""
        return False

    def checkpoint_local(self, state: State) -> PyTree:
        """Return what a checkpoint holds of the local variables; None where they are rebuilt from the data."""
        return None if self.remote else self.local_params(state)

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

    def answered(self, dialogue: Dialogue[Any]) -> Any:
        """Return what a dialogue comes to, its requests answered one after the other."""
        answer: Any = None
        while True:
            try:
                request = dialogue.send(answer)
            except StopIteration as end:
                return end.value
            match request:
                case Look(state, reader, told, shards):
                    answer = self.look(state, reader, told, shards)
                case Visit(state, visitor, told):
                    answer = self.visit(state, visitor, told)[0]
                case Tidy(state, solver):
                    answer = self.tidied(state, solver)
                case Fresh(state):
                    answer = self.fresh(state)
                case Begin(state, solver):
                    answer = self.begin(state, solver)
                case Tell(event):
                    self.tell(event)
                    answer = None
                case _:
                    msg = f"a solver may ask for Look, Visit, Fresh, Begin, Tidy or Tell, got {request!r}."
                    raise TypeError(msg)


class Step(eqx.Module):
    """A visitor: a solver's own."""

    solver: Solver

    def __call__(
        self, problem: Problem, told: Any, local: PyTree, own: PyTree, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Visit a shard."""
        return self.solver.visit(problem, told, local, own, shard)


class Kept(eqx.Module):
    """A shard's part of a solver's running sums."""

    solver: Solver

    def __call__(self, told: Any, own: PyTree) -> PyTree:
        """Return it."""
        return self.solver.kept(told, own)


class Metrics(eqx.Module):
    """A shard's part of a solver's metrics."""

    solver: Solver

    def __call__(self, told: Any, own: PyTree) -> PyTree:
        """Return it."""
        return self.solver.metrics(told, own)


def measure(problem: Problem, lam: Array, local: PyTree, own: PyTree, shard: PyTree) -> tuple[Array, Array]:
    """Return a shard's loss and its gradient in the globals: a reader."""
    return jax.value_and_grad(problem.loss, argnums=1)(local, lam, shard)


def report(problem: Problem, measured: tuple[Any, Any], metrics: dict[str, Any]) -> dict[str, float]:
    """Return what the trace tells of a log point, from the summed losses and gradients, and summed metrics."""
    objective, gradient = measured
    gradient = np.asarray(gradient, float)
    with np.errstate(over="ignore", invalid="ignore"):  # a run that diverges is for the safeguard to judge
        norms = {
            f"grad_norm_{name}": float(np.linalg.norm(gradient[part])) for name, part in problem.block_slices.items()
        }
    return {
        "objective": float(objective),
        "grad_norm": float(np.hypot.reduce(list(norms.values()))),
        **norms,
        **{name: float(value) / problem.n_shards for name, value in metrics.items()},
    }


def traced(solver: Any) -> Any:
    """Return a solver with its real-valued settings as arrays: a grid over step sizes then compiles once."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, float) else leaf, solver)


def updated(problem: Problem, solver: Solver, server: Any, total: PyTree, count: int, told: Any) -> Any:
    """Return the server's state after an update, compiled."""
    total = jax.tree.map(jnp.asarray, total)
    return _updated(problem, traced(solver), server, total, count, told)


@eqx.filter_jit
def _updated(problem: Problem, solver: Solver, server: Any, total: PyTree, count: int, told: Any) -> Any:
    return solver.update(problem, server, total, count, told)


@eqx.filter_jit
def _before_step(problem: Problem, solver: Solver, server: Any, batch_size: int) -> Any:
    return solver.before_step(problem, server, batch_size)


@eqx.filter_jit
def _refreshed(problem: Problem, solver: Solver, server: Any, total: PyTree) -> Any:
    return solver.refreshed(problem, server, total)
