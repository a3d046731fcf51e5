"""A mixture of negative binomials: counts of rows that belong to one of K components.

    y_ig | z_i = k ~ NB(mean s_i m_kg, size t_g),    z_i ~ Cat(softmax a),    q(z_i) = Cat(phi_i)

log m, log t and a are estimated, with weak priors that keep them finite where a component has no counts of a column or
no rows, or a column varies no more than Poisson's. q is the exact posterior at the end, and the ELBO the log-likelihood
plus the priors. The size (one over the dispersion) is a column's, the same in all components: one with its own would
take rows that fit nowhere.

What depends on the unknowns is written relative to the best mean of an entry by itself, so that no term is large where
counts are, and single precision suffices:

    log NB = H(y, t) - [ (y + t) log((t + s m) / (t + y)) - y log(s m / y) ] + constant
    H(y, t) = log Gamma(y + t) - log Gamma(t) - (y + t) log(y + t) + t log t + y
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy

from pdvi._base.types import Array, Globals, Shard
from pdvi.core.model import Augmentation, registered
from pdvi.models.closed_forms import probabilities, safe_log

SHIFT = 4  # from where on five terms of Stirling's series leave less than 1e-9
ROUNDS = 10  # Newton steps in a visit, at most
SETTLED = 1e-4  # the largest step after which there is no other: the next would be its square
LONGEST = 1.0  # step, all parameters being logarithms: up to here third derivatives do not outgrow the second ones


@registered
class CountMixtureModel(eqx.Module):
    """Hyper-parameters, and the mathematics of one shard.

    A shard has counts ``y``, the ``size_factor`` of every row, a ``mask`` (0: padding), its ``fraction`` of all rows,
    and ``constant``, the sum of log y! - y log y + y.
    """

    log_mean: Array  # log m to start from, (K, G)
    log_size: Array  # log t to start from, (G,)
    log_weight: Array  # a to start from, (K,)
    prior_mean: Array  # of a column, in all components: (G,)
    mean_strength: float = 0.1  # counts that the prior of a mean is worth
    size_spread: float = 3.0  # standard deviation of log t around 0
    weight_strength: float = 1.0  # rows of every component that the prior of the weights is worth

    def init_global(self, key: Array) -> Globals:
        """Return the start."""
        return {"log_mean": self.log_mean, "log_size": self.log_size, "log_weight": self.log_weight}

    def init_local(self, key: Array, shard: Shard) -> Array:
        """Return equal probabilities."""
        n_components = self.log_mean.shape[0]
        return jnp.full((shard["y"].shape[0], n_components), 1 / n_components) * shard["mask"][:, None]

    def independent_rows(self) -> bool:
        """Return that rows meet in the globals only."""
        return True

    def loss(self, local: Array, globals_: Globals, shard: Shard) -> Array:
        """Return the shard's share of the negative ELBO, the priors of means and sizes included."""
        log_m, log_t = globals_["log_mean"], globals_["log_size"]
        value = jnp.sum(xlogy(local, local)) - self._members(local, shard) @ jax.nn.log_softmax(globals_["log_weight"])
        value += jax.vmap(lambda p, log_m: jnp.sum(p[:, None] * _distance(log_m, log_t, shard)))(local.T, log_m).sum()
        value -= jnp.sum(shard["mask"][:, None] * size_term(shard["y"], log_t))
        relative = log_m - jnp.log(self.prior_mean)
        prior = self.mean_strength * jnp.sum(jnp.exp(relative) - relative - 1)
        prior += 0.5 * jnp.sum((log_t / self.size_spread) ** 2)
        return value + shard["fraction"] * prior + shard["constant"]

    def logits(self, globals_: Globals, shard: Shard) -> Array:
        """Return log p(y_i, z_i = k) without the part that is the same for all k."""
        fit = jax.vmap(lambda log_m: _distance(log_m, globals_["log_size"], shard).sum(1), out_axes=1)
        return jax.nn.log_softmax(globals_["log_weight"]) - fit(globals_["log_mean"])

    def local_step(self, local: Array, globals_: Globals, shard: Shard) -> Array:
        """Return the responsibilities."""
        return jax.nn.softmax(self.logits(globals_, shard), axis=1) * shard["mask"][:, None]

    def improve_globals(self, local: Array, globals_: Globals, shard: Shard, augmentation: Augmentation) -> Globals:
        """Return the globals after Newton steps, on each mean, on each size, and on the weights.

        For fixed responsibilities no two means meet, nor two sizes, and a mean and its size are orthogonal in
        expectation.
        """
        centre, dual, penalty = augmentation
        members = self._members(local, shard)

        def newton(carry: tuple[Array, Globals, Array]) -> tuple[Array, Globals, Array]:
            count, at, _ = carry
            pi = jax.nn.softmax(at["log_weight"])
            by_mean, by_size = self._derivatives(at["log_mean"], at["log_size"], local, shard)
            by_weight = members.sum() * pi - members, members.sum() * pi
            step = {}
            for name, (slope, bend) in (("log_mean", by_mean), ("log_size", by_size), ("log_weight", by_weight)):
                stiff = jnp.abs(bend) + penalty[name]
                step[name] = -(slope + dual[name] + penalty[name] * (at[name] - centre[name])) / stiff
            # the Hessian of the weights is diagonal minus rank one
            stiff = by_weight[1] + penalty["log_weight"]
            pull = by_weight[1] @ step["log_weight"] / (1 - by_weight[1] @ (pi / stiff))
            step["log_weight"] += pull * pi / stiff
            step = jax.tree.map(lambda move: jnp.clip(move, -LONGEST, LONGEST), step)
            longest = jnp.stack([jnp.abs(move).max() for move in step.values()]).max()
            return count + 1, jax.tree.map(jnp.add, at, step), longest

        def unfinished(carry: tuple[Array, Globals, Array]) -> Array:
            return (carry[0] < ROUNDS) & (carry[2] > SETTLED)

        first = jnp.asarray(0), globals_, jnp.asarray(jnp.inf, members.dtype)
        return jax.lax.while_loop(unfinished, newton, first)[1]

    def curvature(self, local: Array, globals_: Globals, shard: Shard) -> Globals:
        """Return the sizes of the Hessian's diagonal for these responsibilities."""
        by_mean, by_size = self._derivatives(globals_["log_mean"], globals_["log_size"], local, shard)
        pi = jax.nn.softmax(globals_["log_weight"])
        # positive for one component too, whose weight nothing depends on
        weights = self._members(local, shard).sum() * pi * (1.001 - pi)
        return {"log_mean": jnp.abs(by_mean[1]), "log_size": jnp.abs(by_size[1]), "log_weight": weights}

    def to_unconstrained(self, local: Array) -> Array:
        """Return responsibilities as logits."""
        return safe_log(local)

    def from_unconstrained(self, x: Array, shard: Shard) -> Array:
        """Return the inverse of `to_unconstrained`."""
        return probabilities(x, shard)

    def _members(self, phi: Array, shard: Shard) -> Array:
        """Rows of every component, the prior's included."""
        return phi.sum(0) + shard["fraction"] * self.weight_strength

    def _derivatives(
        self, log_m: Array, log_t: Array, phi: Array, shard: Shard
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """First and second derivatives of the misfit: in every mean, and in every size.

        Written out: automatic ones take several times as long to compile, and the compiler's time is what a user of
        small data waits for.
        """
        y, s, t, w = shard["y"], shard["size_factor"][:, None], jnp.exp(log_t), shard["fraction"]

        def component(p: Array, log_m: Array) -> tuple[Array, Array, Array, Array]:
            mean = s * jnp.exp(log_m)
            off, share = (mean - y) / (t + mean), mean / (t + mean)
            log_ratio = jnp.log1p((mean - y) / (t + y))
            terms = (
                t * off,
                t * (y + t) * share / (t + mean),
                t * (log_ratio - off),
                t * (log_ratio - off * (t / (t + y) + share)),
            )
            slope_m, bend_m, slope_t, bend_t = (jnp.sum(p[:, None] * term, axis=0) for term in terms)
            return slope_m, bend_m, slope_t, bend_t

        def own(log_t: Array) -> Array:
            return jnp.sum(shard["mask"][:, None] * size_term(y, log_t), axis=0)

        def slope(log_t: Array) -> Array:
            return jax.jvp(own, (log_t,), (jnp.ones_like(log_t),))[1]

        slope_m, bend_m, slope_t, bend_t = jax.vmap(component)(phi.T, log_m)
        first, second = jax.jvp(slope, (log_t,), (jnp.ones_like(log_t),))
        relative = w * self.mean_strength * jnp.exp(log_m) / self.prior_mean
        stiff = w / self.size_spread**2
        by_mean = slope_m + relative - w * self.mean_strength, bend_m + relative
        return by_mean, (slope_t.sum(0) - first + stiff * log_t, bend_t.sum(0) - second + stiff)


def _distance(log_m: Array, log_t: Array, shard: Shard) -> Array:
    """Return how much less probable than with their best mean entries are: 0 where y = s m."""
    y, t = shard["y"], jnp.exp(log_t)
    log_mean = log_m + jnp.log(shard["size_factor"])[:, None]
    log_y = jnp.log(jnp.where(y > 0, y, 1.0))
    return (y + t) * jnp.log1p((jnp.exp(log_mean) - y) / (t + y)) - y * (log_mean - log_y)


def size_term(y: Array, log_t: Array) -> Array:
    """Return H(y, t), which grows like log y where its terms grow like y log y.

    Recurrences up to t + 4, and differences of Stirling's series from there, with what is large taken out by hand.
    """
    t = jnp.exp(log_t)
    far = t + SHIFT
    series = (y + t) * jnp.log1p(SHIFT / (y + t)) - t * jnp.log1p(SHIFT / t) + _tail(far + y) - _tail(far)
    steps = [1 + y / (t + step) for step in range(SHIFT)]
    # two by two: the square of a product of all, which slopes divide by, is too large for single precision
    product = sum(jnp.log(steps[j] * steps[j + 1]) for j in range(0, SHIFT, 2))
    return series + (SHIFT - 0.5) * jnp.log1p(y / far) - product


def _tail(x: Array) -> Array:
    v = 1 / x
    s = v * v
    return v * (1 / 12 - s * (1 / 360 - s * (1 / 1260 - s * (1 / 1680 - s / 1188))))
