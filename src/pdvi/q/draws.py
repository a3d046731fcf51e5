"""Expectations of functions of several variables, by fixed draws.

They are smooth in the parameters and the same whenever they are asked for, so that Newton's method and line searches
work on an objective made of them. Draws by rejection, as usual for gamma variables, have no second derivatives; gamma
and beta variables have quadrature instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.checks import whole
from pdvi._base.types import Array
from pdvi.q.normal import FullNormal, LogNormal, Normal


@functools.cache
def noise(draws: int, size: int) -> np.ndarray:
    """Return standard normal numbers, the same ever after, whose odd moments are 0 and whose covariance is I."""
    half = np.random.default_rng(size).standard_normal((draws // 2, size))
    half = half @ np.linalg.inv(np.linalg.cholesky(half.T @ half / len(half))).T
    return np.concatenate([half, -half])


def expectation(function: Callable[..., Any], *variables: Any, draws: int | None = None) -> Any:
    """Return E f(x, y, ...) over independent normal variables by fixed draws.

    The draws are mirrored, and their covariance is exactly that of the variables, so polynomials of degree 3 are exact.
    They depend on shapes alone, not on a seed. For a term per row, wrap it in `jax.vmap` over the rows: each then gets
    the same draws, and the sum does not depend on how rows are dealt out to shards.

    Parameters
    ----------
    function
        of as many arrays as there are variables; returns an array, or a pytree of arrays.
    variables
        `Normal`, `LogNormal` or `FullNormal`. A gamma or beta variable has `expect`, for functions of it alone.
    draws
        an even number, at least twice the number of entries of all variables; by default 64, or four for each entry.
    """
    for variable in variables:
        if not isinstance(variable, Normal | LogNormal | FullNormal):
            msg = (
                f"`variables` must be Normal, LogNormal or FullNormal, got {type(variable).__name__}: its draws are "
                "not smooth in its parameters; use its `expect`, or closed forms such as mean_log."
            )
            raise TypeError(msg)
    sizes = [math.prod(variable.shape) for variable in variables]
    size = sum(sizes)
    draws = max(64, 4 * size) if draws is None else whole("draws", draws, least=2 * size)
    if draws % 2:
        msg = f"`draws` must be even, since each has its mirror image, got {draws!r}."
        raise ValueError(msg)
    ends = np.cumsum(sizes)
    parts = [
        noise(draws, size)[:, end - n : end].reshape(-1, *variable.shape)
        for end, n, variable in zip(ends, sizes, variables)
    ]

    def one(*parts: Array) -> Any:
        return function(*(variable.at_noise(part) for variable, part in zip(variables, parts)))

    working = [jnp.asarray(part, jnp.result_type(float)) for part in parts]
    return jax.tree.map(lambda leaf: leaf.mean(0), jax.vmap(one)(*working))


def standard_normal(key: Array, shape: tuple[int, ...]) -> Array:
    """Return standard normal numbers for a random start, the same from a key in both precisions."""
    return jax.random.normal(key, shape, jnp.float32).astype(jnp.result_type(float))
