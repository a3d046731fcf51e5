"""Stochastic gradients with control variates: a table of every shard's last gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem, with_halo_of
from pdvi.core.solver import Shards, Solver
from pdvi.solvers.local_variables import (
    as_it_is,
    constrained,
    gradients,
    like,
    optimise,
    require_gradients,
)
from pdvi.solvers.rates import check_rates, per_coordinate


class ControlVariatesServer(NamedTuple):
    """The globals, and the sum of every shard's last gradient."""

    lam: Array
    total: Array


class ControlVariates(Solver):
    """SAGA on the globals (Defazio, Bach, Lacoste-Julien 2014; in variational inference Wang et al. 2024).

    g_b' = grad_lam f_b(phi_b, lam) for b in S
    lam <- lam - rate [ (B / |S|) sum_{b in S} (g_b' - g_b) + sum_b g_b ],      g_b <- g_b' for b in S

    Unbiased, and without noise once the table, B rows of all global parameters, holds the gradients of a stationary
    point. It is zero at first. ``rate``: a number, or a dict with one per block, in units of 1 / curvature of
    F = sum_b f_b. Before the gradient is taken the locals are optimised by the model's own step (``sweeps`` and ``tol``
    as in `SVI`), or, with a ``local_rate``, moved along their gradient as in `SGD`.
    """

    rate: Any = 1e-3
    local_rate: float | None = None
    sweeps: int = 1
    tol: float = 1e-3

    def init(self, problem: Problem, shards: Shards, lam: Array, batch_size: int) -> ControlVariatesServer:
        """Return the server's state before the first step."""
        check_rates(problem, self.rate, self.local_rate)
        if self.local_rate is not None:
            require_gradients(type(self).__name__, problem)
        return ControlVariatesServer(lam, jnp.zeros_like(lam))

    def init_shard_state(self, problem: Problem, lam: Array, local: PyTree, shard: PyTree | None) -> Array:
        """Return zero, so that the first visit is a plain stochastic gradient; at given locals the gradient there."""
        return jnp.zeros_like(lam) if shard is None else jax.grad(problem.loss, argnums=1)(local, lam, shard)

    def local_update(
        self, problem: Problem, broadcast: Array, local: PyTree, shard_state: Array, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return the moved locals, the gradient there, and by how much it changed."""
        if self.local_rate is None:
            local = optimise(problem, local, broadcast, shard, self.sweeps, self.tol)
        else:
            x, slope, _ = gradients(problem, local, broadcast, shard)
            x = jax.tree.map(lambda old, way: old - self.local_rate * way, x, slope)
            local = with_halo_of(local, constrained(problem, x, shard))
        slope = jax.grad(problem.loss, argnums=1)(local, broadcast, shard)
        return local, slope, slope - shard_state

    def server_update(
        self, problem: Problem, server: ControlVariatesServer, total: Array, count: int, broadcast: Array
    ) -> ControlVariatesServer:
        """Return the globals after a step down the corrected gradient."""
        estimate = problem.n_shards / count * total + server.total
        lam = server.lam - per_coordinate(problem, self.rate) * estimate
        return ControlVariatesServer(lam, server.total + total)

    def rebuild_sums(self, problem: Problem, shards: Shards) -> None:
        """Rebuild the sum of all gradients."""
        shards.server = shards.server._replace(total=like(shards.lam, shards.sum_states(as_it_is, None)))
