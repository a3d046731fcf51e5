"""Mini-batch primal-dual variational inference: Algorithm 1 with Oracles I and II.

    minimise  sum_b f_b(phi_b, lam_b)   subject to   lam_b = lam0   for every shard b

Oracle I is Oracle II with one number, D = 1/eta, for all coordinates. `oracles.py` minimises the subproblem,
`penalty.py` chooses D.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem
from pdvi.core.solver import Solver
from pdvi.solvers.primal_dual.metric import applied, solved


class Server(NamedTuple):
    """What Algorithm 1 keeps at the server."""

    lam: Array  # gamma, the mean of the copies of the last batch: the iterate the theorems speak of
    lam0: Array  # what the copies should agree on
    h: Array  # the correction, always D^-1 mean_b(mu_b)
    penalty: Array  # D, a positive diagonal or a positive definite matrix (`metric.py`)


class Own(NamedTuple):
    """What it keeps for a shard, besides its phi_b."""

    copy: Array  # lam_b
    dual: Array  # mu_b


class Broadcast(NamedTuple):
    """What a local update must know."""

    lam0: Array
    penalty: Array


class Algorithm1(Solver):
    """Algorithm 1, whatever the oracle and the penalty."""

    any_order: ClassVar[bool] = True

    @abstractmethod
    def minimize(
        self, problem: Problem, phi: PyTree, shard: PyTree, lam0: Array, mu: Array, D: Array
    ) -> tuple[PyTree, Array]:
        """Return the argmin over (phi, lam) of f_b + <mu, lam - lam0> + 1/2 |lam - lam0|_D^2: the oracle."""

    def broadcast(self, server: Server) -> Broadcast:
        """Return lam0 and D."""
        return Broadcast(server.lam0, server.penalty)

    def local_update(
        self, problem: Problem, broadcast: Broadcast, local: PyTree, shard_state: Own, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return phi_b; lam_b and mu_b; lam_b - lam0."""
        lam0, D = broadcast
        phi, lam = self.minimize(problem, local, shard, lam0, shard_state.dual, D)  # local primal
        gap = lam - lam0  # consensus violation
        return phi, Own(lam, shard_state.dual + applied(D, gap)), gap  # dual ascent

    def server_update(self, problem: Problem, server: Server, total: Array, count: int, broadcast: Broadcast) -> Server:
        """Return gamma, h and lam0 after a batch; ``total`` is the sum of its gaps lam_b - lam0."""
        gamma = broadcast.lam0 + total / count
        h = server.h + total / problem.n_shards  # == D^-1 mean_b(mu_b)
        return server._replace(lam=gamma, lam0=gamma + h, h=h)  # global primal


# ---------------------------------------------------------------------------------------------------------------


def start(lam: Array, penalty: Array) -> Server:
    """Return the server before the first step: lam0 = lam, h = 0."""
    penalty = jnp.broadcast_to(penalty, lam.shape) if penalty.ndim < 2 else penalty
    return Server(lam, lam, jnp.zeros_like(lam), penalty)


@jax.jit
def with_penalty(server: Server, penalty: Array) -> Server:
    """Return the same point and duals under another D: h is rebuilt from the mean dual, which is D h."""
    return with_mean_dual(server._replace(penalty=penalty), applied(server.penalty, server.h))


@jax.jit
def with_mean_dual(server: Server, mean_dual: Array) -> Server:
    """Return the server with h rebuilt from the duals (fact one): a running sum drifts, a lost shard takes its own."""
    h = solved(server.penalty, mean_dual)
    return server._replace(h=h, lam0=server.lam + h)
