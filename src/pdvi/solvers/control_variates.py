"""Stochastic gradients with control variates: a table of every shard's last gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from pdvi.core.problem import Problem
from pdvi.shards.stacking import put, take
from pdvi.solvers.local_variables import constrained, gradients, optimise, own_rows, require_gradients, with_halo_of
from pdvi.solvers.rates import check_rates, per_coordinate

Array = jax.Array
PyTree = Any


class ControlVariatesState(NamedTuple):
    """The point, every shard's last gradient in the globals, and their sum."""

    lam: Array
    local: PyTree
    table: Array
    total: Array


class ControlVariates(eqx.Module):
    """SAGA on the globals (Defazio, Bach, Lacoste-Julien 2014; in variational inference Wang et al. 2024).

    g_b' = grad_lam f_b(phi_b, lam) for b in S
    lam <- lam - rate [ (B / |S|) sum_{b in S} (g_b' - g_b) + sum_b g_b ],      g_b <- g_b' for b in S

    Unbiased, and without noise once the table holds the gradients of a stationary point. The table is zero at first,
    so a shard's first visit is a plain stochastic gradient. ``rate``: a number, or a dict with one per block, in
    units of 1 / curvature of F = sum_b f_b. Before the gradient is taken the locals are optimised by the model's own
    step (`SVI` has the same ``sweeps`` and ``tol``), or, with a ``local_rate``, moved along their gradient as in `SGD`.
    Assumes a differentiable loss; the table has B rows of all global parameters.
    """

    rate: Any = 1e-3
    local_rate: float | None = None
    sweeps: int = 1
    tol: float = 1e-3

    def init(self, problem: Problem, lam: Array, local: PyTree, batch_size: int) -> ControlVariatesState:
        """The state before the first step."""
        check_rates(problem, self.rate, self.local_rate)
        if self.local_rate is not None:
            require_gradients(self, problem)
        table = jnp.zeros((problem.n_shards, lam.size), lam.dtype)
        return ControlVariatesState(lam, local, table, table[0])

    def step(self, problem: Problem, state: ControlVariatesState, batch: Array) -> ControlVariatesState:
        """Visit the shards in ``batch``."""
        slope_at = jax.grad(problem.loss, argnums=1)

        def visit(phi: PyTree, shard: PyTree) -> tuple[PyTree, Array]:
            phi = self._moved(problem, phi, state.lam, shard)
            return own_rows(problem, phi), slope_at(phi, state.lam, shard)

        phi, slopes = problem.map_shards(visit, state.local, batch)
        change = (slopes - take(state.table, batch)).sum(0)
        estimate = problem.n_shards / batch.shape[0] * change + state.total
        lam = state.lam - per_coordinate(problem, self.rate) * estimate
        table = put(state.table, batch, slopes)
        return ControlVariatesState(lam, put(state.local, batch, phi), table, state.total + change)

    def warm(self, problem: Problem, state: ControlVariatesState) -> ControlVariatesState:
        """The table of a start whose locals are known. A stationary start then stays put."""
        slope_at = jax.grad(problem.loss, argnums=1)
        table = problem.map_shards(lambda phi, shard: slope_at(phi, state.lam, shard), state.local)
        return self.tidy(state._replace(table=table))

    def tidy(self, state: ControlVariatesState) -> ControlVariatesState:
        """The sum rebuilt from the table: in single precision the running sum drifts."""
        return state._replace(total=state.table.sum(0))

    def _moved(self, problem: Problem, phi: PyTree, lam: Array, shard: PyTree) -> PyTree:
        if self.local_rate is None:
            return optimise(problem, phi, lam, shard, self.sweeps, self.tol)
        x, slope, _ = gradients(problem, phi, lam, shard)
        x = jax.tree.map(lambda old, way: old - self.local_rate * way, x, slope)
        return with_halo_of(phi, constrained(problem, x, shard))
