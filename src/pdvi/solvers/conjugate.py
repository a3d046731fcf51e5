"""What the methods for conditionally conjugate models share."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem
from pdvi.core.solver import add

__all__ = ["add", "best_globals", "statistics_of"]


@eqx.filter_jit
def best_globals(problem: Problem, statistics: PyTree) -> Array:
    """Return the globals that minimise F for these statistics: a global step with nothing added to the loss."""
    zero = jnp.zeros(problem.n_global)
    return problem.ravel(problem.model.global_step(statistics, problem.augmentation(zero, zero, zero)))


def statistics_of(problem: Problem, told: Any, local: PyTree, own: PyTree, shard: PyTree) -> PyTree:
    """Return the statistics of a shard: a reader."""
    return problem.model.statistics(local, shard)
