"""Stochastic variational inference."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from pdvi.oracles import CoordinateDescent
from pdvi.problem import Problem
from pdvi.shards import put
from pdvi.solvers.conjugate import add, best_globals, require

Array = jax.Array
PyTree = Any


class SVIState(NamedTuple):
    """The point and the number of steps made."""

    lam: Array
    local: PyTree
    made: Array


class SVI(eqx.Module):
    """A natural-gradient step on the globals per batch (Hoffman et al. 2013).

    phi_b = argmin f_b(phi, lam) for b in S,   eta' = natural parameters of the best globals for the
    statistics of the batch scaled by B / |S|,   eta = (1 - a_t) eta + a_t eta'

    with a_t = ``rate``, or with ``forgetting`` kappa the Robbins-Monro steps a_t = rate (t + delay)^-kappa. Assumes
    conjugate globals: the model's ``statistics``, ``global_step``, ``natural`` and ``from_natural``.
    """

    rate: float = 1.0
    forgetting: float = 0.0
    delay: float = 1.0
    sweeps: int = 1

    def init(self, problem: Problem, lam: Array, local: PyTree, batch_size: int) -> SVIState:
        """The state before the first step."""
        require(self, problem, "statistics", "global_step", "natural", "from_natural")
        return SVIState(lam, local, jnp.zeros(()))

    def step(self, problem: Problem, state: SVIState, batch: Array) -> SVIState:
        """Visit the shards in ``batch``."""
        model = problem.model
        local = state.local
        for _ in range(self.sweeps):
            phi = problem.map_shards(
                lambda phi, shard: CoordinateDescent().local_step(problem, phi, state.lam, shard), local, batch
            )
            local = put(local, batch, phi)
        scale = problem.n_shards / batch.shape[0]
        statistics = problem.map_shards(model.statistics, local, batch)
        target = best_globals(problem, jax.tree.map(lambda leaf: scale * leaf, add(statistics)))
        a = jnp.minimum(1.0, self.rate * (state.made + self.delay) ** -self.forgetting)
        natural = jax.tree.map(
            lambda old, new: (1 - a) * old + a * new,
            model.natural(problem.unravel(state.lam)),
            model.natural(problem.unravel(target)),
        )
        return SVIState(problem.ravel(model.from_natural(natural)), local, state.made + 1)
