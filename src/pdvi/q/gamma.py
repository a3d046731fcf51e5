"""The gamma family."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.scipy.special import gammaln

from pdvi._base.types import Array
from pdvi.q import family, quadrature
from pdvi.q.family import Family, Function
from pdvi.q.special import digamma, mild, trigamma


class Gamma(Family):
    """Independent gamma entries with density proportional to x^(shape - 1) exp(-rate x).

    Unconstrained: ``log_mean`` and ``log_shape``, which the data tell apart (shape and rate go up and down together).
    """

    log_mean: Any
    log_shape: Any

    def __init__(self, shape: Any = 1.0, rate: Any = 1.0, *, log_mean: Any = None, log_shape: Any = None):
        spread = family.log(family.numbers("shape", shape, positive=True)) if log_shape is None else log_shape
        if log_mean is None:
            log_mean = spread - family.log(family.numbers("rate", rate, positive=True))
        self.log_mean, self.log_shape = family.together(log_mean, spread)

    @property
    def concentration(self) -> Array:
        """Return the shape parameter of every entry."""
        return jnp.exp(jnp.asarray(self.log_shape))

    @property
    def rate(self) -> Array:
        """Return the rate parameter of every entry."""
        return jnp.exp(jnp.asarray(self.log_shape) - jnp.asarray(self.log_mean))

    @property
    def mean(self) -> Array:
        """Return the mean of every entry."""
        return jnp.exp(jnp.asarray(self.log_mean))

    @property
    def variance(self) -> Array:
        """Return the variance of every entry."""
        return jnp.exp(2 * jnp.asarray(self.log_mean) - jnp.asarray(self.log_shape))

    @property
    def mean_log(self) -> Array:
        """Return the mean of the logarithm."""
        return jnp.asarray(self.log_mean) + digamma(self.concentration) - jnp.asarray(self.log_shape)

    @property
    def variance_log(self) -> Array:
        """Return the variance of the logarithm."""
        return trigamma(self.concentration)

    def mean_power(self, power: float) -> Array:
        """Return the mean of a power of every entry; infinite unless the shape exceeds -power."""
        a = self.concentration
        exists = a + power > 0
        ratio = jnp.exp(gammaln(jnp.where(exists, a + power, 1.0)) - gammaln(a))
        return jnp.where(exists, ratio * self.rate**-power, jnp.inf)

    def entropy(self) -> Array:
        """Return the entropy of every entry."""
        return mild(self.concentration) + self.mean_log

    def expected_log(self, x: Any) -> Array:
        """Return E log p(x) of every entry."""
        a, log_rate = self.concentration, jnp.asarray(self.log_shape) - jnp.asarray(self.log_mean)
        return a * log_rate - gammaln(a) + (a - 1) * family.mean_log(x) - self.rate * family.mean(x)

    def expect(self, function: Function, *, nodes: int = quadrature.NODES) -> Array:
        """Return E f(x) of every entry by quadrature in log x, for f that grows at most like a power."""
        return quadrature.gamma(function, self.mean, self.concentration, nodes)
