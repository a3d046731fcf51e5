"""Stochastic variational inference."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pdvi._base.types import Array, PyTree
from pdvi.core.model import Conjugate, Natural, require
from pdvi.core.problem import Problem
from pdvi.core.solver import Shards, Solver
from pdvi.solvers.conjugate import best_globals
from pdvi.solvers.local_variables import optimise
from pdvi.solvers.rates import check_decay, decayed


class SVIServer(NamedTuple):
    """The globals and the number of steps made."""

    lam: Array
    made: Array


class SVI(Solver):
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

    def init(self, problem: Problem, shards: Shards, lam: Array, batch_size: int) -> SVIServer:
        """Return the server's state before the first step."""
        require(type(self).__name__, problem.model, Conjugate, Natural)
        check_decay(self.rate, self.forgetting, self.delay)
        return SVIServer(lam, jnp.zeros(()))

    def local_update(
        self, problem: Problem, broadcast: Array, local: PyTree, shard_state: PyTree, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return the locals that fit the globals, and their statistics."""
        local = optimise(problem, local, broadcast, shard, self.sweeps, self.tol)
        return local, shard_state, problem.model.statistics(local, shard)

    def server_update(
        self, problem: Problem, server: SVIServer, total: PyTree, count: int, broadcast: Array
    ) -> SVIServer:
        """Return the globals after a natural-gradient step towards those that fit the batch."""
        model, scale = problem.model, problem.n_shards / count
        target = best_globals(problem, jax.tree.map(lambda leaf: scale * leaf, total), server.lam)
        a = jnp.minimum(1.0, decayed(self.rate, server.made, self.forgetting, self.delay))
        natural = jax.tree.map(
            lambda old, new: (1 - a) * old + a * new,
            model.natural(problem.unravel(server.lam)),
            model.natural(problem.unravel(target)),
        )
        return SVIServer(problem.ravel(model.from_natural(natural)), server.made + 1)
