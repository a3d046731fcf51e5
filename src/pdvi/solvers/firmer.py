"""A penalty that becomes firmer when an epoch takes the objective up."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from pdvi._base.types import Array
from pdvi.core.problem import Problem
from pdvi.core.solver import Begin, Dialogue, Fresh, State, Tell
from pdvi.solvers.local_variables import recalled, resettled
from pdvi.solvers.primal_dual.algorithm import Server, start
from pdvi.solvers.wrapper import Wrapper

SLACK = 1e-6  # of the objective: a smaller rise is rounding
FACTOR = 3.0  # of the penalty, after an epoch that went up
EARLY = 8  # epochs: what is lost by beginning again is less than what a bad beginning costs


class FirmerServer(NamedTuple):
    """Algorithm 1's server, and the objective it was last judged by."""

    inner: Server
    judged: Array
    first: Array  # lam of the start
    known: Array  # whether the local variables were given with it
    again: Array  # whether to begin again

    @property
    def lam(self) -> Array:
        """Return the reported global parameters."""
        return self.inner.lam


class Firmer(Wrapper):
    """Algorithm 1 with three times the penalty after an epoch at whose end the objective is higher than before it.

    The usual penalty suits batches in random order. In a fixed order that follows the data (by component, by place) all
    of them pull one way for a while, components are lost, and the objective goes up and down without end; more penalty
    holds against that. Components that are lost do not come back, so a run that is found out in its first epochs begins
    again; the trace tells it.
    """

    solver: Any

    def init(self, problem: Problem, lam: Array, batch_size: int) -> FirmerServer:
        """Return the server's state for a solver that asks for nothing."""
        return self._begun(self.solver.init(problem, lam, batch_size))

    def begin(self, problem: Problem, state: State, lam: Array, batch_size: int) -> Dialogue[FirmerServer]:
        """Return the server's state before the first step."""
        return self._begun((yield from self.solver.begin(problem, state, lam, batch_size)))

    def _begun(self, inner: Server) -> FirmerServer:
        no = jnp.asarray(False)
        return FirmerServer(inner, jnp.full((), jnp.inf, inner.lam.dtype), inner.lam, no, no)

    def settled(self, server: FirmerServer) -> FirmerServer:
        """Return the server of a run whose local variables are known."""
        return server._replace(inner=self.solver.settled(server.inner), known=jnp.asarray(True))

    def before_step(self, problem: Problem, server: FirmerServer, batch_size: int) -> FirmerServer:
        """Return what the inner solver makes of its own."""
        return server._replace(inner=self.solver.before_step(problem, server.inner, batch_size))

    def heard(self, server: FirmerServer, epoch: float, objective: float) -> FirmerServer:
        """Return the server with a firmer penalty, where the objective rose."""
        if epoch != int(epoch):
            return server
        rose = objective > float(server.judged) + SLACK * abs(objective)
        if rose:
            server = self.recover(server, FACTOR)
        again = jnp.asarray(bool(rose and epoch <= EARLY))
        return server._replace(again=again, judged=jnp.asarray(objective, server.judged.dtype))

    def turn(self, problem: Problem, state: State, batch_size: int) -> Dialogue[State]:
        """Return the start once more with the firmer penalty, where one is due."""
        server = state.server
        if not server.again:
            return state
        yield Tell("the objective rose: begun again with a firmer penalty")
        inner = start(server.first, server.inner.penalty)
        no, unjudged = jnp.asarray(False), jnp.full_like(server.judged, jnp.inf)
        state = state._replace(server=server._replace(inner=inner, again=no, judged=unjudged))
        if server.known:
            state = yield from resettled(problem, state, server.first)
            return (yield from recalled(self, state))
        state = yield Fresh(state)
        return (yield Begin(state, self))

    def recover(self, server: FirmerServer, factor: float) -> FirmerServer:
        """Return the same point and duals with ``factor`` times the penalty."""
        return server._replace(inner=self.solver.recover(server.inner, factor))
