"""The Gaussian mixture on a graph: neighbouring spots like to share a component.

    p(z) prop. to exp( sum_{(i,l) in E} r_il 1[z_i = z_l] ),   F gains  - sum_{(i,l) in E} r_il phi_i . phi_l

each undirected edge once. log Z is constant and left out. A spot's neighbours in other patches are read
from the halo, so the partition does not change F; a cut edge counts half in both patches.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy

from pdvi._base.types import Array, Globals, Shard
from pdvi.core.model import registered
from pdvi.models.gaussian_mixture import GaussianMixtureModel
from pdvi.shards.buckets import columns_at_once


@registered
class PottsMixtureModel(GaussianMixtureModel):
    """A shard also has a padded neighbour table: ``table`` and ``weight``, both (degree, rows).

    ``table`` counts the shard's own rows, then its halo rows; entries with weight 0 are padding.

    All spots of a shard are updated at once from their neighbours' old values. With damping s,

        phi_i  prop. to  exp( (logits_i + sum_l r_il phi_l + s log phi_i) / (1 + s) ),

    each such sweep changes F by at most - (1 + 2 s) |d|^2 - 1/2 d' R d (d: the change of phi; since KL is at least
    |d|^2 on the simplex), so s = max(0, -lambda_min(R) / 4 - 1/2) never lets F rise; on most tissues it is 0.
    A ``temperature`` T divides the logits: F then has T times the entropy.
    """

    temperature: Array
    damping: Array

    def separation(self) -> Array:
        """Return half the typical squared distance between two components: sum_j s1_j^2 / s0_j^2."""
        return jnp.sum(self.prior_variance / self.noise_variance)

    def loss(self, local: Array, globals_: Globals, shard: Shard) -> Array:
        """Return the shard's share of the negative ELBO, without log Z."""
        phi = local[: len(shard["x"])]
        energy = self.logits(globals_, shard) + 0.5 * neighbour_sum(local, shard)
        entropy_and_fit = jnp.sum(self.temperature * xlogy(phi, phi) - phi * energy)
        return entropy_and_fit + self._rows_constant(shard) + shard["fraction"] * self._divergence(globals_)

    def local_step(self, local: Array, globals_: Globals, shard: Shard) -> Array:
        """Return the labels after one damped sweep over the shard's spots, all at once."""
        logits = neighbour_sum(local, shard, self.logits(globals_, shard)) / self.temperature
        return self._masked(jax.nn.softmax(self._damped(logits, local, shard), axis=1), shard)

    def local_gradient(self, local: Array, globals_: Globals, shard: Shard) -> Array:
        """Return dF / dphi of the shard's own spots: an edge to another patch counts in full, in `loss` half."""
        phi = jnp.maximum(local[: len(shard["x"])], jnp.finfo(local.dtype).tiny)
        return self.temperature * (1 + jnp.log(phi)) - neighbour_sum(local, shard, self.logits(globals_, shard))

    def curvature(self, local: Array, globals_: Globals, shard: Shard) -> Globals:
        """Return that at equal weights."""
        return self.equal_curvature(shard)

    def _damped(self, logits: Array, local: Array, shard: Shard) -> Array:
        def mix() -> Array:
            old = jnp.log(jnp.maximum(local[: len(shard["x"])], jnp.finfo(local.dtype).tiny))
            return (logits + self.damping * old) / (1 + self.damping)

        return jax.lax.cond(self.damping > 0, mix, lambda: logits)


def neighbour_sum(local: Array, shard: Shard, start: Array | None = None) -> Array:
    """Return start_i + sum_l r_il phi_l, by a scan over the columns of the neighbour table.

    One gather per column, several unrolled, keeps the working set in cache: several times faster than one
    large gather or a segment sum.
    """
    start = jnp.zeros_like(local[: len(shard["x"])]) if start is None else start

    def add(total: Array, column: tuple[Array, Array]) -> tuple[Array, None]:
        index, weight = column
        return total + weight[:, None] * jnp.take(local, index, axis=0, mode="clip"), None

    unroll = columns_at_once(len(shard["table"]))
    return jax.lax.scan(add, start, (shard["table"], shard["weight"]), unroll=unroll)[0]
