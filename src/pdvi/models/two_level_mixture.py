"""The two-level mixture on a graph: domains are compositions of types, and types are what rows look like.

    z ~ Potts(r) with shares,     c_i | z_i = k ~ Cat(theta_k),     x_i | c_i = t ~ N(m_t, diag s0^2)
    theta_k ~ Dir(a0),            m_t ~ N(xi, diag s1^2)

    q(z_i) = Cat(phi_i),  q(c_i) = Cat(psi_i),  q(m_tj) = N(mean_tj, exp log_var_tj),  q(theta_k) = Dir(exp rho_k)

Nothing is averaged: single rows have types, and neighbours like to share a domain. As in the Potts mixture log Z is
left out, neighbours in other patches are read from the halo, and a cut edge counts half in both patches.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy

from pdvi._base.types import Array, Globals, Shard
from pdvi.core.model import Augmentation, registered
from pdvi.models import dirichlet
from pdvi.models.gaussian_mixture import GaussianMixtureModel, MixtureStatistics
from pdvi.models.potts_mixture import neighbour_sum

Locals = dict[str, Array]  # "domain": phi, (rows, K), and "type": psi, (rows, T); halo rows appended to both
SURE = 0.9  # of a starting label: a probability of 0 would take a damped sweep for ever to leave


class TwoLevelStatistics(NamedTuple):
    """What the type means and the compositions need to know of a shard; adds over shards."""

    counts: Array  # n_kt = sum_i phi_ik psi_it
    total: Array  # T_t = sum_i psi_it x_i
    fraction: Array  # w, the shard's share of the rows and so of the priors


@registered
class TwoLevelMixtureModel(eqx.Module):
    """Hyper-parameters, and the mathematics of one shard.

    A shard is that of a `PottsMixtureModel`; it may also have starting labels of its rows, ``domain`` and ``type``,
    whole numbers, without which its rows begin undecided.

    A local step first sets all types, which do not touch each other given the domains: the exact minimiser. Given the
    types, F is that of a Potts mixture in the domains, so a parallel sweep over them with the damping that
    `PottsMixtureModel` derives never lets F rise either. A ``temperature`` T divides both kinds of logits: F then has
    T times the entropies.
    """

    start: Array  # type means to start from, (T, d)
    concentration: Array  # alpha of the compositions to start from, (K, T)
    prior_mean: Array  # xi, (d,)
    prior_variance: Array  # s1^2, (d,)
    noise_variance: Array  # s0^2, (d,)
    prior_concentration: Array  # a0, (T,)
    log_share: Array  # log of the domains' shares, (K,)
    n_rows: Array  # n, all shards together
    log_scale: Array  # log |det| of the map that whitened the rows; 0 if none did
    temperature: Array
    damping: Array

    @property
    def types(self) -> GaussianMixtureModel:
        """Return the lower level alone; its weights are the compositions' business."""
        n_types = self.start.shape[0]
        return GaussianMixtureModel(
            start=self.start,
            prior_mean=self.prior_mean,
            prior_variance=self.prior_variance,
            noise_variance=self.noise_variance,
            log_weights=jnp.zeros(n_types, self.start.dtype),
            n_rows=self.n_rows,
            log_scale=self.log_scale,
        )

    def init_global(self, key: Array) -> Globals:
        """Return the starting means and compositions."""
        return {**self.types.init_global(key), "log_concentration": jnp.log(self.concentration)}

    def init_local(self, key: Array, shard: Shard) -> Locals:
        """Return the starting labels, nearly sure; undecided where there are none."""
        sizes = {"domain": self.concentration.shape[0], "type": self.concentration.shape[1]}

        def begin(name: str, size: int) -> Array:
            undecided = jnp.full((len(shard["x"]), size), 1 / size)
            if name not in shard:
                return undecided
            return SURE * jax.nn.one_hot(shard[name], size) + (1 - SURE) * undecided

        return _masked({name: begin(name, size) for name, size in sizes.items()}, shard)

    def loss(self, local: Locals, globals_: Globals, shard: Shard) -> Array:
        """Return the shard's share of the negative ELBO, without log Z."""
        phi, psi = _own(local, shard)
        log_theta = dirichlet.expected_log(globals_["log_concentration"])
        domains = psi @ log_theta.T + self.log_share + 0.5 * neighbour_sum(local["domain"], shard)
        upper = jnp.sum(self.temperature * xlogy(phi, phi) - phi * domains)
        heat = (self.temperature - 1) * jnp.sum(xlogy(psi, psi))
        prior = dirichlet.divergence(globals_["log_concentration"], self.prior_concentration).sum()
        return self.types.loss(psi, globals_, shard) + heat + upper + shard["fraction"] * prior

    def local_step(self, local: Locals, globals_: Globals, shard: Shard) -> Locals:
        """Return the types that are best for the domains, then one damped sweep over the domains."""
        phi, _ = _own(local, shard)
        log_theta = dirichlet.expected_log(globals_["log_concentration"])
        psi = jax.nn.softmax(self._type_logits(phi, log_theta, globals_, shard) / self.temperature, axis=1)
        logits = self._domain_logits(psi, local, log_theta, shard) / self.temperature

        def mix() -> Array:
            return (logits + self.damping * _log(phi)) / (1 + self.damping)

        damped = jax.lax.cond(self.damping > 0, mix, lambda: logits)
        return _masked({"domain": jax.nn.softmax(damped, axis=1), "type": psi}, shard)

    def local_gradient(self, local: Locals, globals_: Globals, shard: Shard) -> Locals:
        """Return dF / dphi and dF / dpsi of the shard's own rows; edges to other patches count in full."""
        phi, psi = _own(local, shard)
        log_theta = dirichlet.expected_log(globals_["log_concentration"])
        return {
            "domain": self.temperature * (1 + _log(phi)) - self._domain_logits(psi, local, log_theta, shard),
            "type": self.temperature * (1 + _log(psi)) - self._type_logits(phi, log_theta, globals_, shard),
        }

    def statistics(self, local: Locals, shard: Shard) -> TwoLevelStatistics:
        """Return the expected counts of types in domains, and the sums of the types' rows."""
        phi, psi = _own(local, shard)
        return TwoLevelStatistics(phi.T @ psi, psi.T @ shard["x"], shard["fraction"])

    def components(self, local: Locals, shard: Shard) -> Array:
        """Return the probabilities of the types, which rows are normal around."""
        return _own(local, shard)[1]

    def global_step(self, statistics: TwoLevelStatistics, augmentation: Augmentation) -> Globals:
        """Return the best means and compositions: they do not touch each other given the statistics."""
        counts, total, w = statistics
        lower = self.types.global_step(MixtureStatistics(counts.sum(0), total, w), augmentation)
        centre, dual, penalty = (part["log_concentration"] for part in augmentation)
        upper = dirichlet.augmented_step(counts, self.prior_concentration, w, centre, dual, penalty)
        return {**lower, "log_concentration": upper}

    def curvature(self, local: Locals, globals_: Globals, shard: Shard) -> Globals:
        """Return that of the means at equal weights, and that of the compositions if they stay where they are."""
        upper = dirichlet.curvature(globals_["log_concentration"], shard["fraction"])
        return {**self.types.equal_curvature(shard), "log_concentration": upper}

    def natural(self, globals_: Globals) -> Globals:
        """Return the natural parameters: those of the means, and the concentrations themselves."""
        return {**self.types.natural(globals_), "log_concentration": jnp.exp(globals_["log_concentration"])}

    def from_natural(self, natural: Globals) -> Globals:
        """Return the globals with these natural parameters."""
        return {**self.types.from_natural(natural), "log_concentration": jnp.log(natural["log_concentration"])}

    def natural_gradient(self, globals_: Globals, gradient: Globals) -> Globals:
        """Return the gradient in the expectation parameters that belong to `natural`."""
        rho, slope = globals_["log_concentration"], gradient["log_concentration"]
        lower = self.types.natural_gradient(globals_, gradient)
        return {**lower, "log_concentration": dirichlet.natural_gradient(rho, slope)}

    def to_unconstrained(self, local: Locals) -> Locals:
        """Return both kinds of probabilities as logits."""
        return jax.tree.map(_log, local)

    def from_unconstrained(self, x: Locals, shard: Shard) -> Locals:
        """Return the probabilities of logits."""
        return jax.tree.map(lambda leaf: self.types.from_unconstrained(leaf, shard), x)

    def _type_logits(self, phi: Array, log_theta: Array, globals_: Globals, shard: Shard) -> Array:
        return self.types.logits(globals_, shard) + phi @ log_theta

    def _domain_logits(self, psi: Array, local: Locals, log_theta: Array, shard: Shard) -> Array:
        return neighbour_sum(local["domain"], shard, psi @ log_theta.T + self.log_share)


def _own(local: Locals, shard: Shard) -> tuple[Array, Array]:
    """Domains and types of the shard's own rows."""
    n_rows = len(shard["x"])
    return local["domain"][:n_rows], local["type"][:n_rows]


def _masked(local: Locals, shard: Shard) -> Locals:
    return jax.tree.map(lambda leaf: leaf * shard["mask"][:, None], local) if "mask" in shard else local


def _log(probability: Array) -> Array:
    return jnp.log(jnp.maximum(probability, jnp.finfo(probability.dtype).tiny))
