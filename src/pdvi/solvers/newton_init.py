"""Where Algorithm 1 starts on a model without closed forms: near the optimum of some shards, by Newton's method.

The curvature at the model's start says little of what it will be (a log standard deviation that is 10 too large,
predictors of different units). A step on all shards looked at (at most 256) must lower their loss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem
from pdvi.core.solver import ShardFn, Shards
from pdvi.solvers.primal_dual.curvature import SMALLEST, At, Derivatives
from pdvi.solvers.primal_dual.oracles import LONGEST, CoordinateDescent, as_promised

MOST_STEPS = 60
MOST_SHORT = 8  # in a row that gain little since a coordinate is far from home: each may take it three times as far
HALVINGS = 20  # of the interval in which the curvature is looked for that makes a step short enough
SHORTER, MOST_CUTS = 0.25, 10  # a step that does not lower the loss is so much shorter, at most so often


class OptimizeLocals(eqx.Module):
    """A `LocalUpdateFn`: the local variables that are best for given globals."""

    independent_rows: bool = eqx.field(static=True)

    def __call__(
        self, problem: Problem, lam: Array, local: PyTree, shard_state: PyTree, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return them, and the shard state as it was."""
        oracle = CoordinateDescent(independent_rows=self.independent_rows)
        return oracle.local_step(problem, local, lam, shard), shard_state, None


class NearOptimum(NamedTuple):
    """Where to start, the derivatives there, summed over shards, in which units, and how many steps led there."""

    lam: Array
    units: Array
    derivatives: Derivatives
    n_steps: int


def near_optimum(shards: Shards, lam: Array, units: Array, reader: ShardFn, subset: np.ndarray | None) -> NearOptimum:
    """Return a point from which a Newton step is, in the mean over the globals, within a posterior standard deviation.

    ``reader`` returns derivatives (`Profile`) after locals have followed (`OptimizeLocals`). What is the shards' stays
    as it is.
    """

    def there(lam: Array, units: Array) -> Derivatives:
        return shards.sum(reader, (lam, At(lam, units)), subset)

    here, short = NearOptimum(lam, units, there(lam, units), 0), 0
    while here.n_steps < MOST_STEPS:
        found = here.derivatives
        longest = LONGEST * (1 + np.abs(np.asarray(here.lam, float)))
        move, gain, whole = newton_step(here.units, found.reduced, found.profiled, longest)
        enough = max(lam.size, float(found.rounding))
        short = 0 if gain > enough else short + 1
        if not whole > enough or short > MOST_SHORT:  # or it is not a number
            break
        sizes = _sizes(np.asarray(found.diagonal, float))
        units = jnp.asarray(np.diag(sizes) if units.ndim == 2 else sizes, lam.dtype)
        length = 1.0
        for _ in range(MOST_CUTS):
            lam = here.lam + jnp.asarray(length * move, here.lam.dtype)
            after = there(lam, units)
            if _lower(found, after, length * gain):
                break
            length *= SHORTER
        else:
            break
        here = NearOptimum(lam, units, after, here.n_steps + 1)
    return here


def _lower(before: Derivatives, after: Derivatives, promised: float) -> bool:
    """Return whether the loss fell as its slope had promised, not hidden by noise, and derivatives are numbers."""
    rounding = float(before.rounding)
    fell = as_promised(float(before.loss) - float(after.loss), promised, rounding)
    finite = np.isfinite(after.profiled).all() and np.isfinite(after.following).all()
    return bool(fell and float(after.noise) <= promised + rounding and finite)


def newton_step(
    R: Array, slope: Any, curvature: Any, longest: np.ndarray | float = np.inf
) -> tuple[np.ndarray, float, float]:
    """Return Newton's step of the globals, minus the slope along it, and the same for a step of any length.

    ``curvature`` is in the units R, a diagonal, and made positive.

    Where it would be longer than ``longest`` in some coordinate, all directions are given more curvature, as much in
    each when the diagonal is 1 (Levenberg's step): flat ones, which are the long ones, become shorter by that, while a
    step that was shortened as a whole would hold all others back.
    """
    units, slope, curvature = (np.asarray(part, float) for part in (R, slope, curvature))
    if not (np.isfinite(curvature).all() and np.isfinite(slope).all()):
        return np.zeros_like(slope), np.nan, np.nan
    own = np.diagonal(units) if units.ndim == 2 else units  # units are diagonal here
    size = _sizes(np.abs(np.diagonal(curvature)))
    values, vectors = np.linalg.eigh(0.5 * (curvature + curvature.T) / (size[:, None] * size))
    values = np.maximum(np.abs(values), SMALLEST * np.abs(values).max(initial=0) + np.finfo(float).tiny)
    along = vectors.T @ (slope / own / size)

    def damped(more: float) -> np.ndarray:
        return np.asarray(-vectors @ (along / (values + more)) / size / own)

    def too_long(more: float) -> bool:
        return bool((np.abs(damped(more)) > longest).any())

    more, whole = 0.0, float(along @ (along / values))
    if too_long(more):
        low, high = np.log(values.min()), np.log(values.max())
        while too_long(np.exp(high)):
            high += 2.0
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if too_long(np.exp(middle)) else (low, middle)
        more = float(np.exp(high))
    return damped(more), float(along @ (along / (values + more))), whole


def _sizes(diagonal: np.ndarray) -> np.ndarray:
    """Return the roots of a diagonal, none of them 0."""
    return np.sqrt(np.maximum(diagonal, SMALLEST * (diagonal.mean() or 1.0)))
