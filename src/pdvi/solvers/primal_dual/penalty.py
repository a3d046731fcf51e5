"""Step sizes nobody has to tune.

    D = c * mean_b |diag grad^2_lam f_b|   at the starting point, per coordinate,   c = max(1, 0.1 B / |S|)

so that D has the units of the loss's curvature: rescaling a parameter rescales its step size with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, PyTree
from pdvi.core.model import Curved, offers
from pdvi.core.problem import Problem

EXACT_DIMENSION = 256  # up to here the Hessian's diagonal is computed exactly
PROBES = 64  # above, Hutchinson probes
SAMPLED_SHARDS = 256  # autodiff curvature looks at this many shards, evenly spread
FLOOR = 1e-12  # of the block's mean: keeps D positive where the loss is flat, and breaks no units


def penalty_from_curvature(problem: Problem, curvature: Any, constant: float) -> Array:
    """Return D per coordinate: ``constant`` times the mean curvature of the shards."""
    curvature = np.asarray(curvature, float)
    if not np.isfinite(curvature).all():
        bad = [name for name, part in problem.block_slices.items() if not np.isfinite(curvature[part]).all()]
        msg = (
            f"the curvature of the loss at the start is not finite in {bad}; give another `start`, "
            "or set `eta` by hand."
        )
        raise ValueError(msg)
    everywhere, floored = curvature.mean(), curvature.copy()
    for part in problem.block_slices.values():
        block = curvature[part]
        typical = block.mean() if block.mean() > 0 else everywhere if everywhere > 0 else 1.0
        floored[part] = np.maximum(block, FLOOR * typical)
    return jnp.asarray(constant * floored, jnp.result_type(float))


def penalty_from_eta(problem: Problem, eta: float | Mapping[str, Any]) -> Array:
    """Return D = 1/eta: one number, one per block, or an array of a block's shape for one per coordinate."""
    if not isinstance(eta, Mapping):
        eta = {name: eta for name, _ in problem.blocks}
    names = [name for name, _ in problem.blocks]
    if set(eta) != set(names):
        wrong = sorted(set(eta) - set(names))
        problem_words = f"unknown {wrong}" if wrong else f"missing {sorted(set(names) - set(eta))}"
        msg = f"`eta` must name the blocks of the model ({names}) and no others: {problem_words}."
        raise ValueError(msg)
    parts = {}
    for name, shape in problem.blocks:
        try:
            value = np.asarray(eta[name], float)
        except (TypeError, ValueError):
            msg = f"`eta` must be positive numbers, got {eta[name]!r} for block {name!r}."
            raise ValueError(msg) from None
        if value.shape not in ((), shape):
            msg = f"`eta` of block {name!r} must be a number or have its shape {shape}, got {value.shape}."
            raise ValueError(msg)
        if not (np.isfinite(value) & (value > 0)).all():
            msg = f"`eta` must be positive and finite, got {eta[name]!r} for block {name!r}."
            raise ValueError(msg)
        parts[name] = jnp.broadcast_to(1.0 / value, shape)
    return problem.ravel(parts).astype(jnp.result_type(float))


def curvature_shards(problem: Problem) -> tuple[np.ndarray | None, int]:
    """Return the shards whose curvature is looked at, and their number: some if it is not offered and they are many.

    None stands for all of them.
    """
    if offers(problem.model, Curved) or problem.n_shards <= SAMPLED_SHARDS:
        return None, problem.n_shards
    subset = np.unique(np.linspace(0, problem.n_shards - 1, SAMPLED_SHARDS).astype(int))
    return subset, len(subset)


def curvature_reader(problem: Problem, lam: Array, local: PyTree, own: PyTree, shard: PyTree) -> Array:
    """Return |diag grad^2_lam f_b| of one shard: a reader."""
    if offers(problem.model, Curved):
        return jnp.abs(problem.ravel(problem.model.curvature(local, problem.unravel(lam), shard)))
    gradient = jax.grad(lambda x: problem.loss(local, x, shard))
    if lam.size <= EXACT_DIMENSION:
        return jnp.abs(jnp.diagonal(jax.jacfwd(gradient)(lam)))
    probes = jax.random.rademacher(jax.random.key(0), (PROBES, lam.size), lam.dtype)
    return jnp.abs(jax.lax.map(lambda z: z * jax.jvp(gradient, (lam,), (z,))[1], probes).mean(0))
