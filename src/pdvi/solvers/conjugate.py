"""What the methods for conditionally conjugate models share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pdvi.core.problem import Problem

Array = jax.Array
PyTree = Any


def require(solver: Any, problem: Problem, *methods: str) -> None:
    """Say what the model lacks for this solver."""
    missing = [name for name in methods if not hasattr(problem.model, name)]
    if missing:
        msg = (
            f"{type(solver).__name__} needs a model with {', '.join(map(repr, methods))}; "
            f"{type(problem.model).__name__} lacks {', '.join(map(repr, missing))}. "
            "PDVI does without, and P2DVI with exploration=0."
        )
        raise ValueError(msg)


def add(statistics: PyTree) -> PyTree:
    """The statistics of stacked shards as one."""
    return jax.tree.map(lambda leaf: leaf.sum(0), statistics)


def best_globals(problem: Problem, statistics: PyTree) -> Array:
    """The globals that minimise F for these statistics: a global step with nothing added to the loss."""
    zero = jnp.zeros(problem.n_global)
    return problem.ravel(problem.model.global_step(statistics, problem.augmentation(zero, zero, zero)))
