"""A Gaussian mixture whose components have covariances of their own, and whose rows may have weights.

    x_i | z_i = k ~ N(c_k, P_k^-1),    c_k ~ N(xi, diag s1^2),    z_i ~ Cat(pi)
    q(z_i) = Cat(phi_i),               q(c_kj) = N(m_kj, exp rho_kj)

A row of weight w counts as w rows: its responsibilities add up to w. The loss is the whole negative ELBO.
"""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy

from pdvi._base.types import Array, Globals, Shard
from pdvi.core.model import Augmentation, registered
from pdvi.models.gaussian_mixture import MixtureStatistics, log_variance


@registered
class FreeMixtureModel(eqx.Module):
    """Hyper-parameters, and the mathematics of one shard.

    A shard has rows ``x``, their weights ``mask`` (0: padding), and its ``fraction`` of all weight. All arrays may
    change without recompilation.
    """

    start: Array  # component means to start from, (K, d)
    prior_mean: Array  # xi, (d,)
    prior_variance: Array  # s1^2, (d,)
    precision: Array  # P, (K, d, d)
    log_weights: Array  # log pi, (K,)
    n_rows: Array  # the weight of all rows

    def init_global(self, key: Array) -> Globals:
        """Return the starting means, with the variances they would have at equal weights."""
        precision = self.n_rows / len(self.log_weights) * self._diagonal() + 1 / self.prior_variance
        return {"mean": self.start, "log_var": -jnp.log(precision)}

    def init_local(self, key: Array, shard: Shard) -> Array:
        """Return equal probabilities."""
        n_components = len(self.log_weights)
        return jnp.full((len(shard["x"]), n_components), 1 / n_components) * shard["mask"][:, None]

    def loss(self, local: Array, globals_: Globals, shard: Shard) -> Array:
        """Return the shard's share of the negative ELBO."""
        weight = shard["mask"][:, None]
        entropy = jnp.sum(xlogy(local, local)) - jnp.sum(local * jnp.log(jnp.where(weight > 0, weight, 1.0)))
        return entropy - jnp.sum(local * self.logits(globals_, shard)) + shard["fraction"] * self._divergence(globals_)

    def logits(self, globals_: Globals, shard: Shard) -> Array:
        """Return E_q log p(x_i, z_i = k)."""
        log_det = jnp.linalg.slogdet(self.precision)[1]
        spread = jnp.sum(self._diagonal() * jnp.exp(globals_["log_var"]), axis=1)
        constant = self.log_weights + 0.5 * (log_det - spread - self.start.shape[1] * math.log(2 * math.pi))

        def squares(mean: Array, precision: Array) -> Array:
            residual = shard["x"] - mean
            return jnp.sum((residual @ precision) * residual, axis=1)

        return constant - 0.5 * jax.vmap(squares, out_axes=1)(globals_["mean"], self.precision)

    def local_step(self, local: Array, globals_: Globals, shard: Shard) -> Array:
        """Return the responsibilities."""
        return jax.nn.softmax(self.logits(globals_, shard), axis=1) * shard["mask"][:, None]

    def statistics(self, local: Array, shard: Shard) -> MixtureStatistics:
        """Return masses and sums per component."""
        return MixtureStatistics(local.sum(0), local.T @ shard["x"], shard["fraction"])

    def global_step(self, statistics: MixtureStatistics, augmentation: Augmentation) -> Globals:
        """Return the means from a linear system each; the log-variances by the Wright omega function."""
        mass, total, w = statistics.mass, statistics.total, statistics.fraction
        centre, dual, penalty = augmentation
        prior = w / self.prior_variance
        pull = jnp.einsum("kde,ke->kd", self.precision, total) + prior * self.prior_mean
        pull += penalty["mean"] * centre["mean"] - dual["mean"]
        stiff = mass[:, None, None] * self.precision + jax.vmap(jnp.diag)(prior + penalty["mean"])
        mean = jnp.linalg.solve(stiff, pull[..., None])[..., 0]
        slope = 0.5 * (mass[:, None] * self._diagonal() + prior)
        log_var = log_variance(slope, 0.5 * w, centre["log_var"], dual["log_var"], penalty["log_var"])
        return {"mean": mean, "log_var": log_var}

    def curvature(self, local: Array, globals_: Globals, shard: Shard) -> Globals:
        """Return that of the means for these responsibilities, of the variances where they end."""
        w, shape = shard["fraction"], self.start.shape
        mass = self.statistics(local, shard).mass[:, None]
        mean = mass * self._diagonal() + w / self.prior_variance
        return {"mean": mean, "log_var": jnp.broadcast_to(0.5 * w, shape)}

    def to_unconstrained(self, local: Array) -> Array:
        """Return responsibilities as logits."""
        return jnp.log(jnp.maximum(local, jnp.finfo(local.dtype).tiny))

    def from_unconstrained(self, x: Array, shard: Shard) -> Array:
        """Return the inverse of `to_unconstrained`; a floor keeps slopes finite."""
        phi = jnp.maximum(jax.nn.softmax(x, axis=1), jnp.finfo(x.dtype).tiny)
        weight = shard["mask"][:, None]
        return jnp.where(weight > 0, phi * weight, 0)

    def _diagonal(self) -> Array:
        return jnp.diagonal(self.precision, axis1=1, axis2=2)

    def _divergence(self, globals_: Globals) -> Array:
        """KL(q(c) || p(c))."""
        variance = jnp.exp(globals_["log_var"])
        ratio = ((globals_["mean"] - self.prior_mean) ** 2 + variance) / self.prior_variance
        return 0.5 * jnp.sum(ratio - 1 + jnp.log(self.prior_variance) - globals_["log_var"])
