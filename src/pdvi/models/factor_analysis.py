"""Factor analysis: columns that vary together because of a few factors, and each by itself.

    x_i = mean + W z_i + e_i,    z_i ~ N(0, I),    e_ij ~ N(0, 1 / t_j)
    q(z_i) = N(m_i, C C')

W, mean and log t are estimated: one t for each column, or one for all (probabilistic PCA). q has the form of the exact
posterior, whose covariance is the same for all rows, so at the end the ELBO is the likelihood.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, Globals, Shard
from pdvi.core.model import Augmentation, registered
from pdvi.models.closed_forms import log_variance, safe_log
from pdvi.models.mixed_glm import covariance_factor

Locals = dict[str, Array]  # "mean": (rows, k), and "factor": C, its lower triangle, logarithms on the diagonal
LEAST_NOISE = 1e-4  # variance in units of the rows: less is a difference of sums that single precision does not tell
ROUNDS = 30  # of W and t by turns, at most: they hardly depend on each other


class FactorStatistics(NamedTuple):
    """What the globals need to know of a shard; adds over shards. a_i = (1, z_i)."""

    rows: Array
    square: Array  # sum_i x_ij^2, (d,)
    cross: Array  # sum_i x_i E a_i', (d, 1 + k)
    second: Array  # sum_i E a_i a_i', (1 + k, 1 + k)


@registered
class FactorAnalysisModel(eqx.Module):
    """Where to start, and the mathematics of one shard.

    A shard has rows ``x``, best of mean 0 and size 1, and a ``mask`` (0: padding).
    """

    loading: Array  # W to start from, (d, k)
    mean: Array  # to start from, (d,)
    log_precision: Array  # log t to start from: (d,), or (1,) if it is the same for all columns

    def init_global(self, key: Array) -> Globals:
        """Return the start."""
        return {"loading": self.loading, "mean": self.mean, "log_precision": self.log_precision}

    def init_local(self, key: Array, shard: Shard) -> Locals:
        """Return factors of which nothing is known: the prior."""
        k, dtype = self.loading.shape[1], jnp.asarray(self.loading).dtype
        return {
            "mean": jnp.zeros((shard["x"].shape[0], k), dtype),
            "factor": jnp.zeros(k * (k + 1) // 2, dtype),
        }

    def loss(self, local: Locals, globals_: Globals, shard: Shard) -> Array:
        """Return the shard's share of the negative ELBO."""
        W, log_t = globals_["loading"], globals_["log_precision"]
        k, rows, C = W.shape[1], shard["mask"].sum(), covariance_factor(local["factor"])
        residual = shard["x"] - globals_["mean"] - local["mean"] @ W.T
        squares = shard["mask"] @ residual**2 + rows * ((W @ C) ** 2).sum(1)
        fit = jnp.exp(log_t) * squares + rows * (math.log(2 * math.pi) - log_t)
        known = 2 * jnp.log(jnp.diagonal(C)).sum()
        divergence = shard["mask"] @ (local["mean"] ** 2).sum(1) + rows * ((C**2).sum() - k - known)
        return 0.5 * (fit.sum() + divergence)

    def local_step(self, local: Locals, globals_: Globals, shard: Shard) -> Locals:
        """Return the exact posterior of the factors."""
        covariance, to_factors = posterior(globals_)
        mean = (shard["x"] - globals_["mean"]) @ to_factors * shard["mask"][:, None]
        C = jnp.linalg.cholesky(covariance)
        entries = jnp.where(jnp.eye(len(C), dtype=bool), safe_log(C), C)[np.tril_indices(len(C))]
        return {"mean": mean, "factor": entries}

    def statistics(self, local: Locals, shard: Shard) -> FactorStatistics:
        """Return sums of products of rows and factors."""
        weight, C = shard["mask"], covariance_factor(local["factor"])
        augmented = jnp.column_stack([weight, weight[:, None] * local["mean"]])
        second = augmented.T @ augmented
        second = second.at[1:, 1:].add(weight.sum() * C @ C.T)
        return FactorStatistics(weight.sum(), weight @ shard["x"] ** 2, shard["x"].T @ augmented, second)

    def global_step(self, statistics: FactorStatistics, augmentation: Augmentation) -> Globals:
        """Return the regression of columns on factors, and the noise that it leaves, by turns until both stay."""
        rows, square, cross, second = statistics
        row_centre, row_dual, row_penalty = (jnp.column_stack([part["mean"], part["loading"]]) for part in augmentation)
        centre, dual, penalty = (part["log_precision"] for part in augmentation)
        d, n_noise = square.shape[0], self.log_precision.shape[0]
        half = 0.5 * rows * (d // n_noise)

        def regression(log_t: Array) -> Array:
            t = jnp.broadcast_to(jnp.exp(log_t), (d,))[:, None]
            pull = t * cross + row_penalty * row_centre - row_dual
            stiff = t[..., None] * second + jax.vmap(jnp.diag)(row_penalty)
            return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(stiff), pull[..., None])[..., 0]

        def noise(B: Array) -> Array:
            left = square + ((B @ second - 2 * cross) * B).sum(1)
            left = left.reshape(n_noise, -1).sum(1)
            least = 2 * half * LEAST_NOISE
            free = log_variance(0.5 * jnp.maximum(left, least), half, centre, dual, penalty)
            return jnp.minimum(free, -math.log(LEAST_NOISE))

        def unfinished(carry: tuple[Array, Array, Array]) -> Array:
            count, _, moved = carry
            return (count < ROUNDS) & (moved > 8 * jnp.finfo(square.dtype).eps)

        def turn(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            count, log_t, _ = carry
            new = noise(regression(log_t))
            return count + 1, new, jnp.abs(new - log_t).max()

        first = (jnp.asarray(0), centre, jnp.asarray(jnp.inf, square.dtype))
        log_t = jax.lax.while_loop(unfinished, turn, first)[1]
        B = regression(log_t)
        return {"loading": B[:, 1:], "mean": B[:, 0], "log_precision": log_t}

    def curvature(self, local: Locals, globals_: Globals, shard: Shard) -> Globals:
        """Return that for factors of size one, and for noise of the size that the columns leave."""
        rows, log_t = shard["mask"].sum(), globals_["log_precision"]
        d, k = globals_["loading"].shape
        by_column = rows * jnp.broadcast_to(jnp.exp(log_t), (d,))
        return {
            "loading": jnp.broadcast_to(by_column[:, None], (d, k)),
            "mean": by_column,
            "log_precision": jnp.broadcast_to(0.5 * rows * (d // log_t.shape[0]), log_t.shape),
        }


def posterior(globals_: Globals) -> tuple[Array, Array]:
    """Return the covariance of a row's factors, and the (d, k) matrix that takes centred rows to their mean."""
    W = globals_["loading"]
    scaled = jnp.exp(globals_["log_precision"])[:, None] * W
    precision = jnp.eye(W.shape[1], dtype=W.dtype) + W.T @ scaled
    covariance = jnp.linalg.inv(precision)
    covariance = 0.5 * (covariance + covariance.T)
    return covariance, scaled @ covariance
