"""The mixture without a graph, in little memory: its local variables are statistics of the responsibilities."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pdvi._base.types import Array, Globals, Shard
from pdvi.models.mixture import MixtureModel, MixtureStatistics


class Collapsed(NamedTuple):
    """What the globals and the objective need to know of responsibilities."""

    statistics: MixtureStatistics
    entropy: Array  # sum_ik phi_ik log phi_ik, times the temperature; of a row of weight w that of one row, w times


class CollapsedMixtureModel(MixtureModel):
    """The mixture without a graph whose local variables are statistics of the responsibilities, not these themselves.

    Responsibilities follow from the globals. They are made for a block of rows at a time and forgotten, so that nothing
    of the size of the rows is kept, and neither objective nor curvature costs a pass over the rows. A shard's ``x`` has
    the shape (blocks, rows, d), and ``mask`` (blocks, rows). Methods that take gradients in the local variables need
    `MixtureModel`.
    """

    def init_local(self, key: Array, shard: Shard) -> Collapsed:
        """Return statistics of no rows."""
        nothing = jax.eval_shape(self._collapse, self.init_global(key), shard, shard["x"][0])
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), nothing)

    def loss(self, local: Collapsed, globals_: Globals, shard: Shard) -> Array:
        """Return the shard's fraction of the negative ELBO."""
        return local.entropy + self.expected_loss(globals_, local.statistics)

    def local_step(self, local: Collapsed, globals_: Globals, shard: Shard) -> Collapsed:
        """Return the statistics of the best responsibilities."""

        def add(total: Collapsed, rows: tuple[Array, ...]) -> tuple[Collapsed, None]:
            return jax.tree.map(jnp.add, total, self._collapse(globals_, shard, *rows)), None

        rows = (shard["x"], shard["mask"]) if "mask" in shard else (shard["x"],)
        nothing = jax.tree.map(jnp.zeros_like, local)
        found = jax.lax.scan(add, nothing, rows)[0]
        known = {name: shard[name] for name in ("square", "fraction") if name in shard}
        return found._replace(statistics=found.statistics._replace(**known))

    def statistics(self, local: Collapsed, shard: Shard) -> MixtureStatistics:
        """Return the statistics."""
        return local.statistics

    def _collapse(self, globals_: Globals, shard: Shard, x: Array, *weight: Array) -> Collapsed:
        """The statistics of a block of rows, and what is known of the whole shard."""
        log_phi = jax.nn.log_softmax(self.logits(globals_, {"x": x}) / self.temperature, axis=1)
        phi = jnp.exp(log_phi)
        for one in weight:
            phi *= one[:, None]
        entropy = self.temperature * jnp.sum(phi * log_phi)
        return Collapsed(super().statistics(phi, {**shard, "x": x}), entropy)
