"""Stochastic natural-gradient variational inference."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from pdvi.core.problem import Problem
from pdvi.shards.stacking import put
from pdvi.solvers.conjugate import require
from pdvi.solvers.local_variables import optimise, own_rows
from pdvi.solvers.rates import check_decay, decayed

Array = jax.Array
PyTree = Any


class SNGVIState(NamedTuple):
    """The point and the number of steps made."""

    lam: Array
    local: PyTree
    made: Array


class SNGVI(eqx.Module):
    """Natural gradients by autodiff, on the globals alone (Wu, Gardner 2024).

    eta = eta - a_t grad_m F(lam),   F(lam) = sum_b min_phi f_b(phi, lam),   a_t = rate (t + delay)^-forgetting

    with m the expectation and eta the natural parameters of q(lam), and grad_m estimated from a batch as
    (B / |S|) sum_b grad_m f_b(phi_b, lam), phi_b the minimiser: the locals are profiled out, and the gradient of a
    minimum is the partial gradient at the minimiser. On a conjugate model grad_m F = eta - eta', so that this is
    `SVI`; it does not need conjugacy, only a q in an exponential family: the model's ``natural``, ``from_natural`` and
    ``natural_gradient(globals_, gradient)``, which turns grad_lam into grad_m.

    Nothing keeps eta within its domain: too large a ``rate`` diverges. ``sweeps`` and ``tol`` as in `SVI`.
    """

    rate: float = 0.1
    forgetting: float = 0.0
    delay: float = 1.0
    sweeps: int | None = None
    tol: float = 1e-3

    def init(self, problem: Problem, lam: Array, local: PyTree, batch_size: int) -> SNGVIState:
        """The state before the first step."""
        require(self, problem, "natural", "from_natural", "natural_gradient")
        check_decay(self.rate, self.forgetting, self.delay)
        return SNGVIState(lam, local, jnp.zeros(()))

    def step(self, problem: Problem, state: SNGVIState, batch: Array) -> SNGVIState:
        """Visit the shards in ``batch``."""
        model = problem.model

        def visit(phi: PyTree, shard: PyTree) -> tuple[PyTree, Array]:
            phi = optimise(problem, phi, state.lam, shard, self.sweeps, self.tol)
            return own_rows(problem, phi), jax.grad(problem.loss, argnums=1)(phi, state.lam, shard)

        phi, slopes = problem.map_shards(visit, state.local, batch)
        slope = problem.n_shards / batch.shape[0] * slopes.sum(0)
        a = decayed(self.rate, state.made, self.forgetting, self.delay)
        globals_ = problem.unravel(state.lam)
        natural = jax.tree.map(
            lambda eta, gradient: eta - a * gradient,
            model.natural(globals_),
            model.natural_gradient(globals_, problem.unravel(slope)),
        )
        lam = problem.ravel(model.from_natural(natural))
        return SNGVIState(lam, put(state.local, batch, phi), state.made + 1)
