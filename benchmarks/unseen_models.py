"""Models that no rule was chosen on: written after the rules. `own_models.py` fits them.

Each is as a user would write it, like those in `users_models.py`: three methods, nothing inherited, no derivative.
"""

# ruff: noqa: D102 (what the three methods are says `pdvi.Model`)
from __future__ import annotations

from abc import ABC, abstractmethod

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import betaln, gammaln

from users_models import NODES, WEIGHTS, Case, in_shards, kl_normal


def expected(function, mean, var):
    """E function(N(mean, var)), by quadrature."""
    points = mean[..., None] + jnp.sqrt(var)[..., None] * jnp.asarray(NODES, mean.dtype)
    return function(points) @ jnp.asarray(WEIGHTS, mean.dtype)


class Grouped(ABC):
    """x beta + u_group, u ~ N(0, tau^2), q all normal and independent; a subclass says what the rows are."""

    def __init__(self, p, **more):
        self.p, self.more = p, more

    def init_global(self, key):
        start = {"beta": jnp.zeros(self.p), "beta_log_sd": jnp.zeros(self.p), "log_tau": jnp.zeros(())}
        return {**start, **{name: jnp.full((), value) for name, value in self.more.items()}}

    def init_local(self, key, shard):
        return {"mean": jnp.zeros(shard["y"].shape[0]), "log_sd": jnp.zeros(shard["y"].shape[0])}

    @abstractmethod
    def rows(self, mean, var, g, shard):
        """Return minus the expected log likelihood of every row, whose linear predictor has this mean and variance."""

    def loss(self, local, g, shard):
        mean = shard["x"] @ g["beta"] + local["mean"][:, None]
        var = shard["x"] ** 2 @ jnp.exp(2 * g["beta_log_sd"]) + jnp.exp(2 * local["log_sd"])[:, None]
        effects = kl_normal(local["mean"], local["log_sd"], jnp.exp(g["log_tau"])).sum()
        prior = kl_normal(g["beta"], g["beta_log_sd"], 100.0).sum() + 0.5 * g["log_tau"] ** 2
        prior = prior + sum(0.5 * g[name] ** 2 for name in self.more)
        return self.rows(mean, var, g, shard).sum() + effects + shard["fraction"] * prior


class RobustGroups(Grouped):
    """Student's t with four degrees of freedom and a scale."""

    def rows(self, mean, var, g, shard):
        def surprise(eta):
            return 2.5 * jnp.log1p(((shard["y"][..., None] - eta) * jnp.exp(-g["log_sigma"])) ** 2 / 4)

        return expected(surprise, mean, var) + g["log_sigma"]


class OverdispersedCounts(Grouped):
    """Negative binomial with log link and a dispersion."""

    def rows(self, mean, var, g, shard):
        y, r = shard["y"], jnp.exp(g["log_r"])
        excess = expected(lambda eta: jnp.logaddexp(g["log_r"], eta), mean, var)
        return gammaln(r) - gammaln(y + r) + gammaln(y + 1) - r * g["log_r"] - y * mean + (y + r) * excess


class Frailty(Grouped):
    """Weibull survival times, some censored; groups have frailties. With q wider at first exp(var / 2) overflows."""

    def init_global(self, key):
        return {**super().init_global(key), "beta_log_sd": jnp.full(self.p, -5.0)}

    def rows(self, mean, var, g, shard):
        log_time, event, shape = shard["log_time"], shard["y"], jnp.exp(g["log_shape"])
        hazard = jnp.exp(shape * log_time + mean + 0.5 * var)
        return hazard - event * (g["log_shape"] + (shape - 1) * log_time + mean)


def grouped_data(seed, scales, n_groups=600, n=8):
    rng = np.random.default_rng(1_000 + seed)
    x = rng.standard_normal((n_groups, n, len(scales)))
    x[..., 0] = 1
    eta = x @ rng.normal(0, 0.5, len(scales)) + 0.6 * rng.standard_normal((n_groups, 1))
    return rng, x * np.asarray(scales), eta


def robust_groups(seed):
    rng, x, eta = grouped_data(seed, [1, 1e-3, 1, 1e3])
    y = eta + 0.3 * rng.standard_t(2, eta.shape)
    return Case(RobustGroups(4, log_sigma=0.0), in_shards(60, x=x, y=y))


def overdispersed(seed):
    rng, x, eta = grouped_data(seed, [1, 0.1, 10])
    y = rng.poisson(rng.gamma(2.0, np.exp(eta + 2) / 2.0)).astype(float)
    return Case(OverdispersedCounts(3, log_r=0.0), in_shards(60, x=x, y=y))


def frailty(seed):
    rng, x, eta = grouped_data(seed, [1, 1, 50, 0.02])
    time = (rng.exponential(size=eta.shape) * np.exp(-eta)) ** (1 / 1.7)
    censored = rng.uniform(0.2, 4, eta.shape)
    event = (time <= censored).astype(float)
    return Case(Frailty(4, log_shape=0.0), in_shards(60, x=x, y=event, log_time=np.log(np.minimum(time, censored))))


class ItemResponse:
    """Two-parameter logistic: a person's ability, N(0, 1), times an item's slope, minus its difficulty: bilinear."""

    def __init__(self, items):
        self.items = items

    def init_global(self, key):
        return {"log_slope": jnp.zeros(self.items), "difficulty": jnp.zeros(self.items)}

    def init_local(self, key, shard):
        return {"mean": jnp.zeros(shard["y"].shape[0]), "log_sd": jnp.zeros(shard["y"].shape[0])}

    def loss(self, local, g, shard):
        slope = jnp.exp(g["log_slope"])
        mean = slope * local["mean"][:, None] - g["difficulty"]
        var = (slope * jnp.exp(local["log_sd"])[:, None]) ** 2
        rows = expected(jax.nn.softplus, mean, var) - shard["y"] * mean
        prior = 0.5 * jnp.sum(g["log_slope"] ** 2) + 0.5 * jnp.sum((g["difficulty"] / 5) ** 2)
        return rows.sum() + kl_normal(local["mean"], local["log_sd"], 1.0).sum() + shard["fraction"] * prior


def item_response(seed, persons=2_000, items=25):
    rng = np.random.default_rng(2_000 + seed)
    slope, difficulty = np.exp(rng.normal(0, 0.4, items)), rng.normal(0, 1.5, items)
    eta = slope * rng.standard_normal((persons, 1)) - difficulty
    return Case(ItemResponse(items), in_shards(100, y=(rng.random(eta.shape) < 1 / (1 + np.exp(-eta))).astype(float)))


class NoisySeries:
    """Short autoregressive series seen with noise: q(state) normal and independent, its means coupled along time."""

    def init_global(self, key):
        zero = jnp.zeros(())
        return {"level": zero, "rho": zero, "log_step": zero, "log_noise": zero}

    def init_local(self, key, shard):
        return {"mean": jnp.zeros(shard["y"].shape), "log_sd": jnp.zeros(shard["y"].shape)}

    def loss(self, local, g, shard):
        mean, var, keep = local["mean"], jnp.exp(2 * local["log_sd"]), jnp.tanh(g["rho"])
        seen = 0.5 * ((shard["y"] - g["level"] - mean) ** 2 + var) * jnp.exp(-2 * g["log_noise"]) + g["log_noise"]
        moved = (mean[:, 1:] - keep * mean[:, :-1]) ** 2 + var[:, 1:] + keep**2 * var[:, :-1]
        steps = 0.5 * moved * jnp.exp(-2 * g["log_step"]) + g["log_step"]
        first = 0.5 * (mean[:, 0] ** 2 + var[:, 0]) / 9
        prior = 0.5 * (g["level"] / 10) ** 2 + 0.5 * (g["rho"] ** 2 + g["log_step"] ** 2 + g["log_noise"] ** 2)
        return seen.sum() + steps.sum() + first.sum() - local["log_sd"].sum() + shard["fraction"] * prior


def noisy_series(seed, series=800, length=10):
    rng = np.random.default_rng(3_000 + seed)
    state = [rng.standard_normal(series)]
    for _ in range(length - 1):
        state.append(0.8 * state[-1] + 0.5 * rng.standard_normal(series))
    y = 300 + np.stack(state, 1) + 0.4 * rng.standard_normal((series, length))
    return Case(NoisySeries(), in_shards(80, y=y))


class Ordinal(Grouped):
    """Ordered answers: a logistic variable between cut points, the first of which is free and the others above it."""

    def init_global(self, key):
        return {**super().init_global(key), "cut": jnp.asarray([-1.0, 0.0, 0.0])}

    def rows(self, mean, var, g, shard):
        above = g["cut"][0] + jnp.cumsum(jnp.exp(g["cut"][1:]))
        cuts = jnp.concatenate([jnp.asarray([-1e3]), g["cut"][:1], above, jnp.asarray([1e3])])
        low, high = (jnp.take(cuts, shard["y"].astype(int) + k)[..., None] for k in (0, 1))

        def surprise(eta):
            return -jnp.log(jnp.maximum(jax.nn.sigmoid(high - eta) - jax.nn.sigmoid(low - eta), 1e-12))

        return expected(surprise, mean, var)


def ordinal(seed):
    rng, x, eta = grouped_data(4_000 + seed, [1, 0.01, 100])
    y = np.digitize(eta + rng.logistic(size=eta.shape), [-1, 0.3, 1.5])
    return Case(Ordinal(3), in_shards(60, x=x, y=y.astype(float)))


class ErrorsInVariables:
    """A line through points whose x is seen with noise: x ~ N(level, spread^2), slope and x are a product."""

    def init_global(self, key):
        return {name: jnp.zeros(()) for name in ("intercept", "slope", "level", "log_spread", "log_noise")}

    def init_local(self, key, shard):
        return {"mean": jnp.zeros(shard["y"].shape), "log_sd": jnp.zeros(shard["y"].shape)}

    def loss(self, local, g, shard):
        mean, var = local["mean"], jnp.exp(2 * local["log_sd"])
        missed = (shard["y"] - g["intercept"] - g["slope"] * mean) ** 2 + g["slope"] ** 2 * var
        line = 0.5 * missed * jnp.exp(-2 * g["log_noise"]) + g["log_noise"]
        seen = 0.5 * ((shard["x"] - mean) ** 2 + var) / 25
        own = 0.5 * ((mean - g["level"]) ** 2 + var) * jnp.exp(-2 * g["log_spread"]) + g["log_spread"]
        far = 0.5e-6 * (g["intercept"] ** 2 + g["slope"] ** 2 + g["level"] ** 2)
        prior = far + 0.02 * (g["log_spread"] ** 2 + g["log_noise"] ** 2)
        return (line + seen + own - local["log_sd"]).sum() + shard["fraction"] * prior


def errors_in_variables(seed, n=3_000):
    rng = np.random.default_rng(5_000 + seed)
    x = 500 + 40 * rng.standard_normal(n)
    y = 3 + 0.02 * x + 0.3 * rng.standard_normal(n)
    return Case(ErrorsInVariables(), in_shards(60, x=x + 5 * rng.standard_normal(n), y=y))


class Choices:
    """Multinomial logistic with effects of a group on every choice but the first; a bound of E logsumexp."""

    def __init__(self, p, choices):
        self.shape = p, choices - 1

    def init_global(self, key):
        return {"beta": jnp.zeros(self.shape), "log_sd": jnp.zeros(self.shape), "log_tau": jnp.zeros(self.shape[1])}

    def init_local(self, key, shard):
        shape = shard["y"].shape[0], self.shape[1]
        return {"mean": jnp.zeros(shape), "log_sd": jnp.zeros(shape)}

    def loss(self, local, g, shard):
        mean = shard["x"] @ g["beta"] + local["mean"][:, None]
        var = shard["x"] ** 2 @ jnp.exp(2 * g["log_sd"]) + jnp.exp(2 * local["log_sd"])[:, None]
        chosen = jax.nn.one_hot(shard["y"].astype(int), self.shape[1] + 1, dtype=mean.dtype)[..., 1:]
        rows = jnp.logaddexp(0.0, jax.nn.logsumexp(mean + var / 2, axis=-1)) - (chosen * mean).sum(-1)
        effects = kl_normal(local["mean"], local["log_sd"], jnp.exp(g["log_tau"])).sum()
        prior = kl_normal(g["beta"], g["log_sd"], 100.0).sum() + 0.5 * jnp.sum(g["log_tau"] ** 2)
        return rows.sum() + effects + shard["fraction"] * prior


def choices(seed, groups=500, n=6):
    rng, scales = np.random.default_rng(6_000 + seed), np.array([1, 1, 20, 0.05, 1])
    x = rng.standard_normal((groups, n, 5))
    x[..., 0] = 1
    eta = x @ rng.normal(0, 0.6, (5, 3)) + 0.7 * rng.standard_normal((groups, 1, 3))
    eta = np.concatenate([np.zeros((groups, n, 1)), eta], axis=-1) + rng.gumbel(size=(groups, n, 4))
    return Case(Choices(5, 4), in_shards(50, x=x * scales, y=eta.argmax(-1).astype(float)))


class PoissonFactors:
    """Counts ~ Poisson(theta beta), both exponential a priori and log-normal in q; a bound of E log by its means."""

    def __init__(self, columns, factors):
        self.columns, self.factors = columns, factors

    def init_global(self, key):
        shape = self.factors, self.columns
        return {"mean": 0.1 * jax.random.normal(key, shape), "log_sd": jnp.full(shape, -1.0)}

    def init_local(self, key, shard):
        shape = shard["y"].shape[0], self.factors
        return {"mean": jnp.zeros(shape), "log_sd": jnp.full(shape, -1.0)}

    def loss(self, local, g, shard):
        theta, beta = (jnp.exp(q["mean"] + 0.5 * jnp.exp(2 * q["log_sd"])) for q in (local, g))
        log_rate = jax.nn.logsumexp(local["mean"][:, :, None] + g["mean"], axis=1)

        def kl(q, expected):
            return (expected - q["mean"] - q["log_sd"]).sum()

        return (theta @ beta - shard["y"] * log_rate).sum() + kl(local, theta) + shard["fraction"] * kl(g, beta)


def poisson_factors(seed, rows=1_000):
    rng = np.random.default_rng(7_000 + seed)
    rates = rng.gamma(1, 1, (rows, 3)) @ rng.gamma(0.5, 2, (3, 25))
    return Case(PoissonFactors(25, 3), in_shards(50, y=rng.poisson(rates).astype(float)))


class BetaBinomial(Grouped):
    """How many of twenty, with a probability of its own every time: saturates, and has poor local optima."""

    def rows(self, mean, var, g, shard):
        y = shard["y"][..., None]

        def surprise(eta):
            a, b = (jnp.exp(g["log_s"]) * jax.nn.sigmoid(sign * eta) + 1e-6 for sign in (1, -1))
            return betaln(a, b) - betaln(y + a, 20 - y + b)

        return expected(surprise, mean, var)


def beta_binomial(seed):
    rng, x, eta = grouped_data(8_000 + seed, [1, 1e3, 1e-2], n=5)
    p = 1 / (1 + np.exp(-eta))
    y = rng.binomial(20, rng.beta(8 * p + 1e-3, 8 * (1 - p) + 1e-3))
    return Case(BetaBinomial(3, log_s=0.0), in_shards(60, x=x, y=y.astype(float)))


UNSEEN = {
    "unseen: Student's t, 0.001 to 1,000": robust_groups,
    "unseen: negative binomial": overdispersed,
    "unseen: Weibull with frailties": frailty,
    "unseen: item response": item_response,
    "unseen: noisy series": noisy_series,
    "unseen: ordered answers, 0.01 to 100": ordinal,
    "unseen: errors in variables": errors_in_variables,
    "unseen: multinomial, 0.05 to 20": choices,
    "unseen: Poisson factors": poisson_factors,
    "unseen: beta-binomial, 0.01 to 1,000": beta_binomial,
}
