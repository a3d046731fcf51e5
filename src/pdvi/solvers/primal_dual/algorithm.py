"""Mini-batch primal-dual variational inference: Algorithm 1 with Oracles I and II.

    minimise  sum_b f_b(phi_b, lam_b)   subject to   lam_b = lam0   for every shard b

Oracle I is Oracle II with one number, D = 1/eta, for all coordinates. Nothing here knows how the
subproblem is minimised (`oracles.py`), how D is chosen (`stepsize.py`) or how long to run (`fit.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pdvi.core.problem import Problem
from pdvi.shards.stacking import put, take

Array = jax.Array
PyTree = Any
# (problem, phi, shard, lam0, mu, D) -> argmin over (phi, lam) of f_b + <mu, lam - lam0> + 1/2 |lam - lam0|_D^2
Oracle = Callable[[Problem, PyTree, PyTree, Array, Array, Array], tuple[PyTree, Array]]


class PrimalDualState(NamedTuple):
    """Everything Algorithm 1 carries from one step to the next."""

    lam: Array  # gamma, the mean of the copies of the last batch: the iterate the theorems speak of
    local: PyTree  # phi_b, all shards; None where shards keep what is theirs, as for lam_b and mu_b
    lam0: Array  # the server's global parameters
    h: Array  # the server's correction, always mean_b(mu_b) / D
    copies: Array | None  # lam_b, all shards
    duals: Array | None  # mu_b, all shards
    penalty: Array  # D, a positive diagonal


def initial_state(lam: Array, local: PyTree, penalty: Array, n_shards: int) -> PrimalDualState:
    """lam_b = lam0, mu_b = 0, h = 0. Without ``local``, what belongs to a shard is kept where the shard is."""
    copies = None if local is None else jnp.broadcast_to(lam, (n_shards, lam.size))
    return PrimalDualState(
        lam,
        local,
        lam,
        jnp.zeros_like(lam),
        copies,
        None if copies is None else jnp.zeros_like(copies),
        jnp.broadcast_to(penalty, lam.shape),
    )


def algorithm_1(problem: Problem, oracle: Oracle, state: Any, batch: Array) -> Any:
    """One step: the shards in ``batch`` are visited in parallel, the others are left as they are."""

    def visit(phi: PyTree, shard: PyTree, mu: Array) -> tuple[PyTree, Array, Array]:
        return visit_shard(problem, oracle, phi, shard, state.lam0, mu, state.penalty)

    phi, lam, mu = problem.map_shards(visit, state.local, batch, take(state.duals, batch))
    state = server_update(state, (lam - state.lam0).sum(0), lam.mean(0), state.duals.shape[0])
    return state._replace(
        local=put(state.local, batch, phi),
        copies=put(state.copies, batch, lam),
        duals=put(state.duals, batch, mu),
    )


def visit_shard(
    problem: Problem, oracle: Oracle, phi: PyTree, shard: PyTree, lam0: Array, mu: Array, D: Array
) -> tuple[PyTree, Array, Array]:
    """What happens where the shard is, be it memory, a disk or a cluster's worker."""
    phi, lam = oracle(problem, phi, shard, lam0, mu, D)  # local primal
    return phi, lam, mu + D * (lam - lam0)  # dual ascent


def server_update(state: Any, gap: Array, gamma: Array, n_shards: int) -> Any:
    """What happens at the server: ``gap`` is the sum of lam_b - lam0 over the batch, ``gamma`` the mean of lam_b."""
    h = state.h + gap / n_shards
    return state._replace(lam=gamma, lam0=gamma + h, h=h)  # global primal


def with_penalty(state: Any, penalty: Array, mean_dual: Array | None = None) -> Any:
    """The same point and duals under another D: h is rebuilt from the duals, lam0 from gamma and h.

    Where the duals are kept with the shards, their mean is given, or told by h itself: it is h D.
    """
    if mean_dual is None:
        mean_dual = state.h * state.penalty if state.duals is None else state.duals.mean(0)
    h = mean_dual / penalty
    return state._replace(penalty=penalty, h=h, lam0=state.lam + h)
