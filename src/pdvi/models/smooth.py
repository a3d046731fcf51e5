"""Two small smooth problems without closed-form oracles: one only convex, one nonconvex."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp

from pdvi._base.types import Array, Globals, Shard
from pdvi.core.model import registered


@registered
class Quartic(eqx.Module):
    """f_b = (phi - b' lam)^2 / 2 + (a' lam)^4 / 4: convex, flat at its minimum, so not strongly convex."""

    dim_global: int

    def init_global(self, key: Array) -> Globals:
        """Return all ones."""
        return {"lam": jnp.ones(self.dim_global)}

    def init_local(self, key: Array, shard: Shard) -> Array:
        """Return zero."""
        return jnp.zeros(())

    def loss(self, local: Array, globals_: Globals, shard: Shard) -> Array:
        """Return one shard's loss."""
        lam = globals_["lam"]
        return 0.5 * (local - shard["b"] @ lam) ** 2 + 0.25 * (shard["a"] @ lam) ** 4


@registered
class TanhRegression(eqx.Module):
    """f_b = |phi - gain tanh(A lam)|^2 / 2 + |phi - y|^2 / 2: strongly convex in phi, nonconvex in lam.

    A noisy observation y of a latent phi, which a nonlinear regression on two blocks of globals, ``weight``
    and ``gain``, predicts.
    """

    dim_global: int

    def init_global(self, key: Array) -> Globals:
        """Return small random weights, and unit gain."""
        return {"weight": 0.1 * jax.random.normal(key, (self.dim_global,), jnp.float32), "gain": jnp.ones(())}

    def init_local(self, key: Array, shard: Shard) -> Array:
        """Return the observation."""
        return shard["y"]

    def loss(self, local: Array, globals_: Globals, shard: Shard) -> Array:
        """Return one shard's loss."""
        predicted = globals_["gain"] * jnp.tanh(shard["A"] @ globals_["weight"])
        return 0.5 * jnp.sum((local - predicted) ** 2) + 0.5 * jnp.sum((local - shard["y"]) ** 2)
