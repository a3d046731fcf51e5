"""Stochastic natural-gradient variational inference."""

from __future__ import annotations

from typing import Any, ClassVar

import jax

from pdvi._base.types import Array, PyTree
from pdvi.core.model import Natural, NaturalGradient
from pdvi.core.problem import Problem
from pdvi.solvers.local_variables import optimise
from pdvi.solvers.rates import NaturalSteps, StepServer


class SNGVI(NaturalSteps):
    """Natural gradients by autodiff, on the globals alone (Wu, Gardner 2024).

    eta = eta - a_t grad_m F(lam),   F(lam) = sum_b min_phi f_b(phi, lam),   a_t = rate (t + delay)^-forgetting

    with m the expectation and eta the natural parameters of q(lam), and grad_m estimated from a batch as
    (B / |S|) sum_b grad_m f_b(phi_b, lam), phi_b the minimiser. On a conjugate model grad_m F = eta - eta', and this is
    `SVI`. Needs the model's ``natural``, ``from_natural`` and ``natural_gradient(globals_, gradient)``, which turns
    grad_lam into grad_m.

    Nothing keeps eta within its domain: too large a ``rate`` diverges. ``sweeps`` and ``tol`` as in `SVI`.
    """

    needs: ClassVar[tuple[Any, ...]] = (Natural, NaturalGradient)

    def local_update(
        self, problem: Problem, broadcast: Array, local: PyTree, shard_state: PyTree, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return the locals that fit the globals, and the gradient in the globals there."""
        local = optimise(problem, local, broadcast, shard, self.sweeps, self.tol)
        return local, shard_state, jax.grad(problem.loss, argnums=1)(local, broadcast, shard)

    def server_update(
        self, problem: Problem, server: StepServer, total: Array, count: int, broadcast: Array
    ) -> StepServer:
        """Return the globals after a step down the natural gradient."""
        model, globals_ = problem.model, problem.unravel(server.lam)
        slope = problem.n_shards / count * total
        a = self.step_size(server)
        natural = jax.tree.map(
            lambda eta, gradient: eta - a * gradient,
            model.natural(globals_),
            model.natural_gradient(globals_, problem.unravel(slope)),
        )
        return StepServer(problem.ravel(model.from_natural(natural)), server.made + 1)
