"""Samples that differ by a shift: a mixture of rows from several slides, and the offset of every slide, learned.

    x_i = c_{z_i} + b_{s(i)} + noise,      b_s ~ N(0, diag s2^2),      q(b_sj) = N(offset_sj, exp offset_log_var_sj)

The offsets are globals beside the means. Rows minus their sample's offset are those of the mixture without samples, so
everything but the global step is that mixture's own. A composition of its own keeps a sample apart from the others
only as far as the means do not explain it: what all its rows share goes to the offset, if the prior lets it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from pdvi._base.types import Array, Globals, PyTree, Shard
from pdvi.core.model import Augmentation
from pdvi.models.gaussian_mixture import log_variance
from pdvi.models.potts_mixture import PottsMixtureModel
from pdvi.models.two_level_mixture import TwoLevelMixtureModel

OFFSET = ("offset", "offset_log_var")


class OffsetStatistics(NamedTuple):
    """What means and offsets need to know of a shard; adds over shards."""

    mixture: Any  # the mixture's own, of the rows as they are
    mass: Array  # N_sk, rows of every sample in every component
    total: Array  # T_s, the sum of every sample's rows


class SampleOffsets(eqx.Module):
    """A Potts or two-level mixture of rows whose sample, ``sample`` of a shard (whole numbers), has an offset.

    ``offset_variance`` is s2^2, (S, d): the same for all samples, a row for each so that their number is known.
    """

    mixture: PottsMixtureModel | TwoLevelMixtureModel
    offset_variance: Array

    @property
    def n_rows(self) -> Array:
        """The number of rows of all shards together."""
        return self.mixture.n_rows

    @property
    def noise_variance(self) -> Array:
        """The variance of rows around their component's mean."""
        return self.mixture.noise_variance

    @property
    def temperature(self) -> Array:
        """The temperature of the mixture."""
        return self.mixture.temperature

    def init_global(self, key: Array) -> Globals:
        """Return the mixture's start and no offsets, with the variances they would have in samples of one size."""
        precision = self.n_rows / len(self.offset_variance) / self.mixture.noise_variance + 1 / self.offset_variance
        offsets = {"offset": jnp.zeros_like(self.offset_variance), "offset_log_var": -jnp.log(precision)}
        return {**self.mixture.init_global(key), **offsets}

    def init_local(self, key: Array, shard: Shard) -> PyTree:
        """Return the mixture's start."""
        return self.mixture.init_local(key, shard)

    def loss(self, local: PyTree, globals_: Globals, shard: Shard) -> Array:
        """Return the shard's share of the negative ELBO, without log Z."""
        offset, log_var = (globals_[name] for name in OFFSET)
        ratio = (offset**2 + jnp.exp(log_var)) / self.offset_variance
        divergence = 0.5 * jnp.sum(ratio - 1 + jnp.log(self.offset_variance) - log_var)
        mixture = self.mixture.loss(local, _without(globals_), shifted(globals_, shard))
        return mixture + shard["fraction"] * divergence

    def local_step(self, local: PyTree, globals_: Globals, shard: Shard) -> PyTree:
        """Return the mixture's step on the shifted rows."""
        return self.mixture.local_step(local, _without(globals_), shifted(globals_, shard))

    def local_gradient(self, local: PyTree, globals_: Globals, shard: Shard) -> PyTree:
        """Return the mixture's gradient on the shifted rows."""
        return self.mixture.local_gradient(local, _without(globals_), shifted(globals_, shard))

    def statistics(self, local: PyTree, shard: Shard) -> OffsetStatistics:
        """Return the mixture's statistics, and the masses and sums of every sample."""
        of_sample = _indicator(shard, len(self.offset_variance))
        parts = self.mixture.components(local, shard)
        return OffsetStatistics(self.mixture.statistics(local, shard), of_sample @ parts, of_sample @ shard["x"])

    def global_step(self, statistics: OffsetStatistics, augmentation: Augmentation) -> Globals:
        """Return the joint minimiser: the offsets with the means eliminated, then the mixture's step given them.

        Given offsets b the best means are (pull - sum_s N_sk b_s / s0^2) / a_k with a_k their curvature, penalty
        included. Put in, b solves a system of as many equations as there are samples, for each feature.
        """
        noise, w = self.mixture.noise_variance, statistics.mixture.fraction
        prior, variance = self.mixture.prior_mean, self.mixture.prior_variance
        centre, dual, penalty = augmentation
        of_means = statistics.mass.sum(0)[:, None] / noise + w / variance + penalty["mean"]
        pull = statistics.mixture.total / noise + w * prior / variance
        pull = pull + penalty["mean"] * centre["mean"] - dual["mean"]
        precision = statistics.mass.sum(1)[:, None] / noise + w / self.offset_variance
        own_pull = statistics.total / noise + penalty["offset"] * centre["offset"] - dual["offset"]

        def solved(noise: Array, of_means: Array, pull: Array, own: Array, own_pull: Array) -> Array:
            shared = statistics.mass / noise
            matrix = jnp.diag(own) - shared @ (shared / of_means).T
            return jnp.linalg.solve(matrix, own_pull - shared @ (pull / of_means))

        columns = (noise, of_means.T, pull.T, (precision + penalty["offset"]).T, own_pull.T)
        offset = jax.vmap(solved)(*columns).T
        mixture = statistics.mixture._replace(total=statistics.mixture.total - statistics.mass.T @ offset)
        parts = (_without(part) for part in augmentation)
        least = (part["offset_log_var"] for part in augmentation)
        return {
            **self.mixture.global_step(mixture, Augmentation(*parts)),
            "offset": offset,
            "offset_log_var": log_variance(0.5 * precision, 0.5 * w, *least),
        }

    def curvature(self, local: PyTree, globals_: Globals, shard: Shard) -> Globals:
        """Return the mixture's, and that of the offsets in samples of one size."""
        w, shape = shard["fraction"], self.offset_variance.shape
        rows = w * self.n_rows / len(self.offset_variance)
        offset = rows / self.mixture.noise_variance + w / self.offset_variance
        mixture = self.mixture.curvature(local, _without(globals_), shard)
        return {**mixture, "offset": offset, "offset_log_var": jnp.broadcast_to(0.5 * w, shape)}

    def natural(self, globals_: Globals) -> Globals:
        """Return natural parameters: the mixture's; precision times offset, and precision."""
        precision = jnp.exp(-globals_["offset_log_var"])
        offsets = {"offset": precision * globals_["offset"], "offset_log_var": precision}
        return {**self.mixture.natural(_without(globals_)), **offsets}

    def from_natural(self, natural: Globals) -> Globals:
        """Return the inverse of `natural`."""
        precision = natural["offset_log_var"]
        offsets = {"offset": natural["offset"] / precision, "offset_log_var": -jnp.log(precision)}
        return {**self.mixture.from_natural(_without(natural)), **offsets}

    def to_unconstrained(self, local: PyTree) -> PyTree:
        """Return the mixture's form."""
        return self.mixture.to_unconstrained(local)

    def from_unconstrained(self, x: PyTree, shard: Shard) -> PyTree:
        """Return the inverse of `to_unconstrained`."""
        return self.mixture.from_unconstrained(x, shard)


def shifted(globals_: Globals, shard: Shard) -> Shard:
    """Return the shard with every row minus its sample's offset; the offsets' variances count with the squares."""
    x = shard["x"] - globals_["offset"][shard["sample"]]
    square = x**2 + jnp.exp(globals_["offset_log_var"])[shard["sample"]]
    if "mask" in shard:
        square = square * shard["mask"][:, None]
    return {**shard, "x": x, "square": square.sum(0)}


def _indicator(shard: Shard, n_samples: int) -> Array:
    """Samples by rows: which real row is in which."""
    member = jax.nn.one_hot(shard["sample"], n_samples, dtype=shard["x"].dtype).T
    return member * shard["mask"] if "mask" in shard else member


def _without(globals_: Globals) -> Globals:
    return {name: value for name, value in globals_.items() if name not in OFFSET}
