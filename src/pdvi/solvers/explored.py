"""Exploring before Algorithm 1 by natural-gradient steps, which depend little on the start."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax.numpy as jnp

from pdvi._base.types import Array, PyTree
from pdvi.core.executor import measure
from pdvi.core.model import Conjugate, Natural, require
from pdvi.core.problem import Problem
from pdvi.core.solver import Segment, Shards, Solver
from pdvi.solvers.conjugate import best_globals, statistics_of
from pdvi.solvers.local_variables import reinit_shard_states, reset_and_optimize_locals
from pdvi.solvers.rates import StepServer
from pdvi.solvers.svi import SVI
from pdvi.solvers.wrapper import Wrapper

# A component keeps what it saw in the last sixteenth of the shards (in two of them at least), so one that is of no use
# is free again soon. With fewer than NOISY batches in an epoch such steps hardly differ from full ones.
MEMORY, FASTEST, SWEEPS, NOISY = 1 / 16, 0.5, 3, 16

# So short a memory loses components that live in one or two shards only. What was explored must therefore be better
# than what so many epochs of the inner solver reach from the same start, or the run goes on from there.
FIRST_EPOCHS = 2

FIRST, EXPLORING, DONE = range(3)  # phases
UNLIMITED = 2**30  # steps


class ExploredServer(NamedTuple):
    """The inner solver's server, and what exploring must beat."""

    inner: Any
    phase: Array
    kept: Array  # lam of the start; while exploring, that which the first epochs reached
    reached: Array  # and its objective

    @property
    def lam(self) -> Array:
        """Return the reported global parameters."""
        return self.inner.lam


class Explored(Wrapper):
    """Two epochs of ``solver``, then ``epochs`` of natural-gradient steps (`SVI`, noisy) from the same start.

    They depend little on the start. The inner solver goes on from what they find if that is better, and otherwise from
    where it was. Needs a model with ``statistics``, ``global_step``, ``natural`` and ``from_natural``.
    """

    solver: Any
    epochs: int = eqx.field(default=3, static=True)

    def init(self, problem: Problem, shards: Shards, lam: Array, batch_size: int) -> ExploredServer:
        """Return the server's state before the first step."""
        require(type(self.solver).__name__, problem.model, Conjugate, Natural)
        inner = self.solver.init(problem, shards, lam, batch_size)
        phase = jnp.asarray(DONE if shards.warm else FIRST, jnp.int32)
        return ExploredServer(inner, phase, inner.lam, jnp.full((), jnp.inf))

    def increase_penalty(self, server: ExploredServer, factor: float) -> Any:
        """Return the inner solver's, and explore no more."""
        inner = self.solver.increase_penalty(server.inner, factor)
        return None if inner is None else server._replace(inner=inner, phase=jnp.full_like(server.phase, DONE))

    def on_segment_end(self, problem: Problem, shards: Shards, step: Any, batch_size: int) -> Segment:
        """Go from one phase to the next where one has ended; the steps of each are another program's."""
        per_epoch = problem.steps_per_epoch(batch_size)
        first, last = FIRST_EPOCHS * per_epoch, (FIRST_EPOCHS + self.epochs) * per_epoch
        phase = shards.server.phase
        shards.when((phase == FIRST) & (step >= first), self._start_warmup, on_host=True)
        if shards.is_traced:
            shards.when(phase == EXPLORING, self._start_warmup, on_host=True)
            return Segment(self, jnp.where(phase == FIRST, first - step, UNLIMITED))
        shards.when((phase == EXPLORING) & (step >= last), lambda shards: self.finalize(problem, shards, batch_size))
        phase = int(shards.server.phase)
        if phase == EXPLORING:
            rate = min(FASTEST, batch_size / (MEMORY * problem.n_shards))
            return Segment(Warmup(self, SVI(rate=rate, sweeps=SWEEPS)), last - step)
        return Segment(self, first - step if phase == FIRST else None)

    def _start_warmup(self, shards: Shards) -> None:
        """Go back to the start: noisy steps find more from there than from where the first epochs have led."""
        server = shards.server
        reached, _ = shards.sum(measure, server.lam)
        shards.reset()
        shards.server = server._replace(
            inner=server.inner._replace(lam=server.kept),
            phase=jnp.full_like(server.phase, EXPLORING),
            kept=server.lam,
            reached=jnp.asarray(reached, server.reached.dtype),
        )

    def finalize(self, problem: Problem, shards: Shards, batch_size: int) -> None:
        """Take what was found, or go back to where the run was before if that is better."""
        before = shards.server
        lam = best_globals(problem, shards.sum(statistics_of, None), before.lam)
        self._start_anew(problem, shards, lam, batch_size)
        objective, _ = shards.sum(measure, shards.lam)
        if objective < float(before.reached):
            return
        shards.note("warm-up did not improve the objective")
        shards.server = before
        reset_and_optimize_locals(problem, shards, before.kept)
        self._start_anew(problem, shards, before.kept, batch_size)

    def _start_anew(self, problem: Problem, shards: Shards, lam: Array, batch_size: int) -> None:
        """Start the inner solver at ``lam`` and the local variables there are, which are known to fit."""
        shards.warm = True
        shards.server = self.init(problem, shards, lam, batch_size)
        reinit_shard_states(problem, shards, self)


class Warmup(Solver):
    """Natural-gradient steps on the state of `Explored`. No duals are kept up: new ones are made at its end."""

    explored: Explored
    svi: SVI
    is_warmup: ClassVar[bool] = True

    def init(self, problem: Problem, shards: Shards, lam: Array, batch_size: int) -> Any:
        """Return what `Explored` does."""
        return self.explored.init(problem, shards, lam, batch_size)

    def on_segment_end(self, problem: Problem, shards: Shards, step: Any, batch_size: int) -> Segment:
        """Return to `Explored` at the end."""
        per_epoch = problem.steps_per_epoch(batch_size)
        left = (FIRST_EPOCHS + self.explored.epochs) * per_epoch - step
        shards.when(left <= 0, lambda shards: None, on_host=True)
        return Segment(self, left)

    def local_update(
        self, problem: Problem, broadcast: Array, local: PyTree, shard_state: PyTree, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Update as `SVI` does; what the inner solver keeps stays as it is."""
        local, _, statistics = self.svi.local_update(problem, broadcast, local, (), shard)
        return local, shard_state, statistics

    def server_update(
        self, problem: Problem, server: ExploredServer, total: PyTree, count: int, broadcast: Array
    ) -> ExploredServer:
        """Update as `SVI` does."""
        lam = self.svi.server_update(problem, StepServer(server.lam, jnp.zeros(())), total, count, broadcast).lam
        return server._replace(inner=server.inner._replace(lam=lam))

    def log_metrics(self, problem: Problem, shards: Shards) -> dict[str, Any]:
        """Return those of `Explored`."""
        return self.explored.log_metrics(problem, shards)
