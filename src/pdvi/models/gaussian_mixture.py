"""A Gaussian mixture with closed-form steps; also the base of the Potts mixture.

    x_i | z_i = k ~ N(c_k, diag s0^2),    c_k ~ N(xi, diag s1^2),    z_i ~ Cat(pi)
    q(z_i) = Cat(phi_i),                  q(c_kj) = N(m_kj, exp rho_kj)

The loss is the whole negative ELBO, constants included, so that it can be compared across noise variances.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy

from pdvi._base.types import Array, Globals, Shard
from pdvi.core.model import Augmentation, registered

ABSENT = -1e9  # log weight of a component that is padding: fits with several numbers of components are then one program


class MixtureStatistics(NamedTuple):
    """What the component means need to know of a shard; adds over shards."""

    mass: Array  # S_k = sum_i phi_ik
    total: Array  # T_k = sum_i phi_ik x_i
    fraction: Array  # w, the shard's share of the rows and so of the prior


@registered
class GaussianMixtureModel(eqx.Module):
    """Hyper-parameters, and the mathematics of one shard.

    A shard has rows ``x``, its ``fraction`` of all rows, its sum of squares ``square`` (per feature), and a ``mask``
    if some rows are padding. All arrays may change without recompilation.
    """

    start: Array  # component means to start from, (K, d)
    prior_mean: Array  # xi, (d,)
    prior_variance: Array  # s1^2, (d,)
    noise_variance: Array  # s0^2, (d,)
    log_weights: Array  # log pi, (K,); `ABSENT` of components that are padding
    n_rows: Array  # n, all shards together
    log_scale: Array  # log |det| of the map that whitened the rows; 0 if none did

    @property
    def present(self) -> Array:
        """Whether each component is one, and no padding."""
        return self.log_weights > 0.5 * ABSENT

    def init_global(self, key: Array) -> Globals:
        """Return the starting means, with the variances they would have at equal weights."""
        precision = self.n_rows / self.present.sum() / self.noise_variance + 1 / self.prior_variance
        return {"mean": self.start, "log_var": jnp.broadcast_to(-jnp.log(precision), self.start.shape)}

    def init_local(self, key: Array, shard: Shard) -> Array:
        """Return equal probabilities."""
        equal = self.present / self.present.sum()
        return self._masked(jnp.broadcast_to(equal, (len(shard["x"]), len(equal))), shard)

    def loss(self, local: Array, globals_: Globals, shard: Shard) -> Array:
        """Return the shard's share of the negative ELBO."""
        phi = local[: len(shard["x"])]
        entropy_and_fit = jnp.sum(xlogy(phi, phi) - phi * self.logits(globals_, shard))
        return entropy_and_fit + self._rows_constant(shard) + shard["fraction"] * self._divergence(globals_)

    def logits(self, globals_: Globals, shard: Shard) -> Array:
        """Return E_q log p(x_i, z_i = k) without the part that is the same for all k."""
        scaled = globals_["mean"] / self.noise_variance
        norm = jnp.sum(globals_["mean"] * scaled + jnp.exp(globals_["log_var"]) / self.noise_variance, axis=1)
        return shard["x"] @ scaled.T + (self.log_weights - 0.5 * norm)

    def local_step(self, local: Array, globals_: Globals, shard: Shard) -> Array:
        """Return the responsibilities."""
        return self._masked(jax.nn.softmax(self.logits(globals_, shard), axis=1), shard)

    def statistics(self, local: Array, shard: Shard) -> MixtureStatistics:
        """Return masses and sums per component."""
        phi = local[: len(shard["x"])]
        return MixtureStatistics(phi.sum(0), phi.T @ shard["x"], shard["fraction"])

    def components(self, local: Array, shard: Shard) -> Array:
        """Return the probabilities of the components that rows are normal around."""
        return local[: len(shard["x"])]

    def global_step(self, statistics: MixtureStatistics, augmentation: Augmentation) -> Globals:
        """Return the means in closed form; the log-variances by the Wright omega function."""
        mass, total, w = statistics.mass[:, None], statistics.total, statistics.fraction
        centre, dual, penalty = augmentation
        precision = mass / self.noise_variance + w / self.prior_variance
        pull = total / self.noise_variance + w * self.prior_mean / self.prior_variance
        mean = (pull + penalty["mean"] * centre["mean"] - dual["mean"]) / (precision + penalty["mean"])
        log_var = log_variance(0.5 * precision, 0.5 * w, centre["log_var"], dual["log_var"], penalty["log_var"])
        return {"mean": mean, "log_var": log_var}

    def curvature(self, local: Array, globals_: Globals, shard: Shard) -> Globals:
        """Return that of the means for these responsibilities, of the variances where they end."""
        return self.curvature_of(self.statistics(local, shard).mass[:, None], shard)

    def equal_curvature(self, shard: Shard) -> Globals:
        """Return that at equal weights, for models whose first responsibilities say nothing of later ones."""
        return self.curvature_of(shard["fraction"] * self.n_rows / self.present.sum(), shard)

    def curvature_of(self, mass: Array, shard: Shard) -> Globals:
        """Return that for components of such a mass."""
        w, shape = shard["fraction"], self.start.shape
        mean = mass / self.noise_variance + w / self.prior_variance
        return {"mean": jnp.broadcast_to(mean, shape), "log_var": jnp.broadcast_to(0.5 * w, shape)}

    def natural(self, globals_: Globals) -> Globals:
        """Return the natural parameters of q(c): precision times mean, and precision."""
        precision = jnp.exp(-globals_["log_var"])
        return {"mean": precision * globals_["mean"], "log_var": precision}

    def from_natural(self, natural: Globals) -> Globals:
        """Return the inverse of `natural`."""
        return {"mean": natural["mean"] / natural["log_var"], "log_var": -jnp.log(natural["log_var"])}

    def natural_gradient(self, globals_: Globals, gradient: Globals) -> Globals:
        """Return the gradient in the expectation parameters E c and -1/2 E c^2, which belong to `natural`."""
        by_variance = gradient["log_var"] * jnp.exp(-globals_["log_var"])
        return {"mean": gradient["mean"] - 2 * globals_["mean"] * by_variance, "log_var": -2 * by_variance}

    def to_unconstrained(self, local: Array) -> Array:
        """Return responsibilities as logits."""
        return jnp.log(jnp.maximum(local, jnp.finfo(local.dtype).tiny))

    def from_unconstrained(self, x: Array, shard: Shard) -> Array:
        """Return the inverse of `to_unconstrained`; a floor, and no product with the mask, keep slopes finite."""
        phi = jnp.maximum(jax.nn.softmax(x, axis=1), jnp.finfo(x.dtype).tiny)
        return jnp.where(shard["mask"][:, None] > 0, phi, 0) if "mask" in shard else phi

    def _masked(self, phi: Array, shard: Shard) -> Array:
        return phi * shard["mask"][:, None] if "mask" in shard else phi

    def _rows_constant(self, shard: Shard) -> Array:
        rows = shard["fraction"] * self.n_rows
        per_row = jnp.sum(jnp.log(2 * math.pi * self.noise_variance)) - 2 * self.log_scale
        return 0.5 * (rows * per_row + jnp.sum(shard["square"] / self.noise_variance))

    def _divergence(self, globals_: Globals) -> Array:
        """KL(q(c) || p(c))."""
        variance = jnp.exp(globals_["log_var"])
        distance = (globals_["mean"] - self.prior_mean) ** 2
        ratio = (distance + variance) / self.prior_variance
        return 0.5 * jnp.sum(ratio - 1 + jnp.log(self.prior_variance) - globals_["log_var"])


def log_variance(a: Array, half: Array, centre: Array, dual: Array, penalty: Array) -> Array:
    """Return the root rho of  a exp(rho) - half + dual + penalty (rho - centre) = 0.

    With t = rho - log(penalty / a) it reads exp(t) + t = z, z = centre + (half - dual) / penalty + log(a / penalty):
    t = log omega(z), found to machine precision in three Halley steps from a start that is right at both
    ends, whatever the scales. Without a penalty the root is log((half - dual) / a).
    """
    safe = jnp.where(penalty > 0, penalty, 1.0)
    z = centre + (half - dual) / safe + jnp.log(a / safe)
    positive = jnp.maximum(z, 1.0)
    t = jnp.where(z > 1.0, jnp.log(positive - jnp.log(positive)), z - jnp.log1p(jnp.exp(jnp.minimum(z, 1.0))))
    for _ in range(3):
        e = jnp.exp(t)
        residual, slope = e + t - z, e + 1
        t = t - 2 * residual * slope / (2 * slope**2 - residual * e)
    unpenalised = jnp.log(jnp.maximum(half - dual, jnp.finfo(z.dtype).tiny) / a)
    return jnp.where(penalty > 0, t + jnp.log(safe / a), unpenalised)
