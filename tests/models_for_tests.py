"""Small models written the way a user would: plain classes, nothing inherited."""

import jax.numpy as jnp
import numpy as np


class Regression:
    """Rows y ~ N(latent, 1), latent ~ N(tanh(x w), 1), w ~ N(0, 1): nonconvex in w, with a row-wise mask."""

    def init_global(self, key):
        return {"w": jnp.array([0.5, -0.3, 0.2]), "bias": jnp.zeros(())}

    def init_local(self, key, shard):
        return jnp.zeros(shard["y"].shape)

    def loss(self, local, globals_, shard):
        mask = shard.get("mask", 1.0)
        predicted = jnp.tanh(shard["x"] @ globals_["w"]) + globals_["bias"]
        rows = 0.5 * mask * ((shard["y"] - local) ** 2 + (local - predicted) ** 2)
        prior = 0.5 * (jnp.sum(globals_["w"] ** 2) + globals_["bias"] ** 2)
        return rows.sum() + shard["fraction"] * prior


def regression_rows(rng, n=60):
    x = rng.standard_normal((n, 3))
    y = 1.5 * np.tanh(x @ np.array([1.0, -2.0, 0.5])) + 0.1 * rng.standard_normal(n)
    return x, y


def regression_shards(rng, sizes):
    x, y = regression_rows(rng, sum(sizes))
    ends = np.cumsum(sizes)
    return [{"x": x[b - s : b], "y": y[b - s : b], "fraction": np.asarray(s / sum(sizes))} for b, s in zip(ends, sizes)]
