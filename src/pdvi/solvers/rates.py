"""Step sizes per block, for the methods that move along gradients.

All gradients are those of the sum F = sum_b f_b, estimated from a batch as (B / |S|) sum_{b in S} grad f_b; so a
rate has the units of 1 / curvature of F: twice the data, half the rate. The gradient in a shard's own locals needs
no such factor. Rates of methods that divide a gradient by its size (RMSProp, Adam) have the units of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdvi.problem import Problem

Array = jax.Array


def check_rates(problem: Problem, rate: Any, local_rate: float | None = None) -> None:
    """Refuse a ``rate`` that is no positive number and no dict with one for every block."""
    names = [name for name, _ in problem.blocks]
    if isinstance(rate, Mapping) and set(rate) != set(names):
        msg = f"`rate` must be a number or have the blocks {names}, got {sorted(rate)}."
        raise ValueError(msg)
    for value in [*(rate.values() if isinstance(rate, Mapping) else [rate]), 1.0 if local_rate is None else local_rate]:
        if np.shape(value) != () or not (np.isfinite(value) and value > 0):
            msg = f"`rate` and `local_rate` must be positive and finite, got {value!r}."
            raise ValueError(msg)


def per_coordinate(problem: Problem, rate: Any) -> Array:
    """The rate of every entry of ``lam``."""
    blocks = rate if isinstance(rate, Mapping) else dict.fromkeys((name for name, _ in problem.blocks), rate)
    return problem.ravel({name: jnp.broadcast_to(blocks[name], shape) for name, shape in problem.blocks})


def decayed(rate: Any, made: Array, forgetting: float, delay: float) -> Array:
    """Robbins-Monro: rate (t + delay)^-forgetting, with t the number of steps made; constant at forgetting 0."""
    return rate * (made + delay) ** -forgetting
