"""Models as a user would write them: three methods, nothing inherited, no derivative and no step size.

Each function returns a `Case`: data simulated from a seed, in shards, and the model. `own_models.py` fits them.
"""

# ruff: noqa: D102 (what the three methods are says `pdvi.Model`)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import digamma, gammaln

import pdvi

NODES, WEIGHTS = (np.asarray(part) for part in np.polynomial.hermite_e.hermegauss(12))
WEIGHTS = WEIGHTS / WEIGHTS.sum()


@dataclass(frozen=True)
class Case:
    """A model and its shards; the problem is made in the precision that is on when it is asked for.

    ``easier`` is a model of the same optimum in better units, where L-BFGS arrives too.
    """

    model: Any
    shards: dict[str, np.ndarray]
    easier: Case | None = None

    def problem(self) -> pdvi.Problem:
        """Return the problem."""
        return pdvi.Problem(self.model, self.shards)


def in_shards(n_shards: int, **arrays: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays over groups as shards of equally many groups, with their share of the whole."""
    cut = {name: value.reshape(n_shards, -1, *value.shape[1:]) for name, value in arrays.items()}
    return {**cut, "fraction": np.full(n_shards, 1 / n_shards)}


def kl_normal(mean, log_sd, prior_sd):
    """KL of N(mean, exp(2 log_sd)) to N(0, prior_sd^2), for each entry."""
    scaled = (mean**2 + jnp.exp(2 * log_sd)) / prior_sd**2
    return 0.5 * (scaled - 1) - log_sd + jnp.log(prior_sd)


class MixedModel:
    """y ~ family(x beta + z u_group), u ~ N(0, diag tau^2), q all normal and independent; tau a point estimate."""

    def __init__(self, family, p, q, prior_sd=None):
        self.family, self.p, self.q = family, p, q
        self.prior_sd = tuple(np.full(p, 10.0) if prior_sd is None else prior_sd)

    def init_global(self, key):
        start = {"beta": jnp.zeros(self.p), "beta_log_sd": jnp.zeros(self.p), "log_tau": jnp.zeros(self.q)}
        return {**start, "log_sigma": jnp.zeros(())} if self.family == "normal" else start

    def init_local(self, key, shard):
        groups = shard["y"].shape[0]
        return {"mean": jnp.zeros((groups, self.q)), "log_sd": jnp.zeros((groups, self.q))}

    def loss(self, local, globals_, shard):
        x, z, y = shard["x"], shard["z"], shard["y"]
        mean = x @ globals_["beta"] + jnp.einsum("gnq,gq->gn", z, local["mean"])
        var = x**2 @ jnp.exp(2 * globals_["beta_log_sd"]) + jnp.einsum("gnq,gq->gn", z**2, jnp.exp(2 * local["log_sd"]))
        if self.family == "logistic":
            nodes, weights = jnp.asarray(NODES, mean.dtype), jnp.asarray(WEIGHTS, mean.dtype)
            rows = jax.nn.softplus(mean[..., None] + jnp.sqrt(var)[..., None] * nodes) @ weights - y * mean
        elif self.family == "poisson":
            rows = jnp.exp(mean + var / 2) - y * mean
        else:
            rows = 0.5 * ((y - mean) ** 2 + var) * jnp.exp(-2 * globals_["log_sigma"]) + globals_["log_sigma"]
        effects = kl_normal(local["mean"], local["log_sd"], jnp.exp(globals_["log_tau"]))
        prior = kl_normal(globals_["beta"], globals_["beta_log_sd"], jnp.asarray(self.prior_sd)).sum()
        prior = prior + 0.5 * jnp.sum(globals_["log_tau"] ** 2)
        return rows.sum() + effects.sum() + shard["fraction"] * prior


def mixed(family, seed, *, groups=500, n=10, p=6, slopes=1, scales=None, n_shards=100, correlation=0.0):
    rng = np.random.default_rng(seed)
    common = rng.standard_normal((groups, n, 1))
    x = np.sqrt(1 - correlation) * rng.standard_normal((groups, n, p)) + np.sqrt(correlation) * common
    x[..., 0] = 1
    beta, tau = rng.normal(0, 0.5, p), np.array([0.7, 0.4])[:slopes]
    u = tau * rng.standard_normal((groups, slopes))
    z = x[..., :slopes]
    eta = x @ beta + np.einsum("gnq,gq->gn", z, u)
    if family == "logistic":
        y = (rng.random(eta.shape) < 1 / (1 + np.exp(-eta))).astype(float)
    elif family == "poisson":
        y = rng.poisson(np.exp(np.minimum(eta, 5))).astype(float)
    else:
        y = eta + 0.5 * rng.standard_normal(eta.shape)
    scales = np.ones(p) if scales is None else np.asarray(scales)
    easier = Case(MixedModel(family, p, slopes), in_shards(n_shards, x=x, z=z, y=y))
    return Case(MixedModel(family, p, slopes, 10 / scales), in_shards(n_shards, x=x * scales, z=z, y=y), easier)


def mixed_logistic(seed):
    return mixed("logistic", seed)


def badly_scaled_logistic(seed):
    return mixed("logistic", seed, scales=[1, 0.01, 0.1, 10, 100, 1000])


def poisson_slopes(seed):
    return mixed("poisson", seed, slopes=2)


def badly_scaled_regression(seed):
    return mixed("normal", seed, scales=[1, 1e-4, 1e-2, 1, 1e2, 1e4])


class ThreeLevels:
    """y ~ N(level + school + class, sigma^2), school ~ N(0, t1^2), class ~ N(0, t2^2): three scales, one level."""

    def init_global(self, key):
        zero = jnp.zeros(())
        return {"level": zero, "level_log_sd": zero, "log_school": zero, "log_class": zero, "log_sigma": zero}

    def init_local(self, key, shard):
        schools, classes = shard["y"].shape[:2]
        school, room = jnp.zeros(schools), jnp.zeros((schools, classes))
        return {"school": school, "school_log_sd": school, "room": room, "room_log_sd": room}

    def loss(self, local, g, shard):
        mean = g["level"] + local["school"][:, None] + local["room"]
        var = jnp.exp(2 * g["level_log_sd"]) + jnp.exp(2 * local["school_log_sd"])[:, None]
        var = var + jnp.exp(2 * local["room_log_sd"])
        rows = 0.5 * ((shard["y"] - mean[..., None]) ** 2 + var[..., None]) * jnp.exp(-2 * g["log_sigma"])
        effects = kl_normal(local["school"], local["school_log_sd"], jnp.exp(g["log_school"])).sum()
        effects = effects + kl_normal(local["room"], local["room_log_sd"], jnp.exp(g["log_class"])).sum()
        prior = kl_normal(g["level"], g["level_log_sd"], 100.0)
        return rows.sum() + shard["y"].size * g["log_sigma"] + effects + shard["fraction"] * prior


def three_levels(seed):
    rng = np.random.default_rng(seed)
    school, room = 3 * rng.standard_normal((400, 1, 1)), rng.standard_normal((400, 4, 1))
    y = 20 + school + room + 0.3 * rng.standard_normal((400, 4, 8))
    return Case(ThreeLevels(), in_shards(100, y=y))


class FactorAnalysis:
    """y ~ N(mean + W f, diag psi^2), f ~ N(0, I), q(f) normal; W has a N(0, 1) prior and is a point estimate."""

    def __init__(self, dim, factors):
        self.dim, self.factors = dim, factors

    def init_global(self, key):
        loadings = 0.1 * jax.random.normal(key, (self.dim, self.factors))
        return {"loadings": loadings, "mean": jnp.zeros(self.dim), "log_psi": jnp.zeros(self.dim)}

    def init_local(self, key, shard):
        zero = jnp.zeros((shard["y"].shape[0], self.factors))
        return {"mean": zero, "log_sd": zero}

    def loss(self, local, g, shard):
        fitted = g["mean"] + local["mean"] @ g["loadings"].T
        spread = jnp.exp(2 * local["log_sd"]) @ (g["loadings"] ** 2).T
        rows = 0.5 * ((shard["y"] - fitted) ** 2 + spread) * jnp.exp(-2 * g["log_psi"]) + g["log_psi"]
        prior = 0.5 * jnp.sum(g["loadings"] ** 2)
        return rows.sum() + kl_normal(local["mean"], local["log_sd"], 1.0).sum() + shard["fraction"] * prior


def factor_analysis(seed, n=2_000, dim=8, factors=2):
    rng = np.random.default_rng(seed)
    loadings = rng.standard_normal((dim, factors))
    y = rng.standard_normal((n, factors)) @ loadings.T + rng.uniform(0.3, 1, dim) * rng.standard_normal((n, dim))
    return Case(FactorAnalysis(dim, factors), in_shards(100, y=y + rng.standard_normal(dim)))


class ZeroInflated:
    """K components of counts, each with a rate and a share of structural zeros by column; rates ~ Gamma(2, 1)."""

    def __init__(self, dim, components):
        self.dim, self.components = dim, components

    def init_global(self, key):
        log_rate = 1 + 0.5 * jax.random.normal(key, (self.components, self.dim))
        return {"log_rate": log_rate, "zero": jnp.full((self.components, self.dim), -1.0), "log_share": jnp.zeros(3)}

    def init_local(self, key, shard):
        return jnp.zeros((shard["y"].shape[0], self.components))

    def lower_bound(self):
        """Return what the negative ELBO of discrete data cannot fall below (log priors are bounded by 0 here)."""
        return 0.0

    def loss(self, local, g, shard):
        y = shard["y"][:, None, :]
        poisson = y * g["log_rate"] - jnp.exp(g["log_rate"]) - gammaln(y + 1)
        zero, some = jax.nn.log_sigmoid(g["zero"]), jax.nn.log_sigmoid(-g["zero"])
        log_p = jnp.where(y == 0, jnp.logaddexp(zero, some + poisson), some + poisson).sum(-1)
        log_p = log_p + jax.nn.log_softmax(g["log_share"])
        log_q = jax.nn.log_softmax(local, axis=1)
        # only differences of the logits matter: their mean is held at 0
        rows = jnp.sum(jnp.exp(log_q) * (log_q - log_p)) + 0.5 * jnp.sum(local.mean(1) ** 2)
        prior = jnp.sum(jnp.exp(g["log_rate"]) - 2 * g["log_rate"] + 2) + 0.05 * jnp.sum(g["zero"] ** 2)
        return rows + shard["fraction"] * (prior + 0.5 * jnp.sum(g["log_share"] ** 2))


def zero_inflated(seed, n=2_000, dim=6, components=3):
    rng = np.random.default_rng(seed)
    rate, zero = rng.gamma(2, 3, (components, dim)), rng.uniform(0.1, 0.5, (components, dim))
    label = rng.integers(components, size=n)
    y = rng.poisson(rate[label]) * (rng.random((n, dim)) > zero[label])
    return Case(ZeroInflated(dim, components), in_shards(100, y=y.astype(float)))


class Topics:
    """LDA with the words' assignments optimised away: q(theta_d), q(beta_k) Dirichlet with parameters exp(.)."""

    def __init__(self, words, topics):
        self.words, self.topics = words, topics

    def init_global(self, key):
        return {"log_beta": 0.5 * jax.random.normal(key, (self.topics, self.words)) + jnp.log(5.0)}

    def init_local(self, key, shard):
        return jnp.zeros((shard["y"].shape[0], self.topics))

    def lower_bound(self):
        """Return what the negative ELBO of discrete data cannot fall below."""
        return 0.0

    def loss(self, local, g, shard):
        theta, beta = jnp.exp(local), jnp.exp(g["log_beta"])
        log_theta = digamma(theta) - digamma(theta.sum(1, keepdims=True))
        log_beta = digamma(beta) - digamma(beta.sum(1, keepdims=True))
        log_words = jax.nn.logsumexp(log_theta[:, :, None] + log_beta, axis=1)
        kl = kl_dirichlet(theta, log_theta, 0.5).sum()
        return kl - jnp.sum(shard["y"] * log_words) + shard["fraction"] * kl_dirichlet(beta, log_beta, 0.5).sum()


def kl_dirichlet(alpha, expected_log, prior):
    """KL of Dirichlet(alpha) to the symmetric Dirichlet(prior), by row."""
    size = alpha.shape[1]
    constant = gammaln(alpha.sum(1)) - gammaln(alpha).sum(1) - gammaln(prior * size) + size * gammaln(prior)
    return constant + jnp.sum((alpha - prior) * expected_log, axis=1)


def topics(seed, documents=1_000, words=40, topics=4, length=60):
    rng = np.random.default_rng(seed)
    beta = rng.dirichlet(np.full(words, 0.2), topics)
    theta = rng.dirichlet(np.full(topics, 0.3), documents)
    y = np.stack([rng.multinomial(length, row) for row in theta @ beta])
    return Case(Topics(words, topics), in_shards(100, y=y.astype(float)))


CASES = {
    "mixed logistic, one scale": mixed_logistic,
    "mixed logistic, 0.01 to 1,000": badly_scaled_logistic,
    "Poisson, random slopes": poisson_slopes,
    "normal, three levels": three_levels,
    "factor analysis": factor_analysis,
    "zero-inflated mixture": zero_inflated,
    "LDA": topics,
    "regression, 1e-4 to 1e4": badly_scaled_regression,
}
