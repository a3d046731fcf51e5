"""A penalty that follows the run: D estimated anew from the curvature at the current point, more and more rarely."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array
from pdvi.core.model import Conjugate, Constrained, Exact, GlobalStep, LocalStep, offers
from pdvi.core.problem import Problem
from pdvi.core.solver import Dialogue, Left, Look, Solver, Stage, State
from pdvi.solvers.primal_dual.algorithm import Server, start, with_penalty
from pdvi.solvers.primal_dual.arrow import rows_are_independent
from pdvi.solvers.primal_dual.curvature import At, Curvature, Profile, Separate, changed, nats_left
from pdvi.solvers.primal_dual.metric import root
from pdvi.solvers.primal_dual.oracles import NEWTON_DIMENSION, CoordinateDescent, JointNewton
from pdvi.solvers.primal_dual.penalty import curvature_shards
from pdvi.solvers.wrapper import Wrapper

FULL_DIMENSION = 128  # globals up to which D is a matrix and a visit takes Newton steps on all: P^2 numbers, P products
SLACK = 1e-6  # of the objective: a smaller rise is rounding
FIRMER = 3.0  # times: the next constant after a leg that went up
ROUNDING = 4.0  # rounding errors of the shards' losses added up, that the objective is known to
FIRST_FLOOR = 1e-6  # of the largest eigenvalue, in units of the diagonal, before anything else is known


def followed(problem: Problem, solver: Any, preconditioner: str | None) -> Solver:
    """Return a solver whose penalty follows the run where a model has no closed form for its globals.

    Where locals are any numbers and few, or independent by row, a visit moves locals and globals at once, and D is the
    curvature that is left when locals follow; else they take turns, and D is that for fixed locals.
    """
    model = problem.model
    closed = offers(model, Exact) or offers(model, Conjugate)
    if problem.halo_rows or (closed and preconditioner != "full"):
        return solver
    few = problem.n_global <= FULL_DIMENSION
    rows = rows_are_independent(problem)
    shapes = [leaf.shape[1:] if rows else leaf.shape for leaf in jax.tree.leaves(problem.local_shape())]
    small = sum(math.prod(shape) for shape in shapes) <= NEWTON_DIMENSION
    chosen = solver.oracle is None
    together = chosen and few and small and not (offers(model, LocalStep) or offers(model, Constrained))
    if chosen:
        oracle = JointNewton(independent_rows=rows) if together else CoordinateDescent(independent_rows=rows)
        solver = dataclasses.replace(solver, oracle=oracle)
    own_step = offers(model, GlobalStep)  # it takes a diagonal, and is faster than any that takes a matrix
    full = (few and chosen and not own_step) if preconditioner is None else preconditioner == "full"
    return Following(solver, full=full, profiled=together, independent_rows=rows)


class FollowingServer(NamedTuple):
    """Algorithm 1's server, and what its penalty is made of."""

    inner: Server
    made: Array  # steps
    constant: Array  # c
    least: Array  # c where nothing goes wrong
    judged: Array  # the objective when D was last estimated
    due: Array  # the epoch after which it is next

    @property
    def lam(self) -> Array:
        """Return the reported global parameters."""
        return self.inner.lam


def following_epoch(epoch: int) -> int:
    """Return the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...

    Changes become rare, so that what is proven for one D holds from the last of them on.
    """
    power = 1
    while True:
        for candidate in (2 * power, 3 * power) if power > 1 else (1, 2, 3):
            if candidate > epoch:
                return candidate
        power *= 2


class Following(Wrapper):
    """Algorithm 1 with D = c times the curvature at the current point, anew after epochs 1, 2, 3, 4, 6, 8, 12, 16, ...

    Curvature at the start says little where parameters are nonlinear (a log standard deviation, say). At each change D
    falls at most tenfold in any direction, and where that is too little the next change comes after another epoch. c is
    max(1, scale B / |S|), and three times as much after every leg between two changes in which the objective rose, back
    by and by after legs in which it fell: an objective may rise before it falls, so it is judged at the end of a leg.
    ``solver`` is a `PDVI` or `P2DVI`; the point and the duals stay when D changes: h = D^-1 mean(mu).

    Parameters
    ----------
    full
        D is a matrix, so that correlated parameters cost nothing; else a diagonal.
    profiled
        the curvature after minimising over the locals, which is what counts if the oracle moves both.
    """

    solver: Any
    full: bool = eqx.field(static=True)
    profiled: bool = eqx.field(static=True)
    independent_rows: bool = eqx.field(static=True)

    def init(self, problem: Problem, lam: Array, batch_size: int) -> FollowingServer:
        """Return the server's state for a solver with a given ``eta``."""
        return self._begun(problem, self.solver.init(problem, lam, batch_size), batch_size)

    def begin(self, problem: Problem, state: State, lam: Array, batch_size: int) -> Dialogue[FollowingServer]:
        """Return the server's state before the first step; locals are not at home yet, so nothing is profiled."""
        if self.profiled:
            units = jnp.eye(lam.size, dtype=lam.dtype) if self.full else jnp.ones_like(lam)
            looked_at = curvature_shards(problem)
            told = yield self._look(state, At(lam, units), looked_at)
            diagonal = np.asarray(told.diagonal, float) / (problem.n_shards if looked_at is None else len(looked_at))
            inner = start(lam, self.solver.automatic(problem, diagonal, batch_size))
        else:
            inner = yield from self.solver.begin(problem, state, lam, batch_size)
        server = self._begun(problem, inner, batch_size)
        if self.full:
            units = jnp.sqrt(inner.penalty)
            at = At(lam, jnp.diag(units) if self.profiled else units)
            _, mean = yield from self._mean(problem, state, at, following=False)
            values, vectors = np.linalg.eigh(float(server.constant) * mean)
            mean = (vectors * np.maximum(values, FIRST_FLOOR * max(1.0, values.max()))) @ vectors.T
            sizes = np.asarray(units, float)
            penalty = jnp.asarray(sizes[:, None] * mean * sizes, inner.penalty.dtype)
            server = server._replace(inner=with_penalty(inner, penalty))
        return server

    def _begun(self, problem: Problem, inner: Server, batch_size: int) -> FollowingServer:
        constant = jnp.asarray(self.solver.constant(problem, batch_size), inner.lam.dtype)
        zero, one = jnp.asarray(0, jnp.int32), jnp.asarray(1, jnp.int32)
        return FollowingServer(inner, zero, constant, constant, jnp.full_like(constant, jnp.inf), one)

    def _look(self, state: State, at: At, shards: np.ndarray | None = None) -> Look:
        """Return the request for derivatives where locals follow.

        What the method keeps for shards is left out, so that it is one program before the first step and after.
        """
        return Look(state._replace(own=None), Profile(self.full, self.independent_rows), at, shards)

    def _mean(self, problem: Problem, state: State, at: At, *, following: bool) -> Dialogue[tuple[float, np.ndarray]]:
        """Return the loss, and the mean curvature in the units of ``at``, of the shards looked at.

        ``following``: that which is left when locals follow.
        """
        looked_at = curvature_shards(problem)
        if self.profiled:
            told = yield self._look(state, at, looked_at)
            loss, total = told.loss, told.following if following else told.fixed
        else:
            loss, total = yield Look(state, Curvature(self.full, self.independent_rows), at, looked_at)
        return float(loss), np.asarray(total, float) / (problem.n_shards if looked_at is None else len(looked_at))

    def before_step(self, problem: Problem, server: FollowingServer, batch_size: int) -> FollowingServer:
        """Count the steps."""
        inner = self.solver.before_step(problem, server.inner, batch_size)
        return server._replace(inner=inner, made=server.made + 1)

    def stage(self, problem: Problem, server: FollowingServer, batch_size: int) -> Stage:
        """Return the steps to the end of the epoch, after which D may change."""
        per_epoch = problem.steps_per_epoch(batch_size)
        return Stage(self, per_epoch - int(server.made) % per_epoch)

    def turn(self, problem: Problem, state: State, batch_size: int) -> Dialogue[State]:
        """Return the state with a new D, where one is due."""
        server = state.server
        epoch, rest = divmod(int(server.made), problem.steps_per_epoch(batch_size))
        if rest or epoch < int(server.due):
            return state
        D = server.inner.penalty
        loss, mean = yield from self._mean(problem, state, At(server.lam, root(D)), following=self.profiled)
        if not (np.isfinite(loss) and np.isfinite(mean).all()):
            return state  # the safeguard judges what led here
        constant = self._judged(server, loss)
        penalty, cut_short = changed(D, mean, constant)
        due = epoch + 1 if cut_short else following_epoch(epoch)
        server = server._replace(
            inner=with_penalty(server.inner, self.solver.shaped(penalty)),
            due=jnp.asarray(due, server.due.dtype),
            constant=jnp.asarray(constant, server.constant.dtype),
            judged=jnp.asarray(loss, server.judged.dtype),
        )
        return state._replace(server=server)

    def _judged(self, server: FollowingServer, loss: float) -> float:
        """Return c: firmer if the objective rose since D was last estimated, and back by and by if it fell."""
        constant, least = float(server.constant), float(server.least)
        if loss > float(server.judged) + SLACK * abs(loss):
            return constant * FIRMER
        return max(least, constant / FIRMER)

    def recover(self, server: FollowingServer, factor: float) -> FollowingServer:
        """Return the same point and duals with ``factor`` times the penalty, now and later."""
        inner = self.solver.recover(server.inner, factor)
        return server._replace(inner=inner, constant=factor * server.constant)

    def left(self, problem: Problem, state: State) -> Dialogue[Left]:
        """Return what a Newton step on everything would gain, from the derivatives of all shards."""
        inner = state.server.inner
        at = At(inner.lam, root(inner.penalty))
        if self.profiled:
            told = yield self._look(state, at)
            nats, size = nats_left(at.root, told.reduced, told.profiled, told.decrement), told.size
        else:
            slope, gain, size = yield Look(state, Separate(self.independent_rows), at.lam)
            # D is c times the mean curvature of the shards
            total = problem.n_shards / float(state.server.constant) * np.asarray(inner.penalty, float)
            along = np.linalg.solve(total, slope) if total.ndim == 2 else np.asarray(slope, float) / total
            nats = 0.5 * float(np.asarray(slope, float) @ along) + float(gain)
        return Left(nats, ROUNDING * float(jnp.finfo(inner.lam.dtype).eps) * float(size))

    def notes(self, server: FollowingServer) -> dict[str, float]:
        """Return c, and the geometric mean of the diagonal of D."""
        D = np.asarray(server.inner.penalty, float)
        diagonal = D if D.ndim == 1 else np.diagonal(D)
        with np.errstate(divide="ignore", invalid="ignore"):
            return {"constant": float(server.constant), "penalty": float(np.exp(np.log(diagonal).mean()))}
