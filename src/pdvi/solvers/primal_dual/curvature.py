"""The curvature that the penalty follows: that of the shards where the run is, in units of the present penalty.

    D = c * mean_b |S_b|,    S_b = H_ll - H_lp H_pp^-1 H_pl    (or H_ll where locals do not follow in a visit)

|S| has the eigenvalues' sizes, taken in the units of the present D. The mean of the sizes, not the size of the mean:
what one shard may do in a direction is limited by the curvature it has there, even if others have the opposite.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem
from pdvi.solvers.primal_dual.arrow import Arrow, arrow, as_rows
from pdvi.solvers.primal_dual.metric import curvature_in_units, root
from pdvi.solvers.primal_dual.oracles import CoordinateDescent, with_noise
from pdvi.solvers.primal_dual.penalty import curvature_reader

SMALLEST = 1e-12  # of the mean: what keeps D positive and breaks no units
ROUNDING = 4.0  # rounding errors that a shard's loss has, of its size
MOST = 10.0  # times smaller, at one change of D: a larger D is always safe


class At(NamedTuple):
    """Where to look, and in which units."""

    lam: Array
    root: Array  # R of D = R R'


class Curvature(eqx.Module):
    """A reader: a shard's loss, and its curvature for fixed locals in units of D: a matrix, or its diagonal."""

    full: bool = eqx.field(static=True)
    independent_rows: bool = eqx.field(static=True)

    def __call__(self, problem: Problem, told: At, local: PyTree, own: PyTree, shard: PyTree) -> tuple[Array, Array]:
        """Return the loss, and its curvature."""
        if not self.full:
            diagonal = curvature_reader(problem, told.lam, local, own, shard) / told.root**2
            return problem.loss(local, told.lam, shard), diagonal
        found = derivatives(problem, told.lam, local, shard, self.independent_rows)
        return found.value, _size(curvature_in_units(told.root, found.own), True)


def _size(H: Array, full: bool) -> Array:
    """Return the matrix with the eigenvalues' sizes, or the sizes of the diagonal."""
    if not full:
        return jnp.abs(jnp.diagonal(H))
    values, vectors = jnp.linalg.eigh(0.5 * (H + H.T))
    return (vectors * jnp.abs(values)) @ vectors.T


class Derivatives(NamedTuple):
    """Derivatives of a shard's loss, or of a sum of them, where locals follow the globals."""

    loss: Array
    following: Array  # |S| in units of D: a matrix, or its diagonal's sizes
    diagonal: Array  # (P,): sizes of the diagonal of H_ll, in the model's own units
    profiled: Array  # (P, P): S, in units of D
    reduced: Array  # (P,): the gradient after a step of the locals
    decrement: Array  # twice what a step of the locals gains
    rounding: Array  # of the loss
    noise: Array  # that it shows


class Profile(eqx.Module):
    """A reader: what is asked at the start, where D changes, and at the end: one program, since that compiles long."""

    full: bool = eqx.field(static=True)
    independent_rows: bool = eqx.field(static=True)

    def __call__(self, problem: Problem, told: At, local: PyTree, own: PyTree, shard: PyTree) -> Derivatives:
        """Return it."""
        found = derivatives(problem, told.lam, local, shard, self.independent_rows)
        S = curvature_in_units(told.root, found.profiled)
        _, noise = with_noise(lambda point: problem.loss(point[0], point[1], shard), (local, told.lam))
        return Derivatives(
            loss=found.value,
            following=_size(S, self.full),  # eigenvalues once: two sets side by side block each other on two cores
            diagonal=jnp.abs(jnp.diagonal(found.own)),
            profiled=S,
            reduced=found.reduced,
            decrement=found.local_decrement,
            rounding=rounding_of(found.value),
            noise=noise,
        )


def rounding_of(value: Array) -> Array:
    """Return the error that a shard's loss may have, as a sum of many terms."""
    return ROUNDING * jnp.finfo(value.dtype).eps * jnp.abs(value)


class Separate(eqx.Module):
    """A reader, where locals and globals take turns: the gradient, what a step of the locals gains, and rounding."""

    independent_rows: bool = eqx.field(static=True)

    def __call__(
        self, problem: Problem, lam: Array, local: PyTree, own: PyTree, shard: PyTree
    ) -> tuple[Array, Array, Array]:
        """Return them."""
        value, slope = jax.value_and_grad(problem.loss, argnums=1)(local, lam, shard)
        better = CoordinateDescent(independent_rows=self.independent_rows).local_step(problem, local, lam, shard)
        return slope, jnp.maximum(value - problem.loss(better, lam, shard), 0), rounding_of(value)


def derivatives(problem: Problem, lam: Array, local: PyTree, shard: PyTree, independent_rows: bool) -> Arrow:
    """Return a shard's derivatives at a point."""
    x, back = as_rows(local, independent_rows)
    return arrow(lambda x, lam: problem.loss(back(x), lam, shard), x.astype(lam.dtype), lam)


def changed(D: Array, mean: Any, constant: Any, most: float = MOST) -> tuple[Array, Any]:
    """Return ``constant`` times the mean curvature, given in units of D, as the new D, and whether that was too far.

    No direction falls by more than ``most`` at once. For a diagonal it may be traced.
    """
    if D.ndim == 1:
        mean = constant * jnp.asarray(mean, D.dtype)
        kept = jnp.maximum(mean, 1 / most)
        return D * kept, (kept > mean).any()
    mean = float(constant) * np.asarray(mean, float)
    values, vectors = np.linalg.eigh(0.5 * (mean + mean.T))
    kept = np.maximum(values, 1 / most)
    R = np.asarray(root(D), float)
    return jnp.asarray(R @ (vectors * kept) @ vectors.T @ R.T, D.dtype), bool((kept > values).any())


def nats_left(R: Array, reduced: Any, curvature: Any, local_decrement: Any) -> float:
    """Return how far the objective is above its minimum, as a quadratic with these derivatives says."""
    slope = np.asarray(reduced, float)
    units = np.asarray(R, float)
    slope = slope / units if units.ndim == 1 else np.linalg.solve(units, slope)
    values, vectors = np.linalg.eigh(np.asarray(curvature, float))
    along = vectors.T @ slope
    sizes = np.maximum(np.abs(values), SMALLEST * np.abs(values).max(initial=0) + np.finfo(float).tiny)
    return float(0.5 * np.sum(along**2 / sizes) + 0.5 * float(local_decrement))
