"""What several models share: roots of stationarity conditions, sums over neighbors, logits, weights of components."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pdvi._base.types import Array, PyTree, Shard
from pdvi.shards.buckets import columns_at_once

PRIOR_COUNT = 1.0  # rows that the prior of the weights gives to every component


def neighbor_sum(local: Array, shard: Shard, start: Array | None = None) -> Array:
    """Return start_i + sum_l r_il phi_l, by a scan over the columns of the neighbor table.

    One gather per column, several unrolled, keeps the working set in cache: several times faster than one large gather
    or a segment sum.
    """
    start = jnp.zeros_like(local[: len(shard["x"])]) if start is None else start

    def add(total: Array, column: tuple[Array, Array]) -> tuple[Array, None]:
        index, weight = column
        return total + weight[:, None] * jnp.take(local, index, axis=0, mode="clip"), None

    unroll = columns_at_once(len(shard["table"]))
    return jax.lax.scan(add, start, (shard["table"], shard["weight"]), unroll=unroll)[0]


def damp(logits: Array, phi: Array, damping: Array) -> Array:
    """Return logits between the new ones and those of ``phi``; a branch, since the logarithm is a third of a sweep."""
    return jax.lax.cond(damping > 0, lambda: (logits + damping * safe_log(phi)) / (1 + damping), lambda: logits)


def safe_log(phi: Array) -> Array:
    """Return logarithms of probabilities, finite at 0."""
    return jnp.log(jnp.maximum(phi, jnp.finfo(phi.dtype).tiny))


def probabilities(logits: Array, shard: Shard) -> Array:
    """Return responsibilities from logits; a floor keeps derivatives finite."""
    phi = jnp.maximum(jax.nn.softmax(logits, axis=1), jnp.finfo(logits.dtype).tiny)
    if "mask" not in shard:
        return phi
    weight = shard["mask"][:, None]
    return jnp.where(weight > 0, phi * weight, 0)


def masked(local: PyTree, shard: Shard) -> PyTree:
    """Return responsibilities times the weights of their rows."""
    if "mask" not in shard:
        return local
    return jax.tree.map(lambda leaf: leaf * shard["mask"][:, None], local)


def positive_root(a: Array, penalty: Array, rows: Array) -> Array:
    """Return the positive root p of  -rows / (2 p) + a + penalty p = 0, without cancellation for either sign of a.

    Without a penalty it is rows / (2 a); there a must be positive.
    """
    root = jnp.sqrt(a * a + 2 * penalty * rows)
    tiny = jnp.finfo(root.dtype).tiny
    return jnp.where(a > 0, rows / jnp.maximum(a + root, tiny), (root - a) / jnp.maximum(2 * penalty, tiny))


@jax.custom_jvp
def log_det(matrix: Array) -> Array:
    """Return the log determinant of a symmetric matrix, not a number where it is not positive definite.

    Its derivative is the inverse. JAX would differentiate the Cholesky factor instead, which compiles to ten times as
    much.
    """
    return _log_det_of(jax.lax.linalg.cholesky(matrix, symmetrize_input=False))


@log_det.defjvp
def _log_det_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    factor = jax.lax.linalg.cholesky(primals[0], symmetrize_input=False)
    identity = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    root = jax.lax.linalg.triangular_solve(factor, identity, left_side=True, lower=True)
    inverse = jnp.swapaxes(root, -1, -2) @ root
    return _log_det_of(factor), jnp.sum(inverse * tangents[0], axis=(-2, -1))


def _log_det_of(factor: Array) -> Array:
    return 2 * jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)).sum(-1)


def log_variance(a: Array, half: Array, centre: Array, dual: Array, penalty: Array) -> Array:
    """Return the root rho of  a exp(rho) - half + dual + penalty (rho - centre) = 0.

    With t = rho - log(penalty / a) it reads exp(t) + t = z, z = centre + (half - dual) / penalty + log(a / penalty):
    t = log omega(z), found to machine precision in three Halley steps from a start that is right at both
    ends, whatever the scales. Without a penalty the root is log((half - dual) / a).
    """
    safe = jnp.where(penalty > 0, penalty, 1.0)
    z = centre + (half - dual) / safe + jnp.log(a / safe)
    positive = jnp.maximum(z, 1.0)
    t = jnp.where(z > 1.0, jnp.log(positive - jnp.log(positive)), z - jnp.log1p(jnp.exp(jnp.minimum(z, 1.0))))
    for _ in range(3):
        e = jnp.exp(t)
        residual, slope = e + t - z, e + 1
        t = t - 2 * residual * slope / (2 * slope**2 - residual * e)
    unpenalized = jnp.log(jnp.maximum(half - dual, jnp.finfo(z.dtype).tiny) / a)
    return jnp.where(penalty > 0, t + jnp.log(safe / a), unpenalized)


def weight_loss(log_weight: Array, present: Any, n_rows: Array) -> Array:
    """Return what log weights cost: the bound log sum exp <= sum exp - 1 for every row, and a weak prior.

    The bound is separable, and tight where the weights add up to 1. The prior is 0 where they are equal.
    """
    n_present = present.sum()
    excess = jnp.sum(present * jnp.exp(log_weight)) - 1
    prior = PRIOR_COUNT * jnp.sum(present * (log_weight + jnp.log(n_present)))
    return (n_rows + PRIOR_COUNT * n_present) * excess - prior


def weight_step(
    mass: Array, present: Any, n_rows: Array, fraction: Array, centre: Array, dual: Array, penalty: Array
) -> Array:
    """Return the log weights that are best for a shard with these masses, the terms of Algorithm 1 added."""
    prior = fraction * PRIOR_COUNT * present
    found = log_variance(fraction * n_rows + prior.sum(), mass + prior, centre, dual, penalty)
    return jnp.where(present, found, centre)
