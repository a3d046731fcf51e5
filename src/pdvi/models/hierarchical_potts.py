"""The hierarchical mixture on a graph: domains are compositions of types, and rows are normal around their type.

    z ~ Potts(r) with weights,    c_i | z_i = k ~ Cat(theta_k),    x_i | c_i = t ~ N(m_t, P^-1),    theta_k ~ Dir(a0)

    q(z_i) = Cat(phi_i),  q(c_i) = Cat(psi_i),  q(theta_k) = Dir(exp log_concentration_k),  and q(m_t) of the mixture

Nothing is averaged: single rows have types, and neighbors like to share a domain. The precision, the compositions and
the weights of the domains are blocks of the globals beside the means of the types. As in the Potts mixture log Z is
left out, neighbors in other patches are read from the halo, and a cut edge counts half in both patches.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlogy

from pdvi._base.types import Array, Globals, Shard
from pdvi.core.model import Augmentation
from pdvi.models import dirichlet
from pdvi.models.closed_forms import (
    PRIOR_COUNT,
    damp,
    masked,
    neighbor_sum,
    probabilities,
    safe_log,
    weight_loss,
    weight_step,
)
from pdvi.models.mixture import MixtureModel, MixtureStatistics

Locals = dict[str, Array]  # "domain": phi, (rows, K), and "type": psi, (rows, T); halo rows appended to both


class HierarchicalStatistics(NamedTuple):
    """Sums over the rows of a shard that determine the globals."""

    counts: Array  # n_kt = sum_i phi_ik psi_it
    types: MixtureStatistics


class HierarchicalPottsModel(eqx.Module):
    """Hyper-parameters, and the mathematics of one shard, which is that of a `MixtureModel` on a graph.

    A local step first sets all types, which do not touch each other given the domains: the exact minimizer. Given the
    types, F is that of a Potts mixture in the domains, so that a sweep over them with the damping of `MixtureModel`
    never lets F rise. Temperature and damping are those of ``types``, whose weights are all 1: the compositions have
    them.
    """

    types: MixtureModel
    concentration: Array  # alpha of the compositions to start from, (K, T)
    prior_concentration: Array  # a0, (T,)
    log_weight: Array  # of the domains, to start from or fixed, (K,)
    learn_weight: bool = eqx.field(default=False, static=True)

    @property
    def covariance(self) -> str:
        """Return the kind of covariance around the types."""
        return self.types.covariance

    @property
    def n_rows(self) -> Array:
        """Return the number of rows of all shards together."""
        return self.types.n_rows

    def init_global(self, key: Array) -> Globals:
        """Return the starting means, precision, compositions and weights."""
        globals_ = {**self.types.init_global(key), "log_concentration": jnp.log(self.concentration)}
        return {**globals_, "domain_log_weight": self.log_weight} if self.learn_weight else globals_

    def init_local(self, key: Array, shard: Shard) -> Locals:
        """Return equal probabilities of domains and of types."""
        sizes = zip(("domain", "type"), self.concentration.shape)
        return masked({name: jnp.full((len(shard["x"]), size), 1 / size) for name, size in sizes}, shard)

    def loss(self, local: Locals, globals_: Globals, shard: Shard) -> Array:
        """Return the shard's fraction of the negative ELBO, without log Z."""
        phi, psi = _own(local, shard)
        log_theta = dirichlet.expected_log(globals_["log_concentration"])
        statistics = self.statistics(local, shard)
        value = self.types.temperature * (jnp.sum(xlogy(phi, phi)) + jnp.sum(xlogy(psi, psi)))
        value -= jnp.sum(statistics.counts * log_theta) + 0.5 * jnp.sum(phi * neighbor_sum(local["domain"], shard))
        value -= jnp.sum(statistics.counts.sum(1) * globals_.get("domain_log_weight", self.log_weight))
        w = shard["fraction"]
        value += w * dirichlet.divergence(globals_["log_concentration"], self.prior_concentration).sum()
        if self.learn_weight:
            value += w * weight_loss(globals_["domain_log_weight"], np.ones(len(self.log_weight)), self.n_rows)
        return value + self.types.expected_loss(globals_, statistics.types)

    def local_step(self, local: Locals, globals_: Globals, shard: Shard) -> Locals:
        """Return the types that are best for the domains, then one damped sweep over the domains."""
        phi, _ = _own(local, shard)
        temperature, log_weight = self.types.temperature, globals_.get("domain_log_weight", self.log_weight)
        log_theta = dirichlet.expected_log(globals_["log_concentration"])
        psi = jax.nn.softmax((self.types.logits(globals_, shard) + phi @ log_theta) / temperature, axis=1)
        logits = neighbor_sum(local["domain"], shard, psi @ log_theta.T + log_weight) / temperature
        phi = jax.nn.softmax(damp(logits, phi, self.types.damping), axis=1)
        return masked({"domain": phi, "type": psi}, shard)

    def local_gradient(self, local: Locals, globals_: Globals, shard: Shard) -> Locals:
        """Return dF / dphi and dF / dpsi of the shard's own rows; edges to other patches count in full."""
        phi, psi = _own(local, shard)
        temperature, log_weight = self.types.temperature, globals_.get("domain_log_weight", self.log_weight)
        log_theta = dirichlet.expected_log(globals_["log_concentration"])
        domains = neighbor_sum(local["domain"], shard, psi @ log_theta.T + log_weight)
        types = self.types.logits(globals_, shard) + phi @ log_theta
        by_domain, by_type = (temperature * (1 + safe_log(own)) for own in (phi, psi))
        return {"domain": by_domain - domains, "type": by_type - types}

    def statistics(self, local: Locals, shard: Shard) -> HierarchicalStatistics:
        """Return the expected counts of types in domains, and the statistics of the types."""
        phi, psi = _own(local, shard)
        return HierarchicalStatistics(phi.T @ psi, self.types.statistics(psi, shard))

    def global_step(self, statistics: HierarchicalStatistics, augmentation: Augmentation) -> Globals:
        """Return the globals after one pass: types, compositions and weights do not touch each other."""
        w = statistics.types.fraction
        globals_ = self.types.global_step(statistics.types, augmentation)
        parts = (part["log_concentration"] for part in augmentation)
        step = dirichlet.augmented_step(statistics.counts, self.prior_concentration, w, *parts)
        globals_["log_concentration"] = step
        if self.learn_weight:
            mass, parts = statistics.counts.sum(1), (part["domain_log_weight"] for part in augmentation)
            globals_["domain_log_weight"] = weight_step(mass, np.ones(len(mass), bool), self.n_rows, w, *parts)
        return globals_

    def curvature(self, local: Locals, globals_: Globals, shard: Shard) -> Globals:
        """Return the curvature of every block for these labels."""
        phi, psi = _own(local, shard)
        w, found = shard["fraction"], self.types.curvature(psi, globals_, shard)
        found["log_concentration"] = dirichlet.curvature(globals_["log_concentration"], w)
        if self.learn_weight:
            found["domain_log_weight"] = phi.sum(0) + w * PRIOR_COUNT
        return found

    def natural(self, globals_: Globals) -> Globals:
        """Return the natural parameters: those of the types, the concentrations, and the weights themselves."""
        found = self.types.natural(globals_)
        for name in self._logarithms():
            found[name] = jnp.exp(globals_[name])
        return found

    def from_natural(self, natural: Globals) -> Globals:
        """Return the globals with these natural parameters."""
        found = self.types.from_natural(natural)
        for name in self._logarithms():
            found[name] = jnp.log(natural[name])
        return found

    def natural_gradient(self, globals_: Globals, gradient: Globals) -> Globals:
        """Return the gradient in the expectation parameters that belong to `natural`."""
        found = self.types.natural_gradient(globals_, gradient)
        name = "log_concentration"
        found[name] = dirichlet.natural_gradient(globals_[name], gradient[name])
        if self.learn_weight:
            rows = self.n_rows + PRIOR_COUNT * len(self.log_weight)
            found["domain_log_weight"] = gradient["domain_log_weight"] / rows
        return found

    def to_unconstrained(self, local: Locals) -> Locals:
        """Return both kinds of probabilities as logits."""
        return jax.tree.map(safe_log, local)

    def from_unconstrained(self, x: Locals, shard: Shard) -> Locals:
        """Return the probabilities of logits."""
        return jax.tree.map(lambda leaf: probabilities(leaf, shard), x)

    def _logarithms(self) -> list[str]:
        return ["log_concentration", *(["domain_log_weight"] if self.learn_weight else [])]


def _own(local: Locals, shard: Shard) -> tuple[Array, Array]:
    """Domains and types of the shard's own rows."""
    n_rows = len(shard["x"])
    return local["domain"][:n_rows], local["type"][:n_rows]
