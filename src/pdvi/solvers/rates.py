"""Step sizes: per block for the methods that move along gradients, decaying for those that move natural parameters.

Gradients are those of F = sum_b f_b, estimated from a batch as (B / |S|) sum_{b in S} grad f_b; so a rate has the units
of 1 / curvature of F: twice the data, half the rate. Rates of RMSProp and Adam, which divide a gradient by its size,
have the units of the parameter; those of natural gradients (SVI, PGSVI, SNGVI) have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from pdvi._base.checks import positive
from pdvi._base.types import Array
from pdvi.core.model import require
from pdvi.core.problem import Problem
from pdvi.core.solver import Shards, Solver


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


def per_coordinate(problem: Problem, rate: Any) -> Array:
    """Return the rate of every entry of ``lam``."""
    blocks = rate if isinstance(rate, Mapping) else dict.fromkeys((name for name, _ in problem.blocks), rate)
    return problem.ravel({name: jnp.broadcast_to(blocks[name], shape) for name, shape in problem.blocks})


class StepServer(NamedTuple):
    """The globals and the number of steps made."""

    lam: Array
    made: Array


class NaturalSteps(Solver):
    """What `SVI` and `SNGVI` share: settings, and the steps a_t = rate (t + delay)^-forgetting."""

    rate: float = 0.1
    forgetting: float = 0.0
    delay: float = 1.0
    sweeps: int | None = None
    tol: float = 1e-3
    needs: ClassVar[tuple[Any, ...]]

    def init(self, problem: Problem, shards: Shards, lam: Array, batch_size: int) -> StepServer:
        """Return the server's state before the first step."""
        require(type(self).__name__, problem.model, *self.needs)
        positive("rate", self.rate)
        positive("delay", self.delay)
        if self.forgetting != 0:
            positive("forgetting", self.forgetting)
        return StepServer(lam, jnp.zeros(()))

    def step_size(self, server: StepServer) -> Array:
        """Return a_t, t being the steps made."""
        return self.rate * (server.made + self.delay) ** -self.forgetting
