"""A NumPyro model as pdvi sees it: one shard's share of the negative ELBO, expectations by fixed draws.

q is normal and mean-field where all unknowns are unconstrained. With the draws e_m of `draws` and z_m = mean + sd e_m,

    f_b = - mean_m [ sum of log p of the shard's rows at z_m, with Jacobians ]  -  entropy of its locals
          - w_b ( mean_m [ log prior of the globals at z_m, with Jacobians ] + entropy of the globals )

Every shard has the same draws of the globals, so the sum over shards is the fixed-draw negative ELBO of all data.
"""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from pdvi._base.types import Array, Globals, PyTree, Shard
from pdvi.bridge.density import Density
from pdvi.bridge.posterior import sampled
from pdvi.core.model import Sampled, Wanted

ENTROPY = 0.5 * math.log(2 * math.pi * math.e)  # of a standard normal
START_SD = 0.1
JITTER = 0.1  # of the first means: symmetric models would stay where they begin


class NumPyroModel(eqx.Module):
    """What `pdvi.from_numpyro` makes; not to be built by hand."""

    density: Density
    draws: Any  # (draws, globals)

    def init_global(self, key: Array) -> dict[str, Array]:
        """Return means near 0, where constraints are not felt, and small standard deviations."""
        size = self.density.n_global
        return {"mean": JITTER * jax.random.normal(key, (size,)), "log_sd": jnp.full(size, math.log(START_SD))}

    def init_local(self, key: Array, shard: Shard) -> PyTree:
        """Return the same for every row; nothing where no unknown is inside the plate."""
        shape = (shard["weight"].shape[0], self.density.n_local)
        if shape[1] == 0:
            return {}
        return {"mean": jnp.zeros(shape), "log_sd": jnp.full(shape, math.log(START_SD))}

    def loss(self, local: PyTree, globals_: Globals, shard: Shard) -> Array:
        """Return this shard's share of the negative ELBO."""
        z = globals_["mean"] + jnp.exp(globals_["log_sd"]) * self.draws
        if local:
            z_local = local["mean"] + jnp.exp(local["log_sd"]) * shard["noise"]
        else:
            z_local = jnp.zeros((len(self.draws), shard["weight"].shape[0], 0))
        rows, outside = jax.vmap(lambda at, at_local: self.density.by_row(at, at_local, shard))(z, z_local)
        prior = outside.mean() + jnp.sum(globals_["log_sd"] + ENTROPY)
        loss = -jnp.sum(shard["weight"] * rows.mean(0)) - shard["fraction"] * prior
        if local:
            loss = loss - jnp.sum(self.density.weights(shard) * (local["log_sd"] + ENTROPY))
        return loss

    def independent_rows(self) -> bool:
        """Return that rows meet in the globals only: `pdvi.from_numpyro` has seen to it."""
        return True

    def sample_posterior(self, problem: Any, global_params: Globals, local_params: PyTree, wanted: Wanted) -> Sampled:
        """Return draws of the unknowns in the model's own terms."""
        return sampled(self.density, problem, global_params, local_params, wanted)
