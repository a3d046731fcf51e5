"""Generalised linear mixed models: observations of one group share random effects.

    y_i ~ family(eta_i),   eta_i = x_i' coef + z_i' u_g,   u_g = L v_g,   v_g ~ N(0, I),   so u_g ~ N(0, L L')
    q(v_g) = N(mean_g, C_g C_g')

coef, the lower triangle L and, for normal observations, log sigma are estimated; the ELBO takes the place of the
likelihood in that (a Gaussian variational approximation). It is the likelihood itself for normal observations, where
q has the form of the exact posterior. Given a group's q its eta_i is normal, so every expectation is closed (normal,
Poisson) or one integral over a line (Bernoulli), by Gauss and Hermite's rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln

from pdvi._base.types import Array, Globals, Shard
from pdvi.core.model import registered
from pdvi.q.quadrature import hermite

Locals = dict[str, Array]  # "mean": (groups, q), and "factor": C, its lower triangle, logarithms on the diagonal
FAMILIES = ("normal", "bernoulli", "poisson")
NODES, WEIGHTS = hermite(20)
NARROW = 1e-8  # added to the variance of eta: its root has a slope everywhere


@registered
class MixedGLMModel(eqx.Module):
    """Where to start, the family, and the mathematics of one shard of groups.

    A shard has ``x``, ``z``, ``y`` and ``weight`` (0: padding) of observations in strips of one width, each of which
    belongs to a ``group`` of the shard; and a ``mask`` of its groups.
    """

    coef: Array  # to start from, (p,)
    factor: Array  # L to start from, its lower triangle row by row, (q (q + 1) / 2,)
    log_sigma: Array  # to start from; used for normal observations only
    family: str = eqx.field(static=True)

    @property
    def n_effects(self) -> int:
        """Return q, the number of random effects of a group."""
        return (math.isqrt(8 * self.factor.shape[0] + 1) - 1) // 2

    def init_global(self, key: Array) -> Globals:
        """Return the start."""
        start = {"coef": self.coef, "factor": self.factor}
        return {**start, "log_sigma": self.log_sigma} if self.family == "normal" else start

    def init_local(self, key: Array, shard: Shard) -> Locals:
        """Return groups that know nothing of themselves: the prior."""
        groups, dtype = shard["mask"].shape[0], jnp.asarray(self.coef).dtype
        return {
            "mean": jnp.zeros((groups, self.n_effects), dtype),
            "factor": jnp.zeros((groups, self.factor.shape[0]), dtype),
        }

    def independent_rows(self) -> bool:
        """Return that groups meet in the globals only."""
        return True

    def loss(self, local: Locals, globals_: Globals, shard: Shard) -> Array:
        """Return the shard's share of the negative ELBO."""
        C = covariance_factor(local["factor"])
        squares = (local["mean"] ** 2).sum(-1) + (C**2).sum((-1, -2))
        divergence = 0.5 * (squares - self.n_effects) - _diagonal(local["factor"]).sum(-1)
        mean, variance = self.predictor(local, globals_, shard)
        rows = self._expected(mean, variance, shard["y"], globals_)
        return shard["mask"] @ divergence + jnp.sum(shard["weight"] * rows)

    def predictor(self, local: Locals, globals_: Globals, shard: Shard) -> tuple[Array, Array]:
        """Return mean and variance of eta under q, for every observation."""
        L, own = triangle(globals_["factor"]), shard["group"]
        effects = (local["mean"] @ L.T)[own]
        spread = (L @ covariance_factor(local["factor"]))[own]
        mean = shard["x"] @ globals_["coef"] + jnp.einsum("rwq,rq->rw", shard["z"], effects)
        return mean, (jnp.einsum("rwq,rqk->rwk", shard["z"], spread) ** 2).sum(-1)

    def _expected(self, mean: Array, variance: Array, y: Array, globals_: Globals) -> Array:
        """Minus the expected log-likelihood of every observation."""
        if self.family == "poisson":
            return jnp.exp(mean + 0.5 * variance) - y * mean + gammaln(y + 1)
        if self.family == "bernoulli":
            return expected_softplus(mean, jnp.sqrt(variance + NARROW)) - y * mean
        log_sigma = globals_["log_sigma"]
        return 0.5 * ((y - mean) ** 2 + variance) * jnp.exp(-2 * log_sigma) + log_sigma + 0.5 * math.log(2 * math.pi)


def triangle(entries: Array) -> Array:
    """Return lower triangles with these entries, row by row."""
    q = (math.isqrt(8 * entries.shape[-1] + 1) - 1) // 2
    return jnp.zeros((*entries.shape[:-1], q, q), entries.dtype).at[..., *np.tril_indices(q)].set(entries)


def covariance_factor(entries: Array) -> Array:
    """Return lower triangles whose diagonals are given by their logarithms."""
    return triangle(entries.at[..., _places(entries)].set(jnp.exp(_diagonal(entries))))


def _diagonal(entries: Array) -> Array:
    return entries[..., _places(entries)]


def _places(entries: Array) -> np.ndarray:
    """Where the diagonal lies in a triangle row by row: 0, 2, 5, 9, ..."""
    q = (math.isqrt(8 * entries.shape[-1] + 1) - 1) // 2
    return np.cumsum(np.arange(1, q + 1)) - 1


def _softplus(order: int) -> Callable[[Array], Array]:
    """Return a derivative of log(1 + exp(x)), entry by entry."""
    if order < 2:
        return jax.nn.sigmoid if order else jax.nn.softplus
    return lambda x: jax.jvp(_softplus(order - 1), (x,), (jnp.ones_like(x),))[1]


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def expected_softplus(m: Array, s: Array, order: int = 0, power: int = 0) -> Array:
    """Return E e^power f(m + s e), e standard normal, f log(1 + exp) or its derivative of this order.

    Nodes are added up one after the other: an array of all of them would not stay in the cache. The derivatives are
    of this form too; to say so keeps automatic differentiation from carrying a tangent for every node.
    """
    nodes, weights, function = jnp.asarray(NODES, m.dtype), jnp.asarray(WEIGHTS, m.dtype), _softplus(order)
    return jax.lax.fori_loop(
        0,
        len(NODES),
        lambda i, total: total + weights[i] * nodes[i] ** power * function(m + s * nodes[i]),
        jnp.zeros_like(m),
    )


@expected_softplus.defjvp
def _softplus_slope(
    order: int, power: int, primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (m, s), (dm, ds) = primals, tangents
    slope = expected_softplus(m, s, order + 1, power) * dm + expected_softplus(m, s, order + 1, power + 1) * ds
    return expected_softplus(m, s, order, power), slope
