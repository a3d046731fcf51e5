"""What the methods for conditionally conjugate models share."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem


@eqx.filter_jit
def best_globals(problem: Problem, statistics: PyTree, lam: Array | None = None) -> Array:
    """Return the globals that minimize F for these statistics: a global step with nothing added to the loss.

    A model whose blocks need each other improves them one after the other, starting from ``lam``, and comes closer each
    time it is called; for a model whose step is the joint minimizer ``lam`` does not matter and may be left out.
    """
    zero = jnp.zeros(problem.n_global)
    lam = zero if lam is None else lam
    return problem.ravel(problem.model.global_step(statistics, problem.augmentation(lam, zero, zero)))


def statistics_of(problem: Problem, broadcast: Any, local: PyTree, shard_state: PyTree, shard: PyTree) -> PyTree:
    """Return the statistics of a shard: a `ShardFn`."""
    return problem.model.statistics(local, shard)
