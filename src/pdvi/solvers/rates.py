"""Step sizes: per block for the methods that move along gradients, decaying for those that need it.

All gradients are those of the sum F = sum_b f_b, estimated from a batch as (B / |S|) sum_{b in S} grad f_b; so a
rate has the units of 1 / curvature of F: twice the data, half the rate. The gradient in a shard's own locals needs
no such factor. Rates of methods that divide a gradient by its size (RMSProp, Adam) have the units of the parameter;
those of natural gradients (SVI, PGSVI, SNGVI) have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from pdvi._base.checks import positive
from pdvi._base.types import Array
from pdvi.core.problem import Problem


def check_rates(problem: Problem, rate: Any, local_rate: float | None = None) -> None:
    """Refuse a ``rate`` that is no positive number and no dict with one for every block."""
    names = [name for name, _ in problem.blocks]
    if isinstance(rate, Mapping) and set(rate) != set(names):
        msg = f"`rate` must be a number or have the blocks {names}, got {sorted(rate)}."
        raise ValueError(msg)
    for value in rate.values() if isinstance(rate, Mapping) else [rate]:
        positive("rate", value)
    if local_rate is not None:
        positive("local_rate", local_rate)


def check_decay(rate: Any, forgetting: float, delay: float) -> None:
    """Refuse settings that `decayed` cannot use."""
    positive("rate", rate)
    positive("delay", delay)
    if forgetting != 0:
        positive("forgetting", forgetting)


def per_coordinate(problem: Problem, rate: Any) -> Array:
    """Return the rate of every entry of ``lam``."""
    blocks = rate if isinstance(rate, Mapping) else dict.fromkeys((name for name, _ in problem.blocks), rate)
    return problem.ravel({name: jnp.broadcast_to(blocks[name], shape) for name, shape in problem.blocks})


def decayed(rate: Any, made: Array, forgetting: float, delay: float) -> Array:
    """Return Robbins-Monro's rate (t + delay)^-forgetting, t being the steps made; constant at forgetting 0."""
    return rate * (made + delay) ** -forgetting
