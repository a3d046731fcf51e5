"""Normal families: independent entries, logarithms of positive numbers, and vectors with a full covariance."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array
from pdvi.q import family, quadrature
from pdvi.q.family import Family, Function

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Normal(Family):
    """Independent normal entries N(mean, sd^2). Unconstrained: ``location``, ``log_sd``."""

    location: Any
    log_sd: Any
    computed: Any  # the variance of a sum, whose logarithm may not exist; else None

    def __init__(
        self, mean: Any = 0.0, sd: Any = 1.0, *, location: Any = None, log_sd: Any = None, variance: Any = None
    ):
        self.location, self.log_sd, self.computed = _moments("mean", mean, "sd", sd, location, log_sd, variance)

    @property
    def mean(self) -> Array:
        """Return the mean of every entry."""
        return jnp.asarray(self.location)

    @property
    def variance(self) -> Array:
        """Return the variance of every entry."""
        return jnp.exp(2 * jnp.asarray(self.log_sd)) if self.computed is None else self.computed

    @property
    def sd(self) -> Array:
        """Return the standard deviation of every entry."""
        return jnp.exp(jnp.asarray(self.log_sd)) if self.computed is None else _root(self.computed)

    def entropy(self) -> Array:
        """Return the entropy of every entry."""
        return _log_sd(self) + (HALF_LOG_2PI + 0.5)

    def expected_log(self, x: Any) -> Array:
        """Return E log p(x) of every entry."""
        square = (family.mean(x) - self.mean) ** 2 + family.variance(x)
        return -0.5 * square / self.variance - _log_sd(self) - HALF_LOG_2PI

    def expect(self, function: Function, *, nodes: int = quadrature.HERMITE) -> Array:
        """Return E f(x) of every entry by Gauss-Hermite quadrature: exact for polynomials below degree 2 nodes."""
        return quadrature.normal(function, self.mean, self.sd, nodes)

    def at_noise(self, noise: Array) -> Array:
        """Return the draw that standard normal ``noise`` stands for."""
        return self.mean + self.sd * noise

    def exp(self) -> LogNormal:
        """Return the distribution of exp(x)."""
        return LogNormal(location=self.location, log_sd=self.log_sd, variance=self.computed)

    def linear(self, x: Any) -> Normal:
        """Return the distribution of each entry of ``x @ self``, for a vector of independent normals.

        ``x`` is (..., d). If self is (..., d) too, with a vector for each row, sums are taken row by row.
        """
        x = jnp.asarray(x)
        add = jnp.matmul if len(self.shape) == 1 else _by_row
        return Normal(location=add(x, self.mean), variance=add(x**2, self.variance))


class LogNormal(Family):
    """Independent positive entries whose logarithms are N(mean_log, sd_log^2). Unconstrained: as `Normal`."""

    location: Any
    log_sd: Any
    computed: Any

    def __init__(
        self, mean_log: Any = 0.0, sd_log: Any = 1.0, *, location: Any = None, log_sd: Any = None, variance: Any = None
    ):
        parts = _moments("mean_log", mean_log, "sd_log", sd_log, location, log_sd, variance)
        self.location, self.log_sd, self.computed = parts

    @property
    def mean(self) -> Array:
        """Return the mean of every entry."""
        return self.mean_power(1)

    @property
    def variance(self) -> Array:
        """Return the variance of every entry."""
        return self.mean**2 * jnp.expm1(self.variance_log)

    @property
    def mean_log(self) -> Array:
        """Return the mean of the logarithm."""
        return self.log().mean

    @property
    def variance_log(self) -> Array:
        """Return the variance of the logarithm."""
        return self.log().variance

    def mean_power(self, power: float) -> Array:
        """Return the mean of a power of every entry."""
        return jnp.exp(power * self.mean_log + 0.5 * power**2 * self.variance_log)

    def log(self) -> Normal:
        """Return the distribution of log(x)."""
        return Normal(location=self.location, log_sd=self.log_sd, variance=self.computed)

    def entropy(self) -> Array:
        """Return the entropy of every entry."""
        return self.log().entropy() + self.mean_log

    def expected_log(self, x: Any) -> Array:
        """Return E log p(x) of every entry."""
        square = (family.mean_log(x) - self.mean_log) ** 2 + family.variance_log(x)
        return -0.5 * square / self.variance_log - _log_sd(self) - HALF_LOG_2PI - family.mean_log(x)

    def expect(self, function: Function, *, nodes: int = quadrature.HERMITE) -> Array:
        """Return E f(x) of every entry by Gauss-Hermite quadrature in log x."""
        return self.log().expect(lambda t: function(jnp.exp(t)), nodes=nodes)

    def at_noise(self, noise: Array) -> Array:
        """Return the draw that standard normal ``noise`` stands for."""
        return jnp.exp(self.log().at_noise(noise))


class FullNormal(Family):
    """Normal vectors with a full covariance L L', along the last axis; for blocks of up to some tens of entries.

    Unconstrained: ``location``, the logarithms of L's diagonal, and what lies below it, row by row.
    """

    location: Any
    log_diagonal: Any
    below: Any

    def __init__(
        self, mean: Any = 0.0, sd: Any = 1.0, *, location: Any = None, log_diagonal: Any = None, below: Any = None
    ):
        centre = family.numbers("mean", mean) if location is None else location
        spread = family.log(family.numbers("sd", sd, positive=True)) if log_diagonal is None else log_diagonal
        self.location, self.log_diagonal = family.together(centre, spread)
        if not self.shape:
            msg = "`mean` must be a vector for FullNormal, got a single number; use Normal."
            raise ValueError(msg)
        *batch, d = self.shape
        self.below = np.zeros((*batch, d * (d - 1) // 2)) if below is None else below

    @property
    def factor(self) -> Array:
        """Return L of every vector, lower triangular."""
        d = self.shape[-1]
        rows, columns = np.tril_indices(d, -1)
        L = jnp.exp(jnp.asarray(self.log_diagonal))[..., None] * jnp.eye(d)
        return L.at[..., rows, columns].set(jnp.asarray(self.below))

    @property
    def covariance(self) -> Array:
        """Return the covariance of every vector."""
        return self.factor @ jnp.swapaxes(self.factor, -1, -2)

    @property
    def mean(self) -> Array:
        """Return the mean of every entry."""
        return jnp.asarray(self.location)

    @property
    def variance(self) -> Array:
        """Return the variance of every entry."""
        return jnp.sum(self.factor**2, axis=-1)

    def entropy(self) -> Array:
        """Return the entropy of every vector."""
        return jnp.sum(jnp.asarray(self.log_diagonal) + (HALF_LOG_2PI + 0.5), axis=-1)

    def expected_log(self, x: Any) -> Array:
        """Return E log p(x) of every vector; ``x`` may be a FullNormal, a Normal, or numbers."""
        inverse = jnp.linalg.inv(self.factor)
        away = jnp.einsum("...ij,...j->...i", inverse, family.mean(x) - self.mean)
        if isinstance(x, FullNormal):
            spread = jnp.sum((inverse @ x.factor) ** 2, axis=(-1, -2))
        else:
            variance = jnp.broadcast_to(family.variance(x), self.shape)
            spread = jnp.sum(inverse**2 * variance[..., None, :], axis=(-1, -2))
        constant = jnp.sum(jnp.asarray(self.log_diagonal) + HALF_LOG_2PI, axis=-1)
        return -0.5 * (jnp.sum(away**2, axis=-1) + spread) - constant

    def kl(self, prior: Family) -> Array:
        """Return the divergence KL(self || prior) of every vector, in closed form."""
        cross = prior.expected_log(self)
        return -self.entropy() - (cross if isinstance(prior, FullNormal) else cross.sum(-1))

    def marginals(self) -> Normal:
        """Return the distribution of each entry alone."""
        return Normal(location=self.mean, variance=self.variance)

    def expect(self, function: Function, *, nodes: int = quadrature.HERMITE) -> Array:
        """Return E f(x) of every entry by Gauss-Hermite quadrature."""
        return self.marginals().expect(function, nodes=nodes)

    def at_noise(self, noise: Array) -> Array:
        """Return the draw that standard normal ``noise`` stands for."""
        return self.mean + jnp.einsum("...ij,...j->...i", self.factor, noise)

    def linear(self, x: Any) -> Normal:
        """Return the distribution of each entry of ``x @ self``; ``x`` is (..., d), as for `Normal.linear`."""
        x = jnp.asarray(x)
        if len(self.shape) == 1:
            return Normal(location=x @ self.mean, variance=jnp.sum((x @ self.factor) ** 2, axis=-1))
        along = jnp.einsum("...d,...de->...e", x, _between(self.factor, x, 2))
        return Normal(location=_by_row(x, self.mean), variance=jnp.sum(along**2, axis=-1))

    def __getitem__(self, index: Any) -> FullNormal:
        """Return the distribution of some vectors."""
        if len(self.shape) == 1:
            msg = "a single FullNormal vector has no rows to choose; take `mean` and `covariance` of its entries."
            raise TypeError(msg)
        return super().__getitem__(index)


def independent_sum(*terms: Any) -> Normal:
    """Return the distribution of a sum of independent normals; numbers may be among them.

    Nothing remembers where a distribution came from: ``independent_sum(u, u)`` is not 2 u.
    """
    means = [family.mean(term) for term in terms]
    spread = [family.variance(term) for term in terms]
    location, variance = jnp.broadcast_arrays(sum(means[1:], means[0]), sum(spread[1:], spread[0]))
    return Normal(location=location, variance=variance)


def _moments(
    mean_name: str, mean: Any, sd_name: str, sd: Any, location: Any, log_sd: Any, variance: Any
) -> tuple[Any, Any, Any]:
    """What a normal is kept as: its location, and the logarithm of its sd or, where that was computed, its variance."""
    location = family.numbers(mean_name, mean) if location is None else location
    if variance is not None:
        return location, None, variance
    log_sd = family.log(family.numbers(sd_name, sd, positive=True)) if log_sd is None else log_sd
    return (*family.together(location, log_sd), None)


def _log_sd(x: Normal | LogNormal) -> Array:
    return jnp.asarray(x.log_sd) if x.computed is None else 0.5 * jnp.log(x.computed)


def _root(variance: Array) -> Array:
    """The square root; at 0, where it has no slope, a number without one."""
    return jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1.0)), 0.0)


def _by_row(x: Array, weights: Array) -> Array:
    return jnp.sum(x * _between(weights, x, 1), axis=-1)


def _between(values: Array, x: Array, last: int) -> Array:
    """The leading axes of ``values`` go with those of x; x may have more before its last."""
    missing = x.ndim - 1 - (values.ndim - last)
    at = values.ndim - last
    return jnp.expand_dims(values, tuple(range(at, at + missing)))
