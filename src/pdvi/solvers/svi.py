"""Stochastic variational inference."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pdvi._base.types import Array, PyTree
from pdvi.core.model import Conjugate, Natural
from pdvi.core.problem import Problem
from pdvi.solvers.conjugate import best_globals
from pdvi.solvers.local_variables import optimise
from pdvi.solvers.rates import NaturalSteps, StepServer


class SVI(NaturalSteps):
    """A natural-gradient step on the globals per batch (Hoffman et al. 2013).

    phi_b = argmin f_b(phi, lam) for b in S,   eta' = natural parameters of the best globals for the
    statistics of the batch scaled by B / |S|,   eta = (1 - a_t) eta + a_t eta'

    with a_t = ``rate``, or with ``forgetting`` kappa the Robbins-Monro steps a_t = rate (t + delay)^-kappa, and never
    above 1. Needs the model's ``statistics``, ``global_step``, ``natural`` and ``from_natural``.

    The locals of a visit are optimised by at most ``sweeps`` local steps, until one moves no entry by more than ``tol``
    times the largest; by default by one, and by up to 20 on the Potts mixture, as in the paper.
    """

    needs: ClassVar[tuple[Any, ...]] = (Conjugate, Natural)

    def local_update(
        self, problem: Problem, broadcast: Array, local: PyTree, shard_state: PyTree, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return the locals that fit the globals, and their statistics."""
        local = optimise(problem, local, broadcast, shard, self.sweeps, self.tol)
        return local, shard_state, problem.model.statistics(local, shard)

    def server_update(
        self, problem: Problem, server: StepServer, total: PyTree, count: int, broadcast: Array
    ) -> StepServer:
        """Return the globals after a natural-gradient step towards those that fit the batch."""
        model, scale = problem.model, problem.n_shards / count
        target = best_globals(problem, jax.tree.map(lambda leaf: scale * leaf, total), server.lam)
        a = jnp.minimum(1.0, self.step_size(server))
        natural = jax.tree.map(
            lambda old, new: (1 - a) * old + a * new,
            model.natural(problem.unravel(server.lam)),
            model.natural(problem.unravel(target)),
        )
        return StepServer(problem.ravel(model.from_natural(natural)), server.made + 1)
