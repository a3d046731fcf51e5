"""Mini-batch primal-dual variational inference: Algorithm 1 with Oracles I and II.

    minimise  sum_b f_b(phi_b, lam_b)   subject to   lam_b = lam0   for every shard b

Oracle I is Oracle II with one number, D = 1/eta, for all coordinates. Nothing here knows how the subproblem is
minimised (`oracles.py`), how D is chosen (`penalty.py`), where shards are (`executors`) or how long to
run (`run/fit.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem
from pdvi.solvers.primal_dual.metric import applied, solved

# (problem, phi, shard, lam0, mu, D) -> argmin over (phi, lam) of f_b + <mu, lam - lam0> + 1/2 |lam - lam0|_D^2
Oracle = Callable[[Problem, PyTree, PyTree, Array, Array, Array], tuple[PyTree, Array]]


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


def local_update(
    oracle: Oracle, problem: Problem, broadcast: Broadcast, phi: PyTree, own: Own, shard: PyTree
) -> tuple[PyTree, PyTree, PyTree]:
    """Update one shard, be it in memory, on a disk or on a cluster's worker."""
    lam0, D = broadcast
    phi, lam = oracle(problem, phi, shard, lam0, own.dual, D)  # local primal
    gap = lam - lam0  # consensus violation
    return phi, Own(lam, own.dual + applied(D, gap)), gap  # dual ascent


def server_update(server: Server, gap: Array, count: int, n_shards: int, lam0: Array) -> Server:
    """Update the server: ``gap`` is the sum of lam_b - lam0 over the ``count`` shards of a batch."""
    gamma = lam0 + gap / count
    h = server.h + gap / n_shards  # == D^-1 mean_b(mu_b)
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


def dual_at(problem: Problem, lam: Array, phi: PyTree, shard: PyTree) -> Own:
    """Return what a shard keeps at a point that is known (fact two): mu_b = - grad_lam f_b."""
    gradient: Any = jax.grad(problem.loss, argnums=1)(phi, lam, shard)
    return Own(lam, -gradient)
