"""Logarithms of densities, named as in Stan, and taken in expectation: every argument is a number or a distribution.

Distributions among the arguments of one call are independent of each other under the posterior (mean-field). All
constants are included.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln, xlogy

from pdvi._base.types import Array
from pdvi.q import family
from pdvi.q.family import Family
from pdvi.q.normal import HALF_LOG_2PI, FullNormal, Normal

LOGISTIC = 12  # nodes for the logistic function: smooth, and seldom wide


def normal_lpdf(x: Any, mean: Any = 0.0, sd: Any = 1.0, *, precision: Any = None) -> Array:
    """Return E log N(x | mean, sd^2), or with ``precision`` 1/sd^2 in its place: a `Gamma`, say."""
    square = (family.mean(x) - family.mean(mean)) ** 2 + family.variance(x) + family.variance(mean)
    if precision is None:
        weight, log_weight = family.mean_power(sd, -2), -2 * family.mean_log(sd)
    else:
        weight, log_weight = family.mean(precision), family.mean_log(precision)
    return 0.5 * (log_weight - weight * square) - HALF_LOG_2PI


def lognormal_lpdf(x: Any, mean_log: Any = 0.0, sd_log: Any = 1.0) -> Array:
    """Return E log p(x) for log x ~ N(mean_log, sd_log^2)."""
    square = (family.mean_log(x) - family.mean(mean_log)) ** 2 + family.variance_log(x) + family.variance(mean_log)
    spread = family.mean_power(sd_log, -2) * square + 2 * family.mean_log(sd_log)
    return -0.5 * spread - HALF_LOG_2PI - family.mean_log(x)


def gamma_lpdf(x: Any, shape: Any, rate: Any) -> Array:
    """Return E log Gamma(x | shape, rate); ``shape`` is a number, ``rate`` may be a distribution."""
    constant = shape * family.mean_log(rate) - gammaln(family.real(shape))
    return constant + (shape - 1) * family.mean_log(x) - family.mean(rate) * family.mean(x)


def beta_lpdf(x: Any, a: Any, b: Any) -> Array:
    """Return E log Beta(x | a, b); ``a`` and ``b`` are numbers."""
    a, b = family.real(a), family.real(b)
    constant = gammaln(a + b) - gammaln(a) - gammaln(b)
    return constant + (a - 1) * family.mean_log(x) + (b - 1) * family.mean_log1m(x)


def dirichlet_lpdf(x: Any, alpha: Any) -> Array:
    """Return E log Dir(x | alpha) of every vector; ``alpha`` is a vector of numbers, or one number for all entries."""
    logs = family.mean_log(x)
    alpha = jnp.broadcast_to(jnp.asarray(alpha, logs.dtype), logs.shape)
    return gammaln(alpha.sum(-1)) - gammaln(alpha).sum(-1) + jnp.sum((alpha - 1) * logs, axis=-1)


def categorical_lpmf(z: Any, probabilities: Any) -> Array:
    """Return E log p(z): ``z`` is a `Categorical`, or whole numbers from 0; probabilities may be a `Dirichlet`."""
    logs = family.mean_log(probabilities)
    if isinstance(z, Family):
        return jnp.sum(z.mean * logs, axis=-1)
    return jnp.take_along_axis(jnp.broadcast_to(logs, (*jnp.shape(z), logs.shape[-1])), z[..., None], axis=-1)[..., 0]


def bernoulli_logit_lpmf(y: Any, logits: Any, *, nodes: int = LOGISTIC) -> Array:
    """Return E log p(y), y being 1 with probability 1 / (1 + exp(-logits)); `Normal` logits by quadrature."""
    mean = family.mean(logits)
    if isinstance(logits, Normal | FullNormal):
        normalizer = logits.expect(jax.nn.softplus, nodes=nodes)
    elif isinstance(logits, Family):
        msg = f"`logits` must be normal, or numbers, got {type(logits).__name__}; for probabilities use binomial_lpmf."
        raise TypeError(msg)
    else:
        normalizer = jax.nn.softplus(mean)
    return y * mean - normalizer


def binomial_lpmf(y: Any, n: Any, p: Any) -> Array:
    """Return E log of the probability of y successes in n, each with probability ``p``: a `Beta`, or numbers."""
    y, n = family.real(y), family.real(n)
    choose = gammaln(n + 1) - gammaln(y + 1) - gammaln(n - y + 1)
    if isinstance(p, Family):
        return choose + y * p.mean_log + (n - y) * p.mean_log1m
    return choose + xlogy(y, p) + xlogy(n - y, 1 - family.real(p))


def poisson_lpmf(y: Any, rate: Any) -> Array:
    """Return E log of the probability of the count y; ``rate`` is a `Gamma`, a `LogNormal` (``eta.exp()``), numbers."""
    y = family.real(y)
    return y * family.mean_log(rate) - family.mean(rate) - gammaln(y + 1)
