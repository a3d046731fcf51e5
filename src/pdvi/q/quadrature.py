"""Expectations of functions of one variable that have no closed form: quadrature, smooth in the parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.checks import whole
from pdvi._base.types import Array

HERMITE = 20  # nodes for normal variables
NODES = 96  # for gamma and beta variables
DEEP = 36.0  # nats below its peak a density is left out: e^-36 is a rounding error of double precision
MIDDLE = 0.5671432904097838  # where t = exp(-t)

Function = Callable[[Array], Array]


@functools.cache
def hermite(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and weights for a standard normal variable."""
    x, w = np.polynomial.hermite_e.hermegauss(whole("nodes", nodes, least=1))
    return x, w / w.sum()


def normal(function: Function, mean: Array, sd: Array, nodes: int) -> Array:
    """Return E f(x), x ~ N(mean, sd^2), for every entry."""
    x, w = hermite(nodes)
    at = jnp.asarray(x, mean.dtype).reshape(-1, *[1] * mean.ndim)
    return jnp.tensordot(jnp.asarray(w, mean.dtype), function(mean + sd * at), axes=1)


def gamma(function: Function, mean: Array, shape: Array, nodes: int) -> Array:
    """Return E f(x), x ~ Gamma with this mean and shape, by the trapezoidal rule.

    x = mean exp(s) and s = t - exp(-t): both tails of the density in t fall doubly exponentially, and then equal steps
    are exact to exponentially small errors.
    """
    wide = jnp.maximum(DEEP / shape, 1e-30)
    left = jnp.where(3 * wide < 1, jnp.sqrt(3 * wide), wide + 1)
    right = jnp.log1p(wide + jnp.sqrt(2 * wide))
    low = MIDDLE - _unfolded(left)
    t = low + _unit(nodes, shape) * (MIDDLE + right - low)
    s = t - jnp.exp(-t)
    log_weight = -shape * (jnp.expm1(s) - s) + jnp.log1p(jnp.exp(-t))
    return _weighted(log_weight, function(mean * jnp.exp(s)))


def beta(function: Function, a: Array, b: Array, nodes: int) -> Array:
    """Return E f(x), x ~ Beta(a, b), by the trapezoidal rule: logit x = logit of the mean + sinh(t)."""
    total = a + b
    m, rest = a / total, b / total
    wide = 2 * math.e * DEEP / (total * m * rest)
    near = jnp.sqrt(jnp.minimum(wide, 1.0))
    low = -jnp.arcsinh(jnp.where(wide < 1, near, (DEEP - total * jnp.log(rest)) / a))
    high = jnp.arcsinh(jnp.where(wide < 1, near, (DEEP - total * jnp.log(m)) / b))
    t = low + _unit(nodes, a) * (high - low)
    s = jnp.sinh(t)
    log_weight = a * _log_ratio(s, m, rest) + b * _log_ratio(-s, rest, m) + jnp.log(jnp.cosh(t))
    return _weighted(log_weight, function(jax.nn.sigmoid(jnp.log(a) - jnp.log(b) + s)))


def _unit(nodes: int, like: Array) -> Array:
    """Equal steps from 0 to 1 along a new first axis."""
    steps = np.linspace(0, 1, whole("nodes", nodes, least=2))
    return jnp.asarray(steps, like.dtype).reshape(-1, *[1] * like.ndim)


def _unfolded(left: Array) -> Array:
    """The u for which MIDDLE - u lies ``left`` below the middle in s: u + MIDDLE (exp(u) - 1) = left."""
    u = jnp.log1p(left / MIDDLE)
    for _ in range(3):  # from above, by Newton: convex
        u = u - (u + MIDDLE * jnp.expm1(u) - left) / (1 + MIDDLE * jnp.exp(u))
    return u


def _log_ratio(s: Array, m: Array, rest: Array) -> Array:
    """log of sigmoid(logit m + s) over m, exact where s is small and finite where it is large."""
    small = jnp.clip(s, -1.0, 1.0)
    near = -jnp.log1p(rest * jnp.expm1(-small))
    far = -jnp.logaddexp(jnp.log(m), jnp.log(rest) - s)
    return jnp.where(jnp.abs(s) < 1, near, far)


def _weighted(log_weight: Array, values: Array) -> Array:
    """The mean over the first axis; values may have more axes at the end."""
    weight = jax.nn.softmax(log_weight, axis=0)
    return jnp.sum(weight * values, axis=0)
