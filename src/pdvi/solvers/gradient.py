"""SGD, RMSProp and Adam on all variables, by automatic differentiation."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem
from pdvi.core.solver import Shards, Solver
from pdvi.solvers.local_variables import constrained, free, gradients, own_rows, require_gradients
from pdvi.solvers.rates import check_rates, per_coordinate

if TYPE_CHECKING:
    from optax import GradientTransformation


class GradientServer(NamedTuple):
    """The globals, and what the method remembers of their past gradients."""

    lam: Array
    memory: PyTree


class _Gradient(Solver):
    """lam <- lam - rate d(g),   g = (B / |S|) sum_{b in S} grad_lam f_b(phi_b, lam)
    x_b <- x_b - local_rate d(grad_x f_b)   for b in S,   phi_b = phi(x_b)

    with the direction d of the method, both gradients taken at the old point. Locals that are probabilities move as
    logits, phi = softmax(x), as in the paper's appendix. The scale of rates is that of `pdvi.solvers.rates`.
    """

    rate: eqx.AbstractVar[Any]
    local_rate: eqx.AbstractVar[float]

    @abstractmethod
    def transform(self) -> GradientTransformation:
        """The method's direction, from optax, without a rate."""

    def init(self, problem: Problem, shards: Shards, lam: Array, batch_size: int) -> GradientServer:
        """Return the server's state before the first step."""
        require_gradients(type(self).__name__, problem)
        check_rates(problem, self.rate, self.local_rate)
        return GradientServer(lam, self.transform().init(lam))

    def init_shard_state(self, problem: Problem, lam: Array, local: PyTree, shard: PyTree | None) -> PyTree:
        """Return an empty memory of the shard's local gradients: past ones cannot be known."""
        return self.transform().init(free(problem, local if shard is None else own_rows(problem, local)))

    def local_update(
        self, problem: Problem, broadcast: Array, local: PyTree, shard_state: PyTree, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return the locals after a step down their gradient, its memory, and the gradient in the globals."""
        x, slope, by_lam = gradients(problem, local, broadcast, shard)
        move, shard_state = self.transform().update(slope, shard_state)
        x = jax.tree.map(lambda old, way: old - self.local_rate * way, x, move)
        return constrained(problem, x, shard), shard_state, by_lam

    def server_update(
        self, problem: Problem, server: GradientServer, total: Array, count: int, broadcast: Array
    ) -> GradientServer:
        """Return the globals after a step down the gradient of the batch."""
        move, memory = self.transform().update(problem.n_shards / count * total, server.memory)
        return GradientServer(server.lam - per_coordinate(problem, self.rate) * move, memory)


class SGD(_Gradient):
    """Stochastic gradient descent (Robbins, Monro 1951): d(g) = g.

    lam <- lam - rate (B / |S|) sum_{b in S} grad_lam f_b,    x_b <- x_b - local_rate grad_x f_b  for b in S

    ``rate``: a number, or a dict with one per block; ``local_rate``: that of the locals. Rates have the units of
    1 / curvature of F = sum_b f_b, so the more shards, the smaller.
    """

    rate: Any = 1e-3
    local_rate: float = 0.1

    def transform(self) -> GradientTransformation:
        """The gradient itself."""
        import optax

        return optax.identity()


class RMSProp(_Gradient):
    """Gradients divided by their running root mean square (Tieleman, Hinton 2012).

    v <- decay v + (1 - decay) g^2,   d(g) = g / sqrt(v + eps)      for globals and locals alike

    ``rate``: a number, or a dict with one per block; ``local_rate``: that of the locals. A rate is about how far a
    parameter moves per step, whatever the scale of the loss.
    """

    rate: Any = 1e-2
    local_rate: float = 0.1
    decay: float = 0.9
    eps: float = 1e-8

    def transform(self) -> GradientTransformation:
        """Division by the root mean square."""
        import optax

        return optax.scale_by_rms(decay=self.decay, eps=self.eps)


class Adam(_Gradient):
    """Averaged gradients divided by their running root mean square (Kingma, Ba 2015).

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2,   d(g) = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

    for globals and locals alike, t counting a shard's own visits. ``rate``: a number, or a dict with one per block;
    ``local_rate``: that of the locals. A rate is about how far a parameter moves per step, whatever the scale of the
    loss.
    """

    rate: Any = 1e-2
    local_rate: float = 0.1
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def transform(self) -> GradientTransformation:
        """Moments with bias correction."""
        import optax

        return optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.eps)
