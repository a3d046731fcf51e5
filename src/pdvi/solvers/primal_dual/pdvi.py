"""PD-VI: Algorithm 1 with a scalar penalty; and what it shares with P2D-VI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem
from pdvi.core.solver import Shards, Solver
from pdvi.solvers.local_variables import like
from pdvi.solvers.primal_dual.algorithm import (
    Broadcast,
    Own,
    Server,
    dual_at,
    local_update,
    server_update,
    start,
    with_mean_dual,
    with_penalty,
)
from pdvi.solvers.primal_dual.behavior import SCALE, has_closed_form, without_closed_form
from pdvi.solvers.primal_dual.oracles import default_oracle
from pdvi.solvers.primal_dual.penalty import (
    constant_for,
    curvature_reader,
    curvature_shards,
    penalty_from_curvature,
    penalty_from_eta,
)


class PrimalDual(Solver):
    """What both forms share: everything but the choice of D."""

    eta: eqx.AbstractVar[Any]
    oracle: eqx.AbstractVar[Any]
    any_order: ClassVar[bool] = True

    def automatic(self, problem: Problem, curvature: np.ndarray, batch_size: int) -> Array:
        """Return D where no ``eta`` is given, from the mean curvature at the start."""
        return self.shaped(penalty_from_curvature(problem, curvature, self.constant(problem, batch_size)))

    def constant(self, problem: Problem, batch_size: int) -> float:
        """Return c, how many times the curvature D is."""
        return constant_for(problem, batch_size, SCALE)

    def shaped(self, penalty: Array) -> Array:
        """Return D in the form the method takes it."""
        return penalty

    def init(self, problem: Problem, shards: Shards, lam: Array, batch_size: int) -> Server:
        """Return the server's state before the first step, D from ``eta``, or from the curvature there."""
        if self.eta is not None:
            return start(lam, penalty_from_eta(problem, self.eta))
        subset = curvature_shards(problem)
        total = shards.sum(curvature_reader, lam, subset)
        mean = np.asarray(total, float) / (problem.n_shards if subset is None else len(subset))
        return start(lam, self.automatic(problem, mean, batch_size))

    def init_shard_state(self, problem: Problem, lam: Array, local: PyTree, shard: PyTree | None) -> Own:
        """Return lam_b = lam, mu_b = 0; at given locals mu_b = - grad_lam f_b: a stationary start then stays put."""
        return Own(lam, jnp.zeros_like(lam)) if shard is None else dual_at(problem, lam, local, shard)

    def broadcast(self, server: Server) -> Broadcast:
        """Return lam0 and D."""
        return Broadcast(server.lam0, server.penalty)

    def local_update(
        self, problem: Problem, broadcast: Broadcast, local: PyTree, shard_state: Own, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return phi_b; lam_b and mu_b; lam_b - lam0."""
        oracle = self.oracle or default_oracle(problem)
        return local_update(oracle, problem, broadcast, local, shard_state, shard)

    def server_update(self, problem: Problem, server: Server, total: Array, count: int, broadcast: Broadcast) -> Server:
        """Return gamma, h and lam0 after a batch."""
        return server_update(server, total, count, problem.n_shards, broadcast.lam0)

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
