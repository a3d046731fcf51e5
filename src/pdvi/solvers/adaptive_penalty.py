"""A penalty that follows the run: D estimated anew from the curvature at the current point, more and more rarely."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.device import on_device
from pdvi._base.types import Array, PyTree
from pdvi.core.model import Conjugate, require
from pdvi.core.problem import Problem
from pdvi.core.solver import After, RemainingGain, Segment, Shards
from pdvi.solvers.conjugate import best_globals, statistics_of
from pdvi.solvers.local_variables import like, local_step, reinit_shard_states
from pdvi.solvers.newton_init import OptimizeLocals, near_optimum
from pdvi.solvers.primal_dual.algorithm import Server, start, with_penalty
from pdvi.solvers.primal_dual.curvature import ROUNDING, At, Curvature, Profile, Separate, changed, nats_left
from pdvi.solvers.primal_dual.metric import root
from pdvi.solvers.primal_dual.penalty import curvature_reader, curvature_shards
from pdvi.solvers.wrapper import Wrapper

REL_TOL = 1e-6  # of the objective: a smaller rise is rounding
INCREASE_FACTOR = 3.0  # times: the next constant after the objective rose between two changes of D
MAX_RISES = 2  # with one constant: it is not tried again
FIRST_FLOOR = 1e-6  # of the largest eigenvalue, in units of the diagonal, before anything else is known
GLOBAL_STEPS = 3  # of the consensus initialization: blocks that need each other come close in so many
UPDATE_EPOCHS = np.unique([1, 2, 3, *(m << k for k in range(1, 24) for m in (2, 3))])  # 1, 2, 3, 4, 6, 8, 12, 16, ...
NOT_INITIALIZED = -1  # in place of an epoch: the initialization is due
NO_PENALTY = 1e-12  # D before it is estimated for the first time: any curvature is more

CONSENSUS, NEWTON = "consensus", "newton"  # initializations


class AdaptiveServer(NamedTuple):
    """Algorithm 1's server, and what its penalty is made of."""

    inner: Server
    constant: Array  # c
    least: Array  # the least c that has not gone wrong twice
    rises: Array  # how often the objective rose with that c
    judged: Array  # the objective when D was last estimated
    due: Array  # the epoch after which it is next; NOT_INITIALIZED before the initialization

    @property
    def lam(self) -> Array:
        """Return the reported global parameters."""
        return self.inner.lam


def next_update(epoch: Any) -> Array:
    """Return the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... after an epoch.

    Changes become rare, so that what is proven for one D holds from the last of them on.
    """
    epochs = jnp.asarray(UPDATE_EPOCHS, jnp.int32)
    return jnp.where(epochs > epoch, epochs, epochs[-1]).min()


class AdaptivePenalty(Wrapper):
    """Algorithm 1 with D = c times the curvature at the current point, anew after epochs 1, 2, 3, 4, 6, 8, 12, 16, ...

    Curvature at the start says little where parameters are nonlinear (a log standard deviation, say). At each change D
    falls at most tenfold in any direction, and where that is too little the next change comes after another epoch. c is
    max(1, scale B / |S|), three times as much after every leg between two changes in which the objective rose, and a
    third after legs in which it fell, down to what has not failed twice. The point and the duals stay when D changes.

    Parameters
    ----------
    solver
        a `PDVI` or a `P2DVI`.
    initialization
        "consensus": one pass over all shards finds their local variables (unless they are given), their statistics the
        best lam for these, and mu_b = - grad f_b there, whose mean is 0. With duals of 0 the first epoch would take lam
        to where the shards that are visited last have it, and components would be lost. Needs a model with
        ``statistics`` and ``global_step``.
        "newton": Newton steps on at most 256 shards (`newton_init`), for models without closed forms whose locals and
        globals are moved at once; the curvature is then that after minimizing over the locals. None: neither.
    full
        D is a matrix, so that correlated parameters cost nothing; else a diagonal.
    independent_rows
        rows of a shard's local variables meet in the globals only.
    warm
        local variables are given: the consensus initialization does not look for them, and D, estimated there, stays.
    """

    solver: Any
    initialization: str | None = eqx.field(default=None, static=True)
    full: bool = eqx.field(default=False, static=True)
    independent_rows: bool = eqx.field(default=False, static=True)
    warm: bool = eqx.field(default=False, static=True)

    # ---------------------------------------------------------------------------------------------- the start

    def init(self, problem: Problem, shards: Shards, lam: Array, batch_size: int) -> AdaptiveServer:
        """Return the server's state before the first step, with D from the curvature there.

        The consensus initialization moves lam, and estimates D and all shard states where it ends; that by Newton's
        method moves lam and D.
        """
        constant = self.solver.constant(problem, batch_size)
        if self.initialization == CONSENSUS:
            require(type(self.solver).__name__, problem.model, Conjugate)
            shards.warm = False
            nothing, h = (on_device(np.full(lam.shape, value), lam.dtype) for value in (NO_PENALTY, 0.0))
            inner = Server(lam, lam, h, nothing)
        elif self.profiled:
            subset, n_sampled = curvature_shards(problem)
            identity = jnp.asarray(np.eye(lam.size) if self.full else np.ones(lam.size), lam.dtype)
            diagonal = np.asarray(shards.sum(self._curvature, At(lam, identity), subset).diagonal, float)
            penalty = self.solver.automatic(problem, diagonal / n_sampled, batch_size)
            inner = start(lam, jnp.asarray(np.diag(penalty)) if self.full else penalty)
        else:
            inner = self.solver.init(problem, shards, lam, batch_size)
            if self.full:
                sizes = jnp.sqrt(inner.penalty)
                _, mean = self._mean_curvature(problem, shards, At(lam, sizes))
                inner = with_penalty(inner, self._first_penalty(mean, constant, np.diag(sizes)))
        number, count = (partial(on_device, dtype=dtype) for dtype in (lam.dtype, np.int32))
        due = 1 if self.initialization is None else NOT_INITIALIZED
        return AdaptiveServer(inner, number(constant), number(constant), count(0), number(np.inf), count(due))

    @property
    def profiled(self) -> bool:
        """Return whether curvature is that after minimizing over the locals, which counts if a visit moves both."""
        return self.initialization == NEWTON

    @property
    def _curvature(self) -> Profile | Curvature:
        return (Profile if self.profiled else Curvature)(self.full, self.independent_rows)

    def _mean_curvature(self, problem: Problem, shards: Shards, at: At) -> tuple[Any, Any]:
        """Return the loss, and the mean curvature in the units of ``at``, of the shards that are sampled."""
        subset, n_sampled = curvature_shards(problem)
        loss, total, *_ = shards.sum(self._curvature, at, subset)
        return loss, total / n_sampled

    def _first_penalty(self, mean: Any, constant: float, units: Any) -> Array:
        """Return the first D: directions without curvature have next to none all the same."""
        R = np.asarray(units)
        penalty, _ = changed(jnp.asarray(R**2 if R.ndim == 1 else R @ R.T), mean, constant, 1 / FIRST_FLOOR)
        return penalty

    def _init_in_consensus(self, problem: Problem, shards: Shards) -> None:
        """Go to the best globals for the local variables at the start, with the duals there; D is due next."""
        if not self.warm:
            shards.update(local_step, shards.lam)
        server = shards.server
        lam = consensus_globals(problem, shards.sum(statistics_of, None), server.lam)
        penalty = server.inner.penalty
        if self.warm:
            subset, n_sampled = curvature_shards(problem)
            mean = shards.sum(curvature_reader, lam, subset) / n_sampled
            # D stays positive where the loss is flat
            penalty = self.solver.shaped(jnp.where(mean == 0, penalty, server.constant * mean))
        shards.server = server._replace(inner=start(lam, penalty), due=jnp.zeros_like(server.due))
        shards.note("consensus initialization")
        reinit_shard_states(problem, shards, self)

    def _init_by_newton(self, problem: Problem, shards: Shards) -> None:
        """Go near an optimum of some shards, with D and duals as they are there."""
        shards.state = shards.state._replace(own=None)  # all will be new, and without them one program serves
        server, (subset, n_sampled) = shards.server, curvature_shards(problem)
        optimize = OptimizeLocals(self.independent_rows)
        reader = After(optimize, self._curvature)
        found = near_optimum(shards, server.lam, root(server.inner.penalty), reader, subset)
        if found.n_steps:
            shards.note(f"{found.n_steps} Newton steps on {n_sampled} shards first")
        mean = np.asarray(found.derivatives.following, float) / n_sampled
        if np.isfinite(mean).all():
            penalty = self._first_penalty(mean, float(server.constant), found.units)
            server = server._replace(inner=start(found.lam, self.solver.shaped(penalty)))
        shards.server = server._replace(due=jnp.ones_like(server.due))
        shards.update(optimize, shards.lam)
        reinit_shard_states(problem, shards, self)

    # ---------------------------------------------------------------------------------------------- on its way

    def on_segment_end(self, problem: Problem, shards: Shards, step: Any, batch_size: int) -> Segment:
        """Initialize, or estimate D anew, where that is due; segments are epochs."""
        per_epoch = problem.steps_per_epoch(batch_size)
        epoch, rest = step // per_epoch, step % per_epoch
        on_host = self.full or self.profiled  # eigenvalues are taken in double precision
        if self.initialization is not None:
            initialize = self._init_by_newton if self.profiled else self._init_in_consensus
            shards.when(shards.server.due == NOT_INITIALIZED, partial(initialize, problem), on_host=on_host)
        if self.warm:
            return Segment(self)
        due = (rest == 0) & (epoch >= shards.server.due)
        shards.when(due, lambda shards: self._update_penalty(problem, shards, epoch), on_host=on_host)
        return Segment(self, per_epoch - rest)

    def _update_penalty(self, problem: Problem, shards: Shards, epoch: Any) -> None:
        server = shards.server
        D = server.inner.penalty
        loss, mean = self._mean_curvature(problem, shards, At(server.lam, root(D)))
        if self.initialization == CONSENSUS:  # nothing is known before: a rare component has the others' D at first
            before = jnp.where(jnp.isinf(server.judged), server.constant * block_means(problem, D * mean), D)
            D, mean = before, mean * (D / before)
        new = self._judge(server, loss)
        penalty, cut_short = changed(D, mean, new.constant)
        due = jnp.where(cut_short, epoch + 1, next_update(epoch))
        inner = with_penalty(server.inner, self.solver.shaped(penalty))
        new = new._replace(inner=inner, due=due.astype(server.due.dtype))
        finite = jnp.isfinite(new.judged) & jnp.isfinite(jnp.asarray(mean)).all()  # else the safeguard judges
        shards.server = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, server)

    def _judge(self, server: AdaptiveServer, loss: Any) -> AdaptiveServer:
        """Return the server with a larger c if the objective rose since D was last estimated, else back by and by."""
        loss = jnp.asarray(loss, server.judged.dtype)
        constant, least = server.constant, server.least
        rose = loss > server.judged + REL_TOL * jnp.abs(loss)
        rises = server.rises + (rose & (constant <= least))
        constant = jnp.where(rose, INCREASE_FACTOR * constant, jnp.maximum(least, constant / INCREASE_FACTOR))
        failed = rose & (rises == MAX_RISES)
        return server._replace(
            constant=constant,
            least=jnp.where(failed, constant, least),
            rises=jnp.where(failed, 0, rises),
            judged=loss,
        )

    def increase_penalty(self, server: AdaptiveServer, factor: float) -> AdaptiveServer:
        """Return the same point and duals with ``factor`` times the penalty, now and later."""
        inner = self.solver.increase_penalty(server.inner, factor)
        return server._replace(inner=inner, constant=factor * server.constant)

    # ---------------------------------------------------------------------------------------------- what is told

    def remaining_gain(self, problem: Problem, shards: Shards) -> RemainingGain:
        """Return what a Newton step on everything would gain, from the derivatives of all shards."""
        if self.initialization == CONSENSUS:
            return super().remaining_gain(problem, shards)
        inner = shards.server.inner
        at = At(inner.lam, root(inner.penalty))
        if self.profiled:
            found = shards.sum(self._curvature, at)
            nats, noise = nats_left(at.root, found.reduced, found.profiled, found.decrement), found.rounding
        else:
            slope, gain, noise = shards.sum(Separate(self.independent_rows), at.lam)
            # D is c times the mean curvature of the shards
            total = problem.n_shards / float(shards.server.constant) * np.asarray(inner.penalty, float)
            along = np.linalg.solve(total, slope) if total.ndim == 2 else np.asarray(slope, float) / total
            nats = 0.5 * float(np.asarray(slope, float) @ along) + float(gain)
        return RemainingGain(nats, float(noise) / ROUNDING)  # an error that is likely, not the largest

    def log_metrics(self, problem: Problem, shards: Shards) -> dict[str, Any]:
        """Return those of the inner solver, c, and the geometric mean of the diagonal of D."""
        D = shards.server.inner.penalty
        diagonal = D if D.ndim == 1 else jnp.diagonal(D)
        own = {"constant": shards.server.constant, "penalty": jnp.exp(jnp.log(diagonal).mean())}
        return {**super().log_metrics(problem, shards), **own}


@eqx.filter_jit
def consensus_globals(problem: Problem, statistics: PyTree, lam: Array) -> Array:
    """Return the best globals for these statistics, by a few global steps that each start where the last one ended."""
    return jax.lax.fori_loop(0, GLOBAL_STEPS, lambda _, lam: like(lam, best_globals(problem, statistics, lam)), lam)


def block_means(problem: Problem, vector: Array) -> Array:
    """Return a vector of the globals with every entry replaced by the mean of its block."""
    return jnp.concatenate([jnp.full_like(vector[part], vector[part].mean()) for part in problem.block_slices.values()])
