"""A part of the gamma function's entropy that loses no digits."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax.scipy.special import digamma, gammaln

from pdvi._base.types import Array

FAR = 10.0  # from here on the asymptotic series is exact in double precision


def mild(x: Array) -> Array:
    """Return log Gamma(x) - x psi(x) + x, which grows like -1/2 log x where its terms grow like x log x.

    Written so that autodiff loses no digits either: slopes of the series are those of small terms.
    """
    x = jnp.asarray(x)
    near, far = jnp.minimum(x, FAR), jnp.maximum(x, FAR)  # each branch sees only what it is good for
    v = 1 / far
    s = v * v
    tail = v * (1 / 6 - s * (1 / 90 - s * (1 / 210 - s * (1 / 210 - s * (5 / 594 - s * (691 / 30030 - s / 11))))))
    series = 0.5 * (math.log(2 * math.pi) + 1 - jnp.log(far)) + tail
    return jnp.where(x < FAR, gammaln(near) - near * digamma(near) + near, series)
