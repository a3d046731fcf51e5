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
from pdvi.core.solver import After, Dialogue, Left, Look, Solver, Stage, State, Tell, Visit
from pdvi.solvers.beginning import Settle, near_optimum
from pdvi.solvers.local_variables import recalled
from pdvi.solvers.primal_dual.algorithm import Server, start, with_penalty
from pdvi.solvers.primal_dual.arrow import rows_are_independent
from pdvi.solvers.primal_dual.curvature import ROUNDING, At, Curvature, Profile, Separate, changed, nats_left
from pdvi.solvers.primal_dual.metric import root
from pdvi.solvers.primal_dual.oracles import NEWTON_DIMENSION, CoordinateDescent, JointNewton
from pdvi.solvers.primal_dual.penalty import curvature_shards
from pdvi.solvers.wrapper import Wrapper

FULL_DIMENSION = 256  # globals up to which D is a matrix and a visit takes Newton steps on all: P^2 numbers, P products
SLACK = 1e-6  # of the objective: a smaller rise is rounding
FIRMER = 3.0  # times: the next constant after a leg that went up
TWICE = 2  # legs that went up with one constant: it is not tried again
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
    least: Array  # the least c that has not gone wrong twice
    rises: Array  # legs with that c in which the objective rose
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
    by and by after legs in which it fell, to what has not failed twice: an objective may rise before it falls, so it is
    judged at the end of a leg. Where locals follow, Newton steps on at most 256 shards come first (`beginning`).
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
        """Return the server's state before the first step; where locals follow, the first turn finds point and D."""
        if self.profiled:
            anything = jnp.asarray(np.eye(lam.size) if self.full else np.ones(lam.size), lam.dtype)
            looked_at = curvature_shards(problem)
            told = yield self._look(state, At(lam, anything), looked_at)
            diagonal = np.asarray(told.diagonal, float) / (problem.n_shards if looked_at is None else len(looked_at))
            inner = start(lam, self.solver.automatic(problem, diagonal, batch_size))
        else:
            inner = yield from self.solver.begin(problem, state, lam, batch_size)
        server = self._begun(problem, inner, batch_size)
        if not self.full:
            return server
        sizes = jnp.asarray(np.diag(np.sqrt(inner.penalty)))
        if self.profiled:
            return server._replace(inner=with_penalty(inner, sizes @ sizes))
        _, mean = yield from self._mean(problem, state, At(lam, jnp.sqrt(inner.penalty)))
        return server._replace(inner=with_penalty(inner, self._first(mean, float(server.constant), sizes)))

    def _first(self, mean: np.ndarray, constant: float, units: Array) -> Array:
        """Return the first D: directions without curvature have next to none all the same."""
        R = np.asarray(units)
        penalty, _ = changed(jnp.asarray(R**2 if R.ndim == 1 else R @ R.T), mean, constant, 1 / FIRST_FLOOR)
        return penalty

    def _set_out(self, problem: Problem, state: State) -> Dialogue[State]:
        """Return the state near an optimum of some shards, with D and duals as they are there."""
        state = state._replace(own=None)  # all of it will be new, and without it locals settle by one program
        server, looked_at = state.server, curvature_shards(problem)
        settle = Settle(self.independent_rows)
        reader = After(settle, Profile(self.full, self.independent_rows))
        units = root(server.inner.penalty)
        began = yield from near_optimum(problem, state, server.lam, units, reader, looked_at)
        count = problem.n_shards if looked_at is None else len(looked_at)
        if began.steps:
            yield Tell(f"{began.steps} Newton steps on {count} shards first")
        mean = np.asarray(began.told.following, float) / count
        if np.isfinite(mean).all():
            penalty = self._first(mean, float(server.constant), began.units)
            server = server._replace(inner=start(began.lam, self.solver.shaped(penalty)))
        state = state._replace(server=server._replace(due=jnp.asarray(1, server.due.dtype)))
        state = yield Visit(state, settle, state.lam)
        return (yield from recalled(self, state))

    def _begun(self, problem: Problem, inner: Server, batch_size: int) -> FollowingServer:
        constant = jnp.asarray(self.solver.constant(problem, batch_size), inner.lam.dtype)
        zero, due = jnp.asarray(0, jnp.int32), jnp.asarray(0 if self.profiled else 1, jnp.int32)
        return FollowingServer(inner, zero, constant, constant, zero, jnp.full_like(constant, jnp.inf), due)

    def _look(self, state: State, at: At, shards: np.ndarray | None = None) -> Look:
        """Return the request for derivatives where locals follow.

        What the method keeps for shards is left out, so that it is one program before the first step and after.
        """
        return Look(state._replace(own=None), Profile(self.full, self.independent_rows), at, shards)

    def _mean(self, problem: Problem, state: State, at: At) -> Dialogue[tuple[float, np.ndarray]]:
        """Return the loss, and the mean curvature in the units of ``at``, of the shards looked at."""
        looked_at = curvature_shards(problem)
        if self.profiled:
            told = yield self._look(state, at, looked_at)
            loss, total = told.loss, told.following
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
        if int(server.due) == 0:
            return (yield from self._set_out(problem, state))
        epoch, rest = divmod(int(server.made), problem.steps_per_epoch(batch_size))
        if rest or epoch < int(server.due):
            return state
        D = server.inner.penalty
        loss, mean = yield from self._mean(problem, state, At(server.lam, root(D)))
        if not (np.isfinite(loss) and np.isfinite(mean).all()):
            return state  # the safeguard judges what led here
        server = self._judged(server, loss)
        penalty, cut_short = changed(D, mean, float(server.constant))
        due = epoch + 1 if cut_short else following_epoch(epoch)
        server = server._replace(
            inner=with_penalty(server.inner, self.solver.shaped(penalty)),
            due=jnp.asarray(due, server.due.dtype),
            judged=jnp.asarray(loss, server.judged.dtype),
        )
        return state._replace(server=server)

    def _judged(self, server: FollowingServer, loss: float) -> FollowingServer:
        """Return the server with a firmer c if the objective rose since D was last estimated, else back by and by."""
        constant, least, rises = float(server.constant), float(server.least), int(server.rises)
        if loss > float(server.judged) + SLACK * abs(loss):
            rises += constant <= least
            constant *= FIRMER
            if rises == TWICE:
                least, rises = constant, 0
        else:
            constant = max(least, constant / FIRMER)
        dtype = server.constant.dtype
        return server._replace(
            constant=jnp.asarray(constant, dtype), least=jnp.asarray(least, dtype), rises=jnp.asarray(rises, jnp.int32)
        )

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
            nats, noise = nats_left(at.root, told.reduced, told.profiled, told.decrement), told.rounding
        else:
            slope, gain, noise = yield Look(state, Separate(self.independent_rows), at.lam)
            # D is c times the mean curvature of the shards
            total = problem.n_shards / float(state.server.constant) * np.asarray(inner.penalty, float)
            along = np.linalg.solve(total, slope) if total.ndim == 2 else np.asarray(slope, float) / total
            nats = 0.5 * float(np.asarray(slope, float) @ along) + float(gain)
        return Left(nats, float(noise) / ROUNDING)  # an error that is likely, not the largest

    def notes(self, server: FollowingServer) -> dict[str, float]:
        """Return c, and the geometric mean of the diagonal of D."""
        D = np.asarray(server.inner.penalty, float)
        diagonal = D if D.ndim == 1 else np.diagonal(D)
        with np.errstate(divide="ignore", invalid="ignore"):
            return {"constant": float(server.constant), "penalty": float(np.exp(np.log(diagonal).mean()))}
