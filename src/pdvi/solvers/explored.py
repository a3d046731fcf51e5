"""Exploring before Algorithm 1 by natural-gradient steps, which depend little on the start."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp

from pdvi._base.types import Array, PyTree
from pdvi.core.executor import measure
from pdvi.core.model import Conjugate, Natural, require
from pdvi.core.problem import Problem
from pdvi.core.solver import Dialogue, Fresh, Look, Solver, Stage, State, Tell
from pdvi.solvers.conjugate import best_globals, statistics_of
from pdvi.solvers.local_variables import begun, resettled
from pdvi.solvers.svi import SVI, SVIServer
from pdvi.solvers.wrapper import Wrapper

# A component keeps what it saw in the last sixteenth of the shards (in two of them at least), so one that is of no use
# is free again soon. With fewer than NOISY batches in an epoch such steps hardly differ from full ones.
MEMORY, FASTEST, SWEEPS, NOISY = 1 / 16, 0.5, 3, 16

# So short a memory loses components that live in one or two shards only. What was explored must therefore be better
# than what so many epochs of the inner solver reach from the same start, or the run goes on from there.
FIRST_EPOCHS = 2

FIRST, EXPLORING, DONE = range(3)  # phases


class ExploredServer(NamedTuple):
    """The inner solver's server, and what exploring must beat."""

    inner: Any
    made: Array  # steps
    phase: Array
    kept: Array  # lam of the start; while exploring, that which the first epochs reached
    reached: Array  # and its objective

    @property
    def lam(self) -> Array:
        """Return the reported global parameters."""
        return self.inner.lam


class Explored(Wrapper):
    """Two epochs of ``solver``, then ``epochs`` of natural-gradient steps (`SVI`, noisy) from the same start.

    They depend little on the start, so a poor one does less harm; from where the first epochs have led they find less.
    The inner solver goes on from what they find if that is better, and otherwise from where it was. Rows of the trace
    tell it as "exploring". Needs a model with ``statistics``, ``global_step``, ``natural`` and ``from_natural``.
    """

    solver: Any
    epochs: int = eqx.field(default=3, static=True)

    def init(self, problem: Problem, lam: Array, batch_size: int) -> ExploredServer:
        """Return the server's state for a solver that asks for nothing."""
        return self._begun(problem, self.solver.init(problem, lam, batch_size))

    def begin(self, problem: Problem, state: State, lam: Array, batch_size: int) -> Dialogue[ExploredServer]:
        """Return the server's state before the first step."""
        require(type(self.solver).__name__, problem.model, Conjugate, Natural)
        return self._begun(problem, (yield from self.solver.begin(problem, state, lam, batch_size)))

    def _begun(self, problem: Problem, inner: Any) -> ExploredServer:
        zero = jnp.asarray(0, jnp.int32)
        return ExploredServer(inner, zero, zero, inner.lam, jnp.full((), jnp.inf))

    def settled(self, server: ExploredServer) -> ExploredServer:
        """Return the server of a run that has explored."""
        return server._replace(inner=self.solver.settled(server.inner), phase=jnp.full_like(server.phase, DONE))

    def before_step(self, problem: Problem, server: ExploredServer, batch_size: int) -> ExploredServer:
        """Count the steps."""
        inner = self.solver.before_step(problem, server.inner, batch_size)
        return server._replace(inner=inner, made=server.made + 1)

    def recover(self, server: ExploredServer, factor: float) -> Any:
        """Return a more careful state of the inner solver, and explore no more."""
        inner = self.solver.recover(server.inner, factor)
        return None if inner is None else server._replace(inner=inner, phase=jnp.full_like(server.phase, DONE))

    def exploring(self, server: ExploredServer) -> bool:
        """Return whether the last step was one of exploration."""
        return int(server.phase) == EXPLORING

    def stage(self, problem: Problem, server: ExploredServer, batch_size: int) -> Stage:
        """Return who makes the next steps."""
        first, last = self._ends(problem, batch_size)
        phase, made = int(server.phase), int(server.made)
        if phase == FIRST:
            return Stage(self, first - made)
        if phase == EXPLORING:
            rate = min(FASTEST, batch_size / (MEMORY * problem.n_shards))
            return Stage(_Exploration(self, SVI(rate=rate, sweeps=SWEEPS)), last - made)
        return Stage(self)

    def turn(self, problem: Problem, state: State, batch_size: int) -> Dialogue[State]:
        """Return the state as the next phase takes it over."""
        first, last = self._ends(problem, batch_size)
        phase, made = int(state.server.phase), int(state.server.made)
        if phase == FIRST and made >= first:
            return (yield from self._sent_out(state))
        if phase == EXPLORING and made >= last:
            return (yield from self.concluded(problem, state, batch_size))
        return state

    def _sent_out(self, state: State) -> Dialogue[State]:
        """Return the start once more: noise finds more from there than from where the first epochs have led."""
        server = state.server
        reached, _ = yield Look(state._replace(own=None), measure, server.lam)
        state = yield Fresh(state)
        inner = server.inner._replace(lam=server.kept)
        exploring = jnp.full_like(server.phase, EXPLORING)
        reached = jnp.asarray(reached, server.reached.dtype)
        return state._replace(server=server._replace(inner=inner, phase=exploring, kept=server.lam, reached=reached))

    def concluded(self, problem: Problem, state: State, batch_size: int) -> Dialogue[State]:
        """Return what was found, or where the run was before if that is better."""
        statistics = yield Look(state._replace(own=None), statistics_of, None)
        lam = best_globals(problem, statistics)
        found = yield from begun(problem, self, state, lam, batch_size)
        objective, _ = yield Look(found._replace(own=None), measure, found.lam)
        if objective < float(state.server.reached):
            return found
        yield Tell("explored in vain")
        before = yield from resettled(problem, state, state.server.kept)
        return (yield from begun(problem, self, before, state.server.kept, batch_size))

    def _ends(self, problem: Problem, batch_size: int) -> tuple[int, int]:
        """Return after how many steps the first epochs and the exploring end."""
        steps = problem.steps_per_epoch(batch_size)
        return FIRST_EPOCHS * steps, (FIRST_EPOCHS + self.epochs) * steps


class _Exploration(Solver):
    """Natural-gradient steps on the state of `Explored`. No duals are kept up: whoever leaves asks for new ones."""

    explored: Explored
    svi: SVI

    def init(self, problem: Problem, lam: Array, batch_size: int) -> Any:
        """Return what `Explored` does."""
        return self.explored.init(problem, lam, batch_size)

    def before_step(self, problem: Problem, server: ExploredServer, batch_size: int) -> ExploredServer:
        """Count the steps."""
        return server._replace(made=server.made + 1)

    def visit(
        self, problem: Problem, told: Array, local: PyTree, own: PyTree, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Visit as `SVI` does; what the inner solver keeps stays as it is."""
        local, _, statistics = self.svi.visit(problem, told, local, (), shard)
        return local, own, statistics

    def update(self, problem: Problem, server: ExploredServer, total: PyTree, count: int, told: Array) -> Any:
        """Update as `SVI` does."""
        lam = self.svi.update(problem, SVIServer(server.lam, jnp.zeros(())), total, count, told).lam
        return server._replace(inner=server.inner._replace(lam=lam))
