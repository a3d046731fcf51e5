"""The paper's quadratic problem, with its exact oracle."""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, Globals, Shard
from pdvi.core.model import Augmentation, registered


class QuadraticStatistics(NamedTuple):
    """The loss as a function of lam for fixed phi: lam' hessian lam / 2 + linear' lam."""

    hessian: Array
    linear: Array


@registered
class Quadratic(eqx.Module):
    """f_b(phi, lam) = x' Q_b x + v_b' x with x = (phi, lam); one block of globals, ``lam``.

    With Q = [[A, B], [B', C]] and v = (a, c), phi(lam) = -A^-1 (B lam + a / 2), which leaves a quadratic in
    lam with the Schur complement S = C - B' A^-1 B. `shard` prepares A^-1 B, A^-1 a and S once, since none
    of them depends on the penalty.
    """

    dim_local: int
    dim_global: int
    start: float = 1.0  # of every global parameter

    def shard(self, Q: np.ndarray, v: np.ndarray) -> dict[str, np.ndarray]:
        """Stacked shards of stacked matrices (shards, d, d) and vectors (shards, d)."""
        p = self.dim_local
        A, B, a = Q[:, :p, :p], Q[:, :p, p:], v[:, :p, None]
        solved = np.linalg.solve(A, np.concatenate([B, a], 2))
        schur = Q[:, p:, p:] - np.swapaxes(B, 1, 2) @ solved[:, :, :-1]
        linear = v[:, p:] - (np.swapaxes(B, 1, 2) @ solved[:, :, -1:])[:, :, 0]
        return {
            "Q": Q,
            "v": v,
            "gain": solved[:, :, :-1],
            "offset": 0.5 * solved[:, :, -1],
            "schur": schur,
            "linear": linear,
        }

    def init_global(self, key: Array) -> Globals:
        """Return a point far from the optimum: ``start``."""
        return {"lam": jnp.full(self.dim_global, self.start)}

    def init_local(self, key: Array, shard: Shard) -> Array:
        """Return zero."""
        return jnp.zeros(self.dim_local)

    def loss(self, local: Array, globals_: Globals, shard: Shard) -> Array:
        """Return x' Q x + v' x."""
        x = jnp.concatenate([local, globals_["lam"]])
        return x @ shard["Q"] @ x + shard["v"] @ x

    def local_step(self, local: Array, globals_: Globals, shard: Shard) -> Array:
        """Return the minimiser over phi."""
        return -shard["gain"] @ globals_["lam"] - shard["offset"]

    def statistics(self, local: Array, shard: Shard) -> QuadraticStatistics:
        """Return the quadratic in lam that is left for fixed phi."""
        p = self.dim_local
        return QuadraticStatistics(2 * shard["Q"][p:, p:], 2 * shard["Q"][p:, :p] @ local + shard["v"][p:])

    def global_step(self, statistics: QuadraticStatistics, augmentation: Augmentation) -> Globals:
        """Return the minimiser over lam for fixed phi."""
        return {"lam": _minimise(statistics.hessian, statistics.linear, augmentation)}

    def joint_step(self, local: Array, shard: Shard, augmentation: Augmentation) -> tuple[Array, Globals]:
        """Return the joint minimiser: lam from the Schur complement, then phi."""
        globals_ = {"lam": _minimise(2 * shard["schur"], shard["linear"], augmentation)}
        return self.local_step(local, globals_, shard), globals_

    def curvature(self, local: Array, globals_: Globals, shard: Shard) -> Globals:
        """Return 2 diag(C)."""
        return {"lam": 2 * jnp.diagonal(shard["Q"])[self.dim_local :]}


def _minimise(hessian: Array, linear: Array, augmentation: Augmentation) -> Array:
    """Gaussian elimination without pivoting, unrolled: many small positive definite systems at once.

    Under vmap each line is one vector instruction over all shards; a batched library call would spend its
    time on calls to a routine per matrix.
    """
    penalty = augmentation.penalty["lam"]
    right = penalty * augmentation.centre["lam"] - augmentation.dual["lam"] - linear
    size = right.shape[0]
    rows = jnp.concatenate([hessian + jnp.diag(penalty), right[:, None]], 1)
    for k in range(size):
        pivot = rows[k] / rows[k, k]
        rows = rows - jnp.outer(rows[:, k].at[k].set(0), pivot)
        rows = rows.at[k].set(pivot)
    return rows[:, -1]
