"""A model to copy: robust linear regression with a latent scale per observation.

    y_i | beta, s_i ~ N(x_i' beta, sigma^2 / s_i),   s_i ~ Gamma(nu/2, nu/2),   beta ~ N(0, 10 I)

with q(s_i) = Gamma((nu + 1)/2, rate_i); beta and log sigma are point estimates. Run it: python docs/skeletons/model.py
"""

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import digamma

import pdvi


class RobustRegression:
    """Three methods are enough; everything else comes from autodiff."""

    nu = 4.0

    def __init__(self, dim):
        self.dim = dim

    def init_global(self, key):
        """One entry per block; a block is a group of parameters that belong together."""
        return {"beta": jnp.zeros(self.dim), "log_noise": jnp.zeros(())}

    def init_local(self, key, shard):
        """Local variables are unconstrained: here the logarithm of each rate."""
        return jnp.zeros(shard["y"].shape)

    def loss(self, local, globals_, shard):
        """This shard's share of the negative ELBO, a scalar; padded rows (mask 0) must not count."""
        mask = shard.get("mask", jnp.ones_like(shard["y"]))
        shape = (self.nu + 1) / 2
        expected = shape / jnp.exp(local)  # E[s_i]
        expected_log = digamma(shape) - local  # E[log s_i]
        residual = (shard["y"] - shard["x"] @ globals_["beta"]) / jnp.exp(globals_["log_noise"])
        likelihood = 0.5 * expected * residual**2 - 0.5 * expected_log
        prior_of_s = 0.5 * self.nu * expected - (0.5 * self.nu - 1) * expected_log
        rows = likelihood + prior_of_s + local  # minus the entropy of q(s_i) is local, plus a constant
        prior = 0.05 * jnp.sum(globals_["beta"] ** 2)  # counted once over all shards, by their fractions
        return jnp.sum(mask * (rows + globals_["log_noise"])) + shard["fraction"] * prior


def simulate(n=2_000, dim=3, n_shards=20, seed=0):
    """Shards of unequal size: a list of dicts."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, dim))
    beta = np.arange(1.0, dim + 1)
    y = x @ beta + 0.5 * rng.standard_t(4, n)
    cuts = np.sort(rng.choice(np.arange(1, n), n_shards - 1, replace=False))
    shards = [
        {"x": a, "y": b, "fraction": np.asarray(len(b) / n)} for a, b in zip(np.split(x, cuts), np.split(y, cuts))
    ]
    return shards, beta


if __name__ == "__main__":
    shards, beta = simulate()
    result = pdvi.fit(pdvi.Problem(RobustRegression(3), shards), pdvi.P2DVI())
    print(result.status)
    print("truth   ", beta)
    print("estimate", result.global_params["beta"].round(3))
