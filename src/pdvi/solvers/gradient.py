"""SGD, RMSProp and Adam on all variables, by automatic differentiation."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from pdvi.core.problem import Problem
from pdvi.shards.stacking import put, take
from pdvi.solvers.local_variables import constrained, free, gradients, require_gradients
from pdvi.solvers.rates import check_rates, per_coordinate

Array = jax.Array
PyTree = Any


class GradientState(NamedTuple):
    """The point, and what the method remembers of past gradients: of the globals, and per shard of the locals."""

    lam: Array
    local: PyTree
    memory: PyTree
    local_memory: PyTree


class _Gradient(eqx.Module):
    """lam <- lam - rate d(g),   g = (B / |S|) sum_{b in S} grad_lam f_b(phi_b, lam)
    x_b <- x_b - local_rate d(grad_x f_b)   for b in S,   phi_b = phi(x_b)

    with the direction d of the method, one update of each per batch, both gradients taken at the old point. A shard's
    memory changes only when it is visited. Locals that are probabilities move as logits, phi = softmax(x), as in the
    paper's appendix: the model's ``to_unconstrained(local)`` and ``from_unconstrained(x, shard)``. The rates' scale is
    that of `pdvi.solvers.rates`.
    """

    rate: eqx.AbstractVar[Any]
    local_rate: eqx.AbstractVar[float]

    @abstractmethod
    def transform(self) -> optax.GradientTransformation:
        """The method's direction, from optax, without a rate."""

    def init(self, problem: Problem, lam: Array, local: PyTree, batch_size: int) -> GradientState:
        """The state before the first step."""
        require_gradients(self, problem)
        check_rates(problem, self.rate, self.local_rate)
        transform = self.transform()
        shards = jnp.arange(problem.n_shards)
        local_memory = jax.vmap(lambda b: transform.init(free(problem, take(local, b))))(shards)
        return GradientState(lam, local, transform.init(lam), local_memory)

    def step(self, problem: Problem, state: GradientState, batch: Array) -> GradientState:
        """Visit the shards in ``batch``."""
        transform = self.transform()

        def visit(phi: PyTree, shard: PyTree, memory: PyTree) -> tuple[PyTree, PyTree, Array]:
            x, slope, by_lam = gradients(problem, phi, state.lam, shard)
            move, memory = transform.update(slope, memory)
            x = jax.tree.map(lambda old, way: old - self.local_rate * way, x, move)
            return constrained(problem, x, shard), memory, by_lam

        phi, local_memory, slopes = problem.map_shards(visit, state.local, batch, take(state.local_memory, batch))
        slope = problem.n_shards / batch.shape[0] * slopes.sum(0)
        move, memory = transform.update(slope, state.memory)
        return GradientState(
            state.lam - per_coordinate(problem, self.rate) * move,
            put(state.local, batch, phi),
            memory,
            put(state.local_memory, batch, local_memory),
        )


class SGD(_Gradient):
    """Stochastic gradient descent (Robbins, Monro 1951): d(g) = g.

    lam <- lam - rate (B / |S|) sum_{b in S} grad_lam f_b,    x_b <- x_b - local_rate grad_x f_b  for b in S

    Assumes a differentiable loss and nothing else. ``rate``: a number, or a dict with one per block; ``local_rate``:
    that of the locals. Rates have the units of 1 / curvature of F = sum_b f_b, so the more shards, the smaller.
    """

    rate: Any = 1e-3
    local_rate: float = 0.1

    def transform(self) -> optax.GradientTransformation:
        """The gradient itself."""
        return optax.identity()


class RMSProp(_Gradient):
    """Gradients divided by their running root mean square (Tieleman, Hinton 2012).

    v <- decay v + (1 - decay) g^2,   d(g) = g / sqrt(v + eps)      for globals and locals alike

    Assumes a differentiable loss and nothing else. ``rate``: a number, or a dict with one per block; ``local_rate``:
    that of the locals. A rate is about how far a parameter moves per step, whatever the scale of the loss.
    """

    rate: Any = 1e-2
    local_rate: float = 0.1
    decay: float = 0.9
    eps: float = 1e-8

    def transform(self) -> optax.GradientTransformation:
        """Division by the root mean square."""
        return optax.scale_by_rms(decay=self.decay, eps=self.eps)


class Adam(_Gradient):
    """Averaged gradients divided by their running root mean square (Kingma, Ba 2015).

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2,   d(g) = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

    for globals and locals alike, t counting a shard's own visits. Assumes a differentiable loss and nothing else.
    ``rate``: a number, or a dict with one per block; ``local_rate``: that of the locals. A rate is about how far a
    parameter moves per step, whatever the scale of the loss.
    """

    rate: Any = 1e-2
    local_rate: float = 0.1
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def transform(self) -> optax.GradientTransformation:
        """Moments with bias correction."""
        return optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.eps)
