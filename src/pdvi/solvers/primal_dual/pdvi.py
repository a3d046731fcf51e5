"""PD-VI: Algorithm 1 with a scalar penalty; and what it shares with P2D-VI."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem
from pdvi.core.solver import Dialogue, Look, Solver, State
from pdvi.solvers.following import followed
from pdvi.solvers.primal_dual.algorithm import (
    Own,
    Server,
    Told,
    dual_at,
    start,
    update,
    visit,
    with_mean_dual,
    with_penalty,
)
from pdvi.solvers.primal_dual.oracles import default_oracle
from pdvi.solvers.primal_dual.penalty import (
    constant_for,
    curvature_reader,
    curvature_shards,
    penalty_from_curvature,
    penalty_from_eta,
)

SCALE = 0.1  # of the automatic penalty: c / (B / |S|), see `penalty`


class PrimalDual(Solver):
    """What both forms share: everything but the choice of D."""

    eta: eqx.AbstractVar[Any]
    oracle: eqx.AbstractVar[Any]
    any_order: ClassVar[bool] = True

    @abstractmethod
    def automatic(self, problem: Problem, curvature: np.ndarray, batch_size: int) -> Array:
        """Return D where no ``eta`` is given, from the mean curvature at the start."""

    def constant(self, problem: Problem, batch_size: int) -> float:
        """Return c, how many times the curvature D is."""
        return constant_for(problem, batch_size, SCALE)

    def shaped(self, penalty: Array) -> Array:
        """Return D in the form the method takes it."""
        return penalty

    def init(self, problem: Problem, lam: Array, batch_size: int) -> Server:
        """Return the server's state for a given ``eta``."""
        return start(lam, penalty_from_eta(problem, self.eta))

    def begin(self, problem: Problem, state: State, lam: Array, batch_size: int) -> Dialogue[Server]:
        """Return the server's state before the first step; asks for the curvature if D is to be chosen."""
        if self.eta is not None:
            return self.init(problem, lam, batch_size)
        looked_at = curvature_shards(problem)
        total = yield Look(state._replace(own=None), curvature_reader, lam, looked_at)
        mean = np.asarray(total, float) / (problem.n_shards if looked_at is None else len(looked_at))
        return start(lam, self.automatic(problem, mean, batch_size))

    def own(self, problem: Problem, server: Server, local: PyTree) -> Own:
        """Return lam_b = lam0, mu_b = 0."""
        return Own(server.lam0, jnp.zeros_like(server.lam0))

    def recall(self, problem: Problem, lam: Array, local: PyTree, shard: PyTree) -> Own:
        """Return lam_b = lam, mu_b = - grad_lam f_b: a stationary start then stays put."""
        return dual_at(problem, lam, local, shard)

    def tell(self, server: Server) -> Told:
        """Return lam0 and D."""
        return Told(server.lam0, server.penalty)

    def visit(
        self, problem: Problem, told: Told, local: PyTree, own: Own, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return phi_b; lam_b and mu_b; lam_b - lam0."""
        return visit(self.oracle or default_oracle(problem), problem, told, local, own, shard)

    def update(self, problem: Problem, server: Server, total: Array, count: int, told: Told) -> Server:
        """Return gamma, h and lam0 after a batch."""
        return update(server, total, count, problem.n_shards, told.lam0)

    def kept(self, told: Any, own: Own) -> Array:
        """Return mu_b: h is its mean over D."""
        return own.dual

    def refreshed(self, problem: Problem, server: Server, total: Array) -> Server:
        """Return the server with h and lam0 rebuilt from the duals."""
        return with_mean_dual(server, total / problem.n_shards)

    def metrics(self, lam: Array, own: Own) -> dict[str, Array]:
        """Return the consensus gap, |lam_b - gamma|."""
        return {"consensus": jnp.linalg.norm(own.copy - lam)}

    def recover(self, server: Server, factor: float) -> Server:
        """Return the same point and duals with ``factor`` times the penalty."""
        return with_penalty(server, factor * server.penalty)


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

    def resolved(self, problem: Problem, batch_size: int) -> Solver:
        """Return this solver, its penalty following the run where the model has no closed form for its globals."""
        return followed(problem, self, "diagonal") if self.eta is None else self

    def automatic(self, problem: Problem, curvature: np.ndarray, batch_size: int) -> Array:
        """Return one number for all coordinates."""
        return penalty_from_curvature(problem, curvature, batch_size, SCALE).mean()

    def shaped(self, penalty: Array) -> Array:
        """Return one number for all coordinates."""
        return jnp.full_like(penalty, penalty.mean())
