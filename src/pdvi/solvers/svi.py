"""Stochastic variational inference."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from pdvi.core.problem import Problem
from pdvi.shards.stacking import put
from pdvi.solvers.conjugate import add, best_globals, require
from pdvi.solvers.local_variables import optimise, own_rows
from pdvi.solvers.rates import check_decay, decayed

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

    with a_t = ``rate``, or with ``forgetting`` kappa the Robbins-Monro steps a_t = rate (t + delay)^-kappa, and never
    above 1. Assumes conjugate globals: the model's ``statistics``, ``global_step``, ``natural`` and ``from_natural``.

    The locals of a visit are optimised by at most ``sweeps`` local steps, until one moves no entry by more than
    ``tol`` times the largest. By default once, and up to 20 times on the Potts mixture: the paper's adaptation of
    SVI to a model whose locals have no joint closed form.
    """

    rate: float = 0.1
    forgetting: float = 0.0
    delay: float = 1.0
    sweeps: int | None = None
    tol: float = 1e-3

    def init(self, problem: Problem, lam: Array, local: PyTree, batch_size: int) -> SVIState:
        """The state before the first step."""
        require(self, problem, "statistics", "global_step", "natural", "from_natural")
        check_decay(self.rate, self.forgetting, self.delay)
        return SVIState(lam, local, jnp.zeros(()))

    def step(self, problem: Problem, state: Any, batch: Array) -> Any:
        """Visit the shards in ``batch``. Any state with the fields of `SVIState` will do; P2D-VI explores so."""

        def visit(phi: PyTree, shard: PyTree) -> tuple[PyTree, PyTree]:
            phi, statistics = self.look(problem, phi, state.lam, shard)
            return own_rows(problem, phi), statistics

        phi, statistics = problem.map_shards(visit, state.local, batch)
        return self.learn(problem, state, add(statistics), batch.shape[0])._replace(local=put(state.local, batch, phi))

    def look(self, problem: Problem, phi: PyTree, lam: Array, shard: PyTree) -> tuple[PyTree, PyTree]:
        """One shard's part of a step: its locals (and the halo rows they came with), and its statistics."""
        phi = optimise(problem, phi, lam, shard, self.sweeps, self.tol)
        return phi, problem.model.statistics(phi, shard)

    def learn(self, problem: Problem, state: Any, statistics: PyTree, count: int) -> Any:
        """The server's part of a step, from the added statistics of ``count`` shards."""
        model, scale = problem.model, problem.n_shards / count
        target = best_globals(problem, jax.tree.map(lambda leaf: scale * leaf, statistics))
        a = jnp.minimum(1.0, decayed(self.rate, state.made, self.forgetting, self.delay))
        natural = jax.tree.map(
            lambda old, new: (1 - a) * old + a * new,
            model.natural(problem.unravel(state.lam)),
            model.natural(problem.unravel(target)),
        )
        return state._replace(lam=problem.ravel(model.from_natural(natural)), made=state.made + 1)
