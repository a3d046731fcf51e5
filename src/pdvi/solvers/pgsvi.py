"""Proximal-gradient stochastic variational inference."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from pdvi.core.problem import Problem
from pdvi.shards.stacking import put
from pdvi.solvers.conjugate import add, best_globals, require
from pdvi.solvers.local_variables import optimise, own_rows
from pdvi.solvers.rates import check_decay

Array = jax.Array
PyTree = Any


class PGSVIState(NamedTuple):
    """Nothing but the point."""

    lam: Array
    local: PyTree


class PGSVI(eqx.Module):
    """Conjugate terms exactly, the others linearised, a KL term to stay near (Khan et al. 2015, 2016).

    With F = conjugate + g, m the expectation and eta the natural parameters of q(lam), estimates from a batch
    scaled by B / |S|, and beta = ``rate``,

        lam = argmin  <m, grad_m g(lam_t)> + conjugate(lam) + KL(q(lam) | q(lam_t)) / beta,   that is
        eta = ( eta_t + beta (eta' - grad_m g) ) / (1 + beta)

    where eta' belongs to the best globals for the statistics of the batch. Without g this is `SVI` with the rate
    beta / (1 + beta), for any beta > 0. Needs the model's ``statistics``, ``global_step``, ``natural`` and
    ``from_natural``; g is what the model offers as ``nonconjugate(local, globals_, shard)`` (a shard's share of the
    terms that its statistics leave out), with ``natural_gradient`` to turn grad_lam into grad_m.

    Locals get ``sweeps`` local steps per visit. On the Potts mixture one such step is itself of this kind: the
    coupling linearised, the rest exactly, and the model's damping as weight of the KL term.
    """

    rate: float = 0.1
    sweeps: int = 1

    def init(self, problem: Problem, lam: Array, local: PyTree, batch_size: int) -> PGSVIState:
        """The state before the first step."""
        require(self, problem, "statistics", "global_step", "natural", "from_natural")
        if hasattr(problem.model, "nonconjugate"):
            require(self, problem, "natural_gradient")
        check_decay(self.rate, 0.0, 1.0)
        return PGSVIState(lam, local)

    def step(self, problem: Problem, state: PGSVIState, batch: Array) -> PGSVIState:
        """Visit the shards in ``batch``."""
        model = problem.model
        globals_ = problem.unravel(state.lam)

        def visit(phi: PyTree, shard: PyTree) -> tuple[PyTree, PyTree, PyTree]:
            phi = optimise(problem, phi, state.lam, shard, self.sweeps, 0.0)
            linearised = hasattr(model, "nonconjugate")
            slope = jax.grad(model.nonconjugate, argnums=1)(phi, globals_, shard) if linearised else None
            return own_rows(problem, phi), model.statistics(phi, shard), slope

        phi, *sums = problem.map_shards(visit, state.local, batch)
        scale = problem.n_shards / batch.shape[0]
        statistics, slope = jax.tree.map(lambda leaf: scale * leaf, add(sums))
        target = model.natural(problem.unravel(best_globals(problem, statistics)))
        if slope is not None:
            target = jax.tree.map(jnp.subtract, target, model.natural_gradient(globals_, slope))
        beta = self.rate
        natural = jax.tree.map(lambda old, wanted: (old + beta * wanted) / (1 + beta), model.natural(globals_), target)
        return PGSVIState(problem.ravel(model.from_natural(natural)), put(state.local, batch, phi))
