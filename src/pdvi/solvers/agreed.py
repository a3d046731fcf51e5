"""Where a model tells its globals by statistics: shards begin in agreement, and the penalty follows the run."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array
from pdvi.core.model import Conjugate, require
from pdvi.core.problem import Problem
from pdvi.core.solver import Dialogue, Look, Stage, State, Tell
from pdvi.solvers.conjugate import best_globals, statistics_of
from pdvi.solvers.following import following_epoch
from pdvi.solvers.local_variables import recalled, resettled
from pdvi.solvers.primal_dual.algorithm import Server, start, with_penalty
from pdvi.solvers.primal_dual.curvature import changed
from pdvi.solvers.primal_dual.penalty import curvature_reader, curvature_shards
from pdvi.solvers.wrapper import Wrapper

# c / (B / |S|). The visits of an epoch then weigh twice as much as all shards together, and those at its beginning
# still count at its end (e^-2). With 0.1 nothing is left of them (e^-10): shards that come last decide, and the order
# matters. With 1 it does not matter at all, but the last digits take twice as long.
SCALE = 0.5
SLACK = 1e-6  # of the objective: a smaller rise is rounding
FIRMER = 2.0  # times: the constant after an epoch that went up
START, KNOWN = 0, -1  # what is due before the first epoch: to find local variables first, or to take those there are


class AgreedServer(NamedTuple):
    """Algorithm 1's server, and what its penalty is made of."""

    inner: Server
    made: Array  # steps
    constant: Array  # c
    judged: Array  # the objective after the last epoch
    due: Array  # the epoch after which D is estimated next; START or KNOWN before the first

    @property
    def lam(self) -> Array:
        """Return the reported global parameters."""
        return self.inner.lam


class Agreed(Wrapper):
    """Algorithm 1 from where all shards agree, D = c times the curvature there, anew after epochs 1, 2, 3, 4, 6, ...

    The duals that Algorithm 1 begins with, 0, say that every shard is content with the start. None is, so the first
    epoch takes lam wherever the shards come from that are visited last, and components are lost for good. Here
    one pass over all shards finds their local variables at the start, their statistics tell the best lam for these, and
    mu_b = - grad f_b there, whose mean is 0. After that a visit says what has changed at a shard since, no more.

    At each change D falls at most tenfold in any coordinate, and where that is too little the next change comes after
    another epoch. c is max(1, B / |S| / 2) by default, and twice as much after every epoch in which the objective rose.
    ``solver`` is a `P2DVI`; the point and the duals stay when D changes: h = D^-1 mean(mu). Needs a model with
    ``statistics`` and ``global_step``.
    """

    solver: Any

    def init(self, problem: Problem, lam: Array, batch_size: int) -> AgreedServer:
        """Return the server's state for a solver with a given ``eta``."""
        return self._begun(problem, self.solver.init(problem, lam, batch_size), batch_size)

    def begin(self, problem: Problem, state: State, lam: Array, batch_size: int) -> Dialogue[AgreedServer]:
        """Return the server's state before the first step."""
        require(type(self.solver).__name__, problem.model, Conjugate)
        inner = yield from self.solver.begin(problem, state, lam, batch_size)
        return self._begun(problem, inner, batch_size)

    def _begun(self, problem: Problem, inner: Server, batch_size: int) -> AgreedServer:
        constant = jnp.asarray(self.solver.constant(problem, batch_size), inner.lam.dtype)
        zero, due = jnp.asarray(0, jnp.int32), jnp.asarray(START, jnp.int32)
        return AgreedServer(inner, zero, constant, jnp.full_like(constant, jnp.inf), due)

    def settled(self, server: AgreedServer) -> AgreedServer:
        """Return the server of a run whose local variables are known."""
        return server._replace(inner=self.solver.settled(server.inner), due=jnp.full_like(server.due, KNOWN))

    def before_step(self, problem: Problem, server: AgreedServer, batch_size: int) -> AgreedServer:
        """Count the steps."""
        inner = self.solver.before_step(problem, server.inner, batch_size)
        return server._replace(inner=inner, made=server.made + 1)

    def stage(self, problem: Problem, server: AgreedServer, batch_size: int) -> Stage:
        """Return the steps to the end of the epoch, after which D may change."""
        per_epoch = problem.steps_per_epoch(batch_size)
        return Stage(self, per_epoch - int(server.made) % per_epoch)

    def heard(self, server: AgreedServer, epoch: float, objective: float) -> AgreedServer:
        """Return the server with a firmer penalty, where the objective rose."""
        if epoch != int(epoch):
            return server
        if objective > float(server.judged) + SLACK * abs(objective):
            server = self.recover(server, FIRMER)
        return server._replace(judged=jnp.asarray(objective, server.judged.dtype))

    def recover(self, server: AgreedServer, factor: float) -> AgreedServer:
        """Return the same point and duals with ``factor`` times the penalty, now and later."""
        return server._replace(inner=self.solver.recover(server.inner, factor), constant=factor * server.constant)

    def turn(self, problem: Problem, state: State, batch_size: int) -> Dialogue[State]:
        """Return the start on which shards agree, or the state with a new D, where one is due."""
        epoch, rest = divmod(int(state.server.made), problem.steps_per_epoch(batch_size))
        due = int(state.server.due)
        if rest or epoch < due:
            return state
        if due <= 0:
            state = yield from self._in_agreement(problem, state, due == KNOWN)
        server, looked_at = state.server, curvature_shards(problem)
        total = yield Look(state._replace(own=None), curvature_reader, server.lam, looked_at)
        mean = np.asarray(total, float) / (problem.n_shards if looked_at is None else len(looked_at))
        if not np.isfinite(mean).all():
            return state  # the safeguard judges what led here
        D = server.inner.penalty
        penalty, cut_short = changed(D, mean / np.asarray(D, float), float(server.constant))
        due = epoch + 1 if cut_short else following_epoch(epoch)
        inner = with_penalty(server.inner, penalty)
        return state._replace(server=server._replace(inner=inner, due=jnp.asarray(due, server.due.dtype)))

    def _in_agreement(self, problem: Problem, state: State, known: bool) -> Dialogue[State]:
        """Return the best globals for the local variables at the start, and the duals there."""
        server = state.server
        if not known:
            state = yield from resettled(problem, state, server.lam)
        statistics = yield Look(state._replace(own=None), statistics_of, None)
        inner = start(best_globals(problem, statistics), server.inner.penalty)
        yield Tell("one pass first: shards begin in agreement")
        return (yield from recalled(self, state._replace(server=server._replace(inner=inner))))

    def notes(self, server: AgreedServer) -> dict[str, float]:
        """Return c."""
        return {"constant": float(server.constant)}
