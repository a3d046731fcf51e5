"""Proximal-gradient stochastic variational inference."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pdvi._base.checks import positive
from pdvi._base.types import Array, PyTree
from pdvi.core.model import Conjugate, Natural, NaturalGradient, Nonconjugate, offers, require
from pdvi.core.problem import Problem
from pdvi.core.solver import Shards, Solver
from pdvi.solvers.cavi import CAVIServer
from pdvi.solvers.conjugate import best_globals
from pdvi.solvers.local_variables import optimise


class PGSVI(Solver):
    """Conjugate terms exactly, the others linearised, a KL term to stay near (Khan et al. 2015, 2016).

    With F = conjugate + g, m the expectation and eta the natural parameters of q(lam), estimates from a batch
    scaled by B / |S|, and beta = ``rate``,

        lam = argmin  <m, grad_m g(lam_t)> + conjugate(lam) + KL(q(lam) | q(lam_t)) / beta,   that is
        eta = ( eta_t + beta (eta' - grad_m g) ) / (1 + beta)

    where eta' belongs to the best globals for the statistics of the batch. Without g this is `SVI` with the rate
    beta / (1 + beta). Needs the model's ``statistics``, ``global_step``, ``natural`` and ``from_natural``; g is the
    model's ``nonconjugate(local, globals_, shard)`` (a shard's share of the terms that its statistics leave out), with
    ``natural_gradient`` to turn grad_lam into grad_m. Locals get ``sweeps`` local steps per visit.
    """

    rate: float = 0.1
    sweeps: int = 1

    def init(self, problem: Problem, shards: Shards, lam: Array, batch_size: int) -> CAVIServer:
        """Return the server's state before the first step."""
        require(type(self).__name__, problem.model, Conjugate, Natural)
        if offers(problem.model, Nonconjugate):
            require(type(self).__name__, problem.model, NaturalGradient)
        positive("rate", self.rate)
        return CAVIServer(lam)

    def local_update(
        self, problem: Problem, broadcast: Array, local: PyTree, shard_state: PyTree, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return the locals that fit the globals, their statistics, and the slope of what these leave out."""
        model, globals_ = problem.model, problem.unravel(broadcast)
        local = optimise(problem, local, broadcast, shard, self.sweeps, 0.0)
        linearised = offers(model, Nonconjugate)
        slope = jax.grad(model.nonconjugate, argnums=1)(local, globals_, shard) if linearised else None
        return local, shard_state, (model.statistics(local, shard), slope)

    def server_update(
        self, problem: Problem, server: CAVIServer, total: PyTree, count: int, broadcast: Array
    ) -> CAVIServer:
        """Return the globals after a proximal step."""
        model, globals_ = problem.model, problem.unravel(server.lam)
        scale = problem.n_shards / count
        statistics, slope = jax.tree.map(lambda leaf: scale * leaf, total)
        target = model.natural(problem.unravel(best_globals(problem, statistics, server.lam)))
        if slope is not None:
            target = jax.tree.map(jnp.subtract, target, model.natural_gradient(globals_, slope))
        beta = self.rate
        natural = jax.tree.map(lambda old, wanted: (old + beta * wanted) / (1 + beta), model.natural(globals_), target)
        return CAVIServer(problem.ravel(model.from_natural(natural)))
