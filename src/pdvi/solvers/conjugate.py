"""What the methods for conditionally conjugate models share."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem


@eqx.filter_jit
def best_globals(problem: Problem, statistics: PyTree, lam: Array) -> Array:
    """Return the globals that minimize F for these statistics: a global step with nothing added to the loss.

    A model whose blocks need each other improves them one after the other from ``lam``, closer at each call.
    """
    zero = jnp.zeros(problem.n_global)
    return problem.ravel(problem.model.global_step(statistics, problem.augmentation(lam, zero, zero)))


def statistics_of(problem: Problem, broadcast: Any, local: PyTree, shard_state: PyTree, shard: PyTree) -> PyTree:
    """Return the statistics of a shard: a `ShardFn`."""
    return problem.model.statistics(local, shard)
