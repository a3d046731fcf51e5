"""Penalty continuation: a small penalty first, which lets shards disagree for a while, then the final one."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from pdvi._base.types import Array
from pdvi.core.problem import Problem
from pdvi.core.solver import Dialogue, State
from pdvi.solvers.primal_dual.algorithm import Server, with_penalty
from pdvi.solvers.wrapper import Wrapper

Stages = tuple[tuple[float, int], ...]
ENDED = 2**30  # a count of steps after which no stage begins


class ContinuedServer(NamedTuple):
    """Algorithm 1's server, whose penalty is on its way to ``target``."""

    inner: Server
    target: Array
    made: Array  # steps

    @property
    def lam(self) -> Array:
        """Return the reported global parameters."""
        return self.inner.lam


class Continued(Wrapper):
    """Algorithm 1 with D multiplied by ``factor`` for some epochs, stage by stage, before it takes its final value.

    A small D lets shards disagree for a while, which explores; a large D converges fast. ``solver`` is a `PDVI` or
    `P2DVI`, ``stages`` are ((factor, epochs), ...). When D changes the point and the duals stay: h = D^-1 mean(mu).
    """

    solver: Any
    stages: Stages = eqx.field(static=True)

    def init(self, problem: Problem, lam: Array, batch_size: int) -> ContinuedServer:
        """Return the server's state for a solver with a given ``eta``."""
        return self._begun(self.solver.init(problem, lam, batch_size))

    def begin(self, problem: Problem, state: State, lam: Array, batch_size: int) -> Dialogue[ContinuedServer]:
        """Return the server's state before the first step."""
        return self._begun((yield from self.solver.begin(problem, state, lam, batch_size)))

    def _begun(self, inner: Server) -> ContinuedServer:
        target = inner.penalty
        return ContinuedServer(with_penalty(inner, self.stages[0][0] * target), target, jnp.asarray(0, jnp.int32))

    def settled(self, server: ContinuedServer) -> ContinuedServer:
        """Return the server with its final penalty."""
        inner = with_penalty(server.inner, server.target)
        return server._replace(inner=inner, made=jnp.full_like(server.made, ENDED))

    def before_step(self, problem: Problem, server: ContinuedServer, batch_size: int) -> ContinuedServer:
        """Return the server with a new D where a stage begins."""
        end, inner = 0, server.inner
        following = [*(factor for factor, _ in self.stages[1:]), 1.0]
        for (_, epochs), factor in zip(self.stages, following):
            end += epochs * problem.steps_per_epoch(batch_size)
            changed = with_penalty(inner, factor * server.target)
            inner = jax.tree.map(lambda new, old, at=end: jnp.where(server.made == at, new, old), changed, inner)
        return server._replace(inner=inner, made=server.made + 1)

    def recover(self, server: ContinuedServer, factor: float) -> ContinuedServer:
        """Return the same point with the final penalty, or ``factor`` times it if that is what failed."""
        final = (server.inner.penalty >= server.target).all()
        target = jnp.where(final, factor * server.target, server.target)
        inner = with_penalty(server.inner, target)
        return ContinuedServer(inner, target, jnp.full_like(server.made, ENDED))
