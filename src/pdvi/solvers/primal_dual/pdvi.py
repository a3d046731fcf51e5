"""PD-VI: Algorithm 1 with a scalar penalty; and what it shares with P2D-VI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem
from pdvi.core.solver import Shards, Solver
from pdvi.solvers.local_variables import like
from pdvi.solvers.primal_dual.algorithm import Algorithm1, Own, Server, start, with_mean_dual, with_penalty
from pdvi.solvers.primal_dual.behavior import SCALE, has_closed_form, without_closed_form
from pdvi.solvers.primal_dual.oracles import default_oracle
from pdvi.solvers.primal_dual.penalty import (
    curvature_reader,
    curvature_shards,
    penalty_from_curvature,
    penalty_from_eta,
)


class PrimalDual(Algorithm1):
    """What both forms share: everything but the choice of D."""

    eta: eqx.AbstractVar[Any]
    oracle: eqx.AbstractVar[Any]

    def automatic(self, problem: Problem, curvature: np.ndarray, batch_size: int) -> Array:
        """Return D where no ``eta`` is given, from the mean curvature at the start."""
        return self.shaped(penalty_from_curvature(problem, curvature, self.constant(problem, batch_size)))

    def constant(self, problem: Problem, batch_size: int) -> float:
        """Return c = max(1, scale B / |S|), how many times the curvature D is.

        With |S| = 1 Algorithm 1 is Point-SAGA, whose best step scales the same way.
        """
        return max(1.0, self._scale * problem.n_shards / batch_size)

    @property
    def _scale(self) -> float:
        return SCALE

    def shaped(self, penalty: Array) -> Array:
        """Return D in the form the method takes it."""
        return penalty

    def init(self, problem: Problem, shards: Shards, lam: Array, batch_size: int) -> Server:
        """Return the server's state before the first step, D from ``eta``, or from the curvature there."""
        if self.eta is not None:
            return start(lam, penalty_from_eta(problem, self.eta))
        subset, n_sampled = curvature_shards(problem)
        total = np.asarray(shards.sum(curvature_reader, lam, subset), float)
        return start(lam, self.automatic(problem, total / n_sampled, batch_size))

    def init_shard_state(self, problem: Problem, lam: Array, local: PyTree, shard: PyTree | None) -> Own:
        """Return lam_b = lam, mu_b = 0; at given locals mu_b = - grad_lam f_b: a stationary start then stays put."""
        if shard is None:
            return Own(lam, jnp.zeros_like(lam))
        return Own(lam, -jax.grad(problem.loss, argnums=1)(local, lam, shard))

    def minimize(
        self, problem: Problem, phi: PyTree, shard: PyTree, lam0: Array, mu: Array, D: Array
    ) -> tuple[PyTree, Array]:
        """Return what the oracle does: the one that is set, or the model's closed form, or coordinate descent."""
        return (self.oracle or default_oracle(problem))(problem, phi, shard, lam0, mu, D)

    def rebuild_sums(self, problem: Problem, shards: Shards) -> None:
        """Rebuild h and lam0 from the duals."""
        total = like(shards.lam, shards.sum_states(dual_of, None))
        shards.server = with_mean_dual(shards.server, total / problem.n_shards)

    def log_metrics(self, problem: Problem, shards: Shards) -> dict[str, Any]:
        """Return the mean consensus gap, |lam_b - gamma|."""
        return {"consensus": shards.sum_states(consensus_gap, shards.lam) / problem.n_shards}

    def increase_penalty(self, server: Server, factor: float) -> Server:
        """Return the same point and duals with ``factor`` times the penalty."""
        return with_penalty(server, factor * server.penalty)


def dual_of(broadcast: Any, shard_state: Own) -> Array:
    """Return mu_b: a `ShardStateFn`."""
    return shard_state.dual


def consensus_gap(lam: Array, shard_state: Own) -> Array:
    """Return |lam_b - lam|: a `ShardStateFn`."""
    return jnp.linalg.norm(shard_state.copy - lam)


class PDVI(PrimalDual):
    """PD-VI, Algorithm 1 with Oracle I: one step size ``eta`` for all global parameters.

    phi_b, lam_b = argmin f_b(phi, lam) + <mu_b, lam - lam0> + |lam - lam0|^2 / (2 eta)
    mu_b        += (lam_b - lam0) / eta

    Without ``eta`` the penalty is the automatic one of `P2DVI` averaged over the coordinates, and follows the run where
    that of `P2DVI` does: safe, and slow where coordinates have different units.
    """

    eta: float | None = None
    oracle: Any = None

    def __check_init__(self) -> None:
        if isinstance(self.eta, Mapping) or (self.eta is not None and np.shape(self.eta) != ()):
            msg = f"`eta` of PDVI must be one positive number, got {self.eta!r}; use P2DVI for one per block."
            raise ValueError(msg)

    def specialize(self, problem: Problem, batch_size: int, *, warm: bool = False) -> Solver:
        """Return this solver, its penalty following the run where the model has no closed form for its globals."""
        if self.eta is not None or has_closed_form(problem):
            return self
        return without_closed_form(problem, self, "diagonal")

    def shaped(self, penalty: Array) -> Array:
        """Return one number for all coordinates."""
        return jnp.full_like(penalty, penalty.mean())
