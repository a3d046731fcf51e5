"""The digamma function and what an entropy needs of the gamma function, of elementary functions only.

x is moved up by SHIFT steps of the recurrence, and from there the asymptotic series are exact. So no digit is lost at
either end, nor in slopes of any order.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from pdvi._base.types import Array

SHIFT = 10  # from this argument on the series are exact in double precision


def digamma(x: Array) -> Array:
    """Return psi(x)."""
    v = 1 / (x + SHIFT)
    return jnp.log(x + SHIFT) - 0.5 * v - _tail(v) - (1 / _steps(x)).sum(-1)


def trigamma(x: Array) -> Array:
    """Return psi'(x)."""
    v = 1 / (x + SHIFT)
    s = v * v
    tail = v * s * (1 / 6 - s * (1 / 30 - s * (1 / 42 - s * (1 / 30 - s * (5 / 66 - s * (691 / 2730 - s * 7 / 6))))))
    return v + 0.5 * s + tail + (_steps(x) ** -2.0).sum(-1)


def mild(x: Array) -> Array:
    """Return log Gamma(x) - x psi(x) + x, which grows like -1/2 log x where its terms grow like x log x."""
    v = 1 / (x + SHIFT)
    s, steps = v * v, _steps(x)
    tail = v * (1 / 6 - s * (1 / 90 - s * (1 / 210 - s * (1 / 210 - s * (5 / 594 - s * (691 / 30030 - s / 11))))))
    far = 0.5 * (math.log(2 * math.pi) + 1 + jnp.log(v)) + tail - SHIFT * (1 + 0.5 * v + _tail(v))
    return far + (x[..., None] / steps).sum(-1) - jnp.log(steps * v[..., None]).sum(-1)


def _tail(v: Array) -> Array:
    s = v * v
    return s * (1 / 12 - s * (1 / 120 - s * (1 / 252 - s * (1 / 240 - s * (5 / 660 - s * (691 / 32760 - s / 12))))))


def _steps(x: Array) -> Array:
    """x, x + 1, ..., x + SHIFT - 1 along a new last axis."""
    return x[..., None] + jnp.arange(SHIFT, dtype=x.dtype)
