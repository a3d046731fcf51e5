"""What Algorithm 1 needs of D: a positive diagonal as a vector, or a positive definite matrix.

With any of them it is PD-VI with eta = 1 in the coordinates D^1/2 lam, so all that holds for one number holds here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_factor, cho_solve, solve_triangular

from pdvi._base.types import Array


def applied(D: Array, x: Array) -> Array:
    """Return D x."""
    return D * x if D.ndim == 1 else D @ x


def solved(D: Array, x: Array) -> Array:
    """Return D^-1 x. Units are taken out first: in single precision a matrix of mixed units has no factor."""
    if D.ndim == 1:
        return x / D
    size = jnp.sqrt(jnp.diagonal(D))
    return cho_solve(cho_factor(D / (size[:, None] * size), lower=True), x / size) / size


def squared(D: Array, x: Array) -> Array:
    """Return |x|_D^2."""
    return x @ applied(D, x)


@jax.jit
def root(D: Array) -> Array:
    """Return R with D = R R': what the functions below take."""
    if D.ndim == 1:
        return jnp.sqrt(D)
    size = jnp.sqrt(jnp.diagonal(D))
    return size[:, None] * jnp.linalg.cholesky(D / (size[:, None] * size))


def into_units(R: Array, x: Array) -> Array:
    """Return R^-1 x, where D is the identity: of a gradient, or of each column of a matrix."""
    if R.ndim == 1:
        return (x.T / R).T
    return solve_triangular(R, x, lower=True)


def from_units(R: Array, z: Array) -> Array:
    """Return R'^-1 z, the step that has the coordinates z in these units."""
    return z / R if R.ndim == 1 else solve_triangular(R, z, lower=True, trans=1)


def to_coordinates(R: Array, step: Array) -> Array:
    """Return R' step, the coordinates of a step in these units: the inverse of `from_units`."""
    return R * step if R.ndim == 1 else R.T @ step


def curvature_in_units(R: Array, H: Array) -> Array:
    """Return R^-1 H R'^-1."""
    half = into_units(R, H)
    return into_units(R, half.T)
