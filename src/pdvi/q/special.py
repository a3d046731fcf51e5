"""The digamma function and what an entropy needs of the gamma function, of elementary functions only.

x is moved up by some steps of the recurrence, and from there the asymptotic series are exact. So no digit is lost at
either end, and slopes are known. Each is a compiled function of its own: traced once for a shape, not for every use.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pdvi._base.types import Array


@jax.custom_jvp
@jax.jit
def digamma(x: Array) -> Array:
    """Return psi(x)."""
    n, ratios, *_ = _steps(x)
    far = x + n
    return jnp.log(far) - 0.5 / far - _digamma_tail(1 / far) - ratios / x


@digamma.defjvp
def _digamma_slope(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    return digamma(x), trigamma(x) * dx


def trigamma(x: Array) -> Array:
    """Return psi'(x)."""
    return scaled_polygammas(x)[0] / x / x


@jax.custom_jvp
@jax.jit
def mild(x: Array) -> Array:
    """Return log Gamma(x) - x psi(x) + x, which grows like -1/2 log x where its terms grow like x log x."""
    n, ratios, *_ = _steps(x)
    v = 1 / (x + n)
    s = v * v
    tail = v * (1 / 6 - s * (1 / 90 - s * (1 / 210 - s * (1 / 210 - s * (5 / 594 - s * (691 / 30030 - s / 11))))))
    far = 0.5 * (math.log(2 * math.pi) + 1 + jnp.log(v)) + tail - n * (1 + 0.5 * v + _digamma_tail(v))
    return far + ratios - jnp.log(math.prod((x + step) * v for step in range(n)))


@mild.defjvp
def _mild_slope(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    return mild(x), scaled_polygammas(x)[2] * dx


@jax.jit
def scaled_polygammas(x: Array) -> tuple[Array, Array, Array]:
    """Return x^2 psi'(x) and x^3 psi''(x), which neither overflow at 0 nor vanish at infinity, and 1 - x psi'(x)."""
    n, _, squares, cubes = _steps(x)
    v = 1 / (x + n)
    s = v * v
    first = s * (1 / 6 - s * (1 / 30 - s * (1 / 42 - s * (1 / 30 - s * (5 / 66 - s * (691 / 2730 - s * 7 / 6))))))
    second = s * (1 / 2 - s * (1 / 6 - s * (1 / 6 - s * (3 / 10 - s * (5 / 6 - s * (691 / 210 - s * 35 / 2))))))
    slope = n * v - x * v * (0.5 * v + first) - squares / x
    first = x * (x * v) * (1 + 0.5 * v + first) + squares
    return first, -x * (x * v) ** 2 * (1 + v + second) - 2 * cubes, slope


def _digamma_tail(v: Array) -> Array:
    s = v * v
    tail = 1 / 12 - s * (1 / 120 - s * (1 / 252 - s * (1 / 240 - s * (5 / 660 - s * (691 / 32760 - s / 12)))))
    return s * tail


def _steps(x: Array) -> tuple[int, Array, Array, Array]:
    """Steps n after which the series are exact in the precision of ``x``; sums of x / (x + i), of squares, of cubes."""
    n = 4 if x.dtype == jnp.float32 else 10
    first = second = third = jnp.zeros_like(x)
    for step in reversed(range(n)):  # one by one: an axis is slow to add up
        ratio = x / (x + step)
        first, second, third = first + ratio, second + ratio * ratio, third + ratio * ratio * ratio
    return n, first, second, third
