"""The Gaussian mixture, with or without a graph: everything that is estimated is a block of the global parameters.

    x_i | z_i = k, s(i) = s ~ N(c_k + b_s, P_k^-1),   c_k ~ N(xi, s1^2),   b_s ~ N(0, s2^2),   z_i ~ Cat(pi)
    q(z_i) = Cat(phi_i),   q(c_kj) = N(mean_kj, exp log_var_kj),   q(b_sj) = N(offset_sj, exp offset_log_var_sj)

The precision P and the log weights log pi are point estimates with weak priors. On a graph of edge weights r the labels
are a Potts field, p(z) prop. to exp(sum_{(i,l)} r_il 1[z_i = z_l]), each undirected edge once; log Z is left out.

Every global step is closed: means and offsets by linear equations, log variances by the Wright omega function, log
weights by the same, and the precision by one eigendecomposition. The stationarity condition of a matrix block,

    -(n/2) P^-1 + S/2 + mu + D (P - P0) = 0,

says that P and A = S/2 + mu - D P0 have the same eigenvectors, and each eigenvalue solves a quadratic equation (as in
the graphical lasso: Boyd et al. 2011, section 6.5). It needs one penalty D for the whole matrix, and with a tied or
full precision one penalty for all features of a mean; `MixtureModel.curvature` gives such numbers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy

from pdvi._base.types import Array, Globals, Shard
from pdvi.core.model import Augmentation, registered
from pdvi.models.closed_forms import (
    PRIOR_COUNT,
    damp,
    log_det,
    log_variance,
    masked,
    neighbor_sum,
    positive_root,
    probabilities,
    safe_log,
    weight_loss,
    weight_step,
)

ABSENT = -1e9  # log weight of a component that is padding: fits with several numbers of components are then one program
COVARIANCES = ("diagonal", "tied", "diag", "spherical", "full")
OWN_COVARIANCES = ("diag", "spherical", "full")  # each component has its own
MATRICES = ("tied", "full")
PRIOR_ROWS = 1.0  # rows that the prior of a precision counts as
MAX_PRECISION = 100.0  # over that of the start: of noise that vanishes (one-hot rows) only rounding would be left


class MixtureStatistics(NamedTuple):
    """Sums over the rows of a shard that determine the globals; the sums of two shards are those of their union."""

    mass: Array  # N_k = sum_i phi_ik
    total: Array  # T_k = sum_i phi_ik x_i
    square: Array  # second moments of the rows: of all, or of every component that has a precision of its own
    fraction: Array  # w, the fraction of all rows and so of the priors
    sample_mass: Any = None  # N_sk, rows of every sample in every component
    sample_rows: Any = None  # n_s, rows of every sample
    sample_total: Any = None  # T_s, the sum of every sample's rows


@registered
class MixtureModel(eqx.Module):
    """Hyper-parameters, and the mathematics of one shard.

    A shard has rows ``x``, its ``fraction`` of all rows, the second moments ``square`` of its rows if components share
    a precision, ``mask`` with the weights of rows (0 for padding), ``sample`` (whole numbers) if there are offsets, and
    on a graph a padded neighbor table, ``table`` and ``weight``, both (degree, rows). All arrays may change without
    recompilation.

    All spots of a shard are updated at once from their neighbors' old values. With damping s,

        phi_i  prop. to  exp( (logits_i + sum_l r_il phi_l + s log phi_i) / (1 + s) ),

    a sweep changes F by at most - (1 + 2 s) |d|^2 - 1/2 d' R d, where d is the change of phi, so that
    s >= -lambda_min(R) / 4 - 1/2 never lets F rise. A ``temperature`` T divides the logits: F has T times the entropy.
    """

    start: Array  # component means to start from, (K, d)
    prior_mean: Array  # xi, (d,)
    prior_variance: Array  # s1^2, (d,); the same for all features if the precision is a matrix
    precision: Array  # to start from, or fixed; (d,), (d, d), (K, d), (K,) or (K, d, d)
    log_weight: Array  # to start from, or fixed, (K,); `ABSENT` for padding
    n_rows: Array  # the weight of all rows
    log_scale: Array  # log |det| of the map that whitened the rows; 0 if none did
    temperature: Array
    damping: Array
    offset_variance: Any = None  # s2^2, (samples,); None: no offsets
    added_variance: Any = None  # a covariance that every row has besides, (d, d); None: none
    frame_mean: Any = None  # with "full": component k's rows are seen as frame_k (x - frame_mean_k), (K, d)
    frame: Any = None  # (K, d, d)
    covariance: str = eqx.field(default="diagonal", static=True)
    learn_precision: bool = eqx.field(default=False, static=True)
    learn_weight: bool = eqx.field(default=False, static=True)
    passes: int = eqx.field(default=1, static=True)  # over the blocks in a global step

    @property
    def present(self) -> Array:
        """Whether each component is one, and no padding."""
        return self.log_weight > 0.5 * ABSENT

    def init_global(self, key: Array) -> Globals:
        """Return the starting means, with the variances they would have at equal weights, and the other blocks."""
        diagonal = self._diagonal(self.precision)
        precision = self.n_rows / self.present.sum() * diagonal + 1 / self.prior_variance
        globals_ = {"mean": self.start, "log_var": jnp.broadcast_to(-jnp.log(precision), self.start.shape)}
        if self.learn_precision:
            globals_["precision"] = self.precision
        if self.learn_weight:
            globals_["log_weight"] = jnp.where(self.present, self.log_weight, 0.0)
        if self.offset_variance is not None:
            shape = len(self.offset_variance), self.start.shape[1]
            own = self.n_rows / shape[0] * diagonal + 1 / self.offset_variance[:, None]
            globals_["offset"] = jnp.zeros(shape, self.start.dtype)
            globals_["offset_log_var"] = jnp.broadcast_to(-jnp.log(own), shape)
        return globals_

    def init_local(self, key: Array, shard: Shard) -> Any:
        """Return equal probabilities."""
        equal = self.present / self.present.sum()
        return masked(jnp.broadcast_to(equal, (len(shard["x"]), len(equal))), shard)

    # -------------------------------------------------------------------------------------------------- the loss

    def loss(self, local: Any, globals_: Globals, shard: Shard) -> Array:
        """Return the shard's fraction of the negative ELBO, without log Z."""
        phi = local[: len(shard["x"])]
        entropy = self.temperature * jnp.sum(xlogy(phi, phi))
        if "mask" in shard:  # a row of weight w is w rows with the same responsibilities
            weight = shard["mask"]
            entropy -= self.temperature * jnp.sum(xlogy(weight, weight))
        if "table" in shard:
            entropy -= 0.5 * jnp.sum(phi * neighbor_sum(local, shard))
        return entropy + self.expected_loss(globals_, self.statistics(local, shard))

    def expected_loss(self, globals_: Globals, statistics: MixtureStatistics) -> Array:
        """Return the part of the negative ELBO that the globals have, from the statistics of the locals."""
        precision, d = globals_.get("precision", self.precision), self.start.shape[1]
        log_det, by_component = self._log_det(precision), self.covariance in OWN_COVARIANCES
        per_row = self._log_weight_of(globals_)
        if by_component:
            per_row = per_row + 0.5 * log_det
        if self.frame is not None:
            per_row = per_row + jnp.linalg.slogdet(self.frame)[1]
        own = 0.5 * jnp.sum(precision * self._scatter(globals_, statistics)) - jnp.sum(statistics.mass * per_row)
        # what depends on the globals alone, of which every shard has its fraction: constants, divergences and priors
        shared = 0.5 * self.n_rows * (d * math.log(2 * math.pi) - 2 * self.log_scale)
        for mean, log_var, prior_mean, prior_variance in self._normal_blocks():
            square = (globals_[mean] - prior_mean) ** 2 + jnp.exp(globals_[log_var])
            shared += 0.5 * jnp.sum(square / prior_variance - 1 + jnp.log(prior_variance) - globals_[log_var])
        if not by_component:
            shared -= 0.5 * self.n_rows * jnp.sum(log_det)
        if self.learn_precision:  # a few rows with the covariance of the start: 0 where the precision is that
            if self.covariance not in MATRICES:
                log_det = log_det - self._log_det(self.precision)
            size = d * (len(self.start) if by_component else 1)
            traces = jnp.sum(self._prior_scatter() * precision)
            shared += 0.5 * PRIOR_ROWS * (traces - jnp.sum(log_det) - size)
        if self.learn_weight:
            shared += weight_loss(globals_["log_weight"], self.present, self.n_rows)
        return own + statistics.fraction * shared

    def logits(self, globals_: Globals, shard: Shard) -> Array:
        """Return E_q log p(x_i, z_i = k), without what is the same for all components of a row."""
        x, mean, variance = shard["x"], globals_["mean"], jnp.exp(globals_["log_var"])
        precision, log_weight = globals_.get("precision", self.precision), self._log_weight_of(globals_)
        diagonal = jnp.broadcast_to(self._diagonal(precision), mean.shape)
        if self.offset_variance is not None:
            x = x - globals_["offset"][shard["sample"]]
        if self.covariance == "full":
            log_det = jnp.linalg.slogdet(precision)[1] + 2 * jnp.linalg.slogdet(self.frame)[1]
            residual = self._seen(x) - mean[:, None]
            squared = jnp.sum((residual @ precision) * residual, axis=-1).T
            found = log_weight + 0.5 * (log_det - jnp.sum(diagonal * variance, axis=1)) - 0.5 * squared
        else:
            scaled = mean @ precision if self.covariance == "tied" else mean * diagonal
            found = x @ scaled.T + (log_weight - 0.5 * jnp.sum(mean * scaled + diagonal * variance, axis=1))
            if self.covariance in ("diag", "spherical"):
                found += 0.5 * jnp.sum(jnp.log(diagonal), axis=1) - 0.5 * (x * x) @ diagonal.T
        if self.added_variance is not None and self.covariance in OWN_COVARIANCES:
            own = (precision if self.covariance == "full" else diagonal) * self._added()
            found -= 0.5 * own.reshape(len(mean), -1).sum(1)
        return found

    # ------------------------------------------------------------------------------------------------- the steps

    def local_step(self, local: Any, globals_: Globals, shard: Shard) -> Any:
        """Return the responsibilities, on a graph after one damped sweep over the shard's spots, all at once."""
        logits = self.logits(globals_, shard)
        if "table" in shard:
            logits = neighbor_sum(local, shard, logits)
            logits = damp(logits / self.temperature, local[: len(logits)], self.damping)
        else:
            logits = logits / self.temperature
        return masked(jax.nn.softmax(logits, axis=1), shard)

    def statistics(self, local: Any, shard: Shard) -> MixtureStatistics:
        """Return masses, sums and second moments."""
        x, phi = shard["x"], local[: len(shard["x"])]
        mass, samples = phi.sum(0), []
        if self.covariance == "full":
            seen = self._seen(x)
            weighted = phi.T[:, :, None] * seen
            return MixtureStatistics(mass, weighted.sum(1), weighted.mT @ seen, shard["fraction"])
        if self.covariance in OWN_COVARIANCES:
            return MixtureStatistics(mass, phi.T @ x, phi.T @ (x * x), shard["fraction"])
        if self.offset_variance is not None:
            weight = shard["mask"] if "mask" in shard else jnp.ones(len(x), x.dtype)
            by_row = phi, weight, weight[:, None] * x
            samples = [jax.ops.segment_sum(part, shard["sample"], len(self.offset_variance)) for part in by_row]
        return MixtureStatistics(mass, phi.T @ x, shard["square"], shard["fraction"], *samples)

    def global_step(self, statistics: MixtureStatistics, augmentation: Augmentation) -> Globals:
        """Return the globals after ``passes`` over the blocks from ``augmentation.centre``.

        The precision comes first, for the means so far; the other blocks are then exact minimizers given it. Where the
        precision is fixed one pass is exact. At a fixed point of Algorithm 1 any number of passes is.
        """
        globals_ = dict(augmentation.centre)
        if self.passes == 1 or not self.learn_precision:
            return self._pass(globals_, statistics, augmentation)
        return jax.lax.fori_loop(0, self.passes, lambda _, g: self._pass(g, statistics, augmentation), globals_)

    def _pass(self, globals_: Globals, statistics: MixtureStatistics, augmentation: Augmentation) -> Globals:
        """Minimize over one block after the other."""
        centre, dual, penalty = augmentation
        w, matrix = statistics.fraction, self.covariance in MATRICES
        precision, values, vectors = globals_.get("precision", self.precision), None, None
        if self.learn_precision:
            D, rows = penalty["precision"], self._rows_of(statistics)
            if matrix:
                D = D.mean((-2, -1), keepdims=True)
            scatter = self._scatter(globals_, statistics) + w * PRIOR_ROWS * self._prior_scatter()
            gradient = 0.5 * scatter + dual["precision"] - D * centre["precision"]
            if matrix:
                values, vectors = jnp.linalg.eigh(0.5 * (gradient + gradient.mT))
                values = jnp.minimum(positive_root(values, D[..., 0], rows[..., None]), MAX_PRECISION)
                precision = (vectors * values[..., None, :]) @ vectors.mT
            else:
                precision = jnp.minimum(positive_root(gradient, D, rows), MAX_PRECISION * self.precision)
            globals_ = {**globals_, "precision": precision}
        elif matrix:
            values, vectors = jnp.linalg.eigh(precision)
        diagonal = self._diagonal(precision)
        found = self._mean_step(statistics, augmentation, diagonal if values is None else values, vectors)
        mass, parts = statistics.mass, (part["log_var"] for part in augmentation)
        found["log_var"] = log_variance(0.5 * (mass[:, None] * diagonal + w / self.prior_variance), 0.5 * w, *parts)
        if self.offset_variance is not None:
            curvature = 0.5 * (statistics.sample_rows[:, None] * diagonal + w / self.offset_variance[:, None])
            parts = (part["offset_log_var"] for part in augmentation)
            found["offset_log_var"] = log_variance(curvature, 0.5 * w, *parts)
        if self.learn_weight:
            parts = (part["log_weight"] for part in augmentation)
            found["log_weight"] = weight_step(mass, self.present, self.n_rows, w, *parts)
        return {**globals_, **found}

    def _mean_step(
        self, statistics: MixtureStatistics, augmentation: Augmentation, values: Array, vectors: Array | None
    ) -> Globals:
        """The means given the precision, and with samples the offsets: exact, in the basis where it is diagonal."""
        centre, dual, penalty = augmentation
        w = statistics.fraction

        def turned(part: Array, vectors: Array | None) -> Array:
            if vectors is None:
                return part
            return jnp.einsum("kd,kde->ke" if vectors.ndim == 3 else "kd,de->ke", part, vectors)

        def normal_equation(name: str, prior_mean: Any, prior: Array, mass: Array, total: Array) -> tuple[Array, Array]:
            """The curvature in a block, and the linear term, both in the basis."""
            D = penalty[name]
            if vectors is not None:  # one penalty and one prior for all features
                D, prior = D.mean(1, keepdims=True), prior.mean(-1, keepdims=True)
            pull = turned(prior * prior_mean + D * centre[name] - dual[name], vectors)
            return mass[:, None] * values + prior + D, values * turned(total, vectors) + pull

        back = None if vectors is None else vectors.mT
        prior = w / self.prior_variance
        curvature, pull = normal_equation("mean", self.prior_mean, prior, statistics.mass, statistics.total)
        if self.offset_variance is None:
            return {"mean": turned(pull / curvature, back)}
        by_sample, prior = statistics.sample_mass, w / self.offset_variance[:, None]
        sample_curvature, sample_pull = normal_equation(
            "offset", 0.0, prior, statistics.sample_rows, statistics.sample_total
        )

        # offsets are eliminated: what is left has as many unknowns as there are components, for every feature
        def means(precision: Array, curvature: Array, pull: Array, own: Array, own_pull: Array) -> Array:
            coupled = precision * by_sample
            matrix = jnp.diag(curvature) - coupled.T @ (coupled / own[:, None])
            return jnp.linalg.solve(matrix, pull - coupled.T @ (own_pull / own))

        mean = jax.vmap(means, in_axes=(0, 1, 1, 1, 1), out_axes=1)(
            values, curvature, pull, sample_curvature, sample_pull
        )
        offset = (sample_pull - values * (by_sample @ mean)) / sample_curvature
        return {"mean": turned(mean, back), "offset": turned(offset, back)}

    def curvature(self, local: Array, globals_: Globals, shard: Shard) -> Globals:
        """Return the curvature of every block for these responsibilities; one number for every matrix and its means."""
        statistics, shape, matrix = self.statistics(local, shard), self.start.shape, self.covariance in MATRICES
        w, precision = statistics.fraction, globals_.get("precision", self.precision)
        diagonal = size = jnp.abs(self._diagonal(precision))
        if matrix:
            size = diagonal.mean(-1, keepdims=True)
        mean = statistics.mass[:, None] * size + w / self.prior_variance
        found = {"mean": jnp.broadcast_to(mean, shape), "log_var": jnp.broadcast_to(0.5 * w, shape)}
        if self.learn_precision:
            value, rows = 1 / precision**2, self._rows_of(statistics)
            if matrix:  # the mean of 1 / (P_ii P_jj) over the matrix
                value = jnp.square((1 / diagonal).mean(-1))[..., None, None]
                rows = rows[..., None, None]
            found["precision"] = jnp.broadcast_to(0.5 * rows * value, self.precision.shape)
        if self.learn_weight:
            prior = w * PRIOR_COUNT
            found["log_weight"] = jnp.where(self.present, statistics.mass + prior, prior)
        if self.offset_variance is not None:
            offsets = len(self.offset_variance), shape[1]
            own = statistics.sample_rows[:, None] * size + w / self.offset_variance[:, None]
            found["offset"] = jnp.broadcast_to(own, offsets)
            found["offset_log_var"] = jnp.broadcast_to(0.5 * w, offsets)
        return found

    # ----------------------------------------------------------------------------- exponential families, for SVI

    def natural(self, globals_: Globals) -> Globals:
        """Return natural parameters of q; of the point estimates the covariance and the weights, as in online EM."""
        found = dict(globals_)
        for mean, log_var, *_ in self._normal_blocks():
            precision = jnp.exp(-globals_[log_var])
            found[mean], found[log_var] = precision * globals_[mean], precision
        if self.learn_precision:
            found["precision"] = self._inverse(globals_["precision"])
        if self.learn_weight:
            found["log_weight"] = jnp.exp(globals_["log_weight"])
        return found

    def from_natural(self, natural: Globals) -> Globals:
        """Return the inverse of `natural`."""
        found = dict(natural)
        for mean, log_var, *_ in self._normal_blocks():
            found[mean], found[log_var] = natural[mean] / natural[log_var], -jnp.log(natural[log_var])
        if self.learn_precision:
            found["precision"] = self._inverse(natural["precision"])
        if self.learn_weight:
            found["log_weight"] = jnp.log(natural["log_weight"])
        return found

    def natural_gradient(self, globals_: Globals, gradient: Globals) -> Globals:
        """Return the gradient in the expectation parameters that belong to `natural`."""
        found = dict(gradient)
        for mean, log_var, *_ in self._normal_blocks():
            by_variance = gradient[log_var] * jnp.exp(-globals_[log_var])
            found[mean], found[log_var] = gradient[mean] - 2 * globals_[mean] * by_variance, -2 * by_variance
        if self.learn_precision:
            rows = self.n_rows / (self.present.sum() if self.covariance in OWN_COVARIANCES else 1)
            size = self.start.shape[1] if self.covariance == "spherical" else 1
            found["precision"] = -2 * gradient["precision"] / ((rows + PRIOR_ROWS) * size)
        if self.learn_weight:
            found["log_weight"] = gradient["log_weight"] / (self.n_rows + PRIOR_COUNT * self.present.sum())
        return found

    def to_unconstrained(self, local: Array) -> Array:
        """Return responsibilities as logits."""
        return safe_log(local)

    def from_unconstrained(self, x: Array, shard: Shard) -> Array:
        """Return the inverse of `to_unconstrained`."""
        return probabilities(x, shard)

    # ------------------------------------------------------------------------------------------------- pieces

    def _normal_blocks(self) -> list[tuple[str, str, Any, Any]]:
        """Names of means and log variances, and mean and variance of their prior."""
        blocks: list[tuple[str, str, Any, Any]] = [("mean", "log_var", self.prior_mean, self.prior_variance)]
        if self.offset_variance is not None:
            blocks.append(("offset", "offset_log_var", 0.0, self.offset_variance[:, None]))
        return blocks

    def _seen(self, x: Array) -> Array:
        """The rows in the frame of every component, (K, rows, d)."""
        return (x - self.frame_mean[:, None]) @ self.frame.mT

    def _log_weight_of(self, globals_: Globals) -> Array:
        if not self.learn_weight:
            return self.log_weight
        return jnp.where(self.present, globals_["log_weight"], ABSENT)

    def _diagonal(self, precision: Array) -> Array:
        """The diagonal of every component's precision, in a shape that broadcasts to (K, d)."""
        if self.covariance in MATRICES:
            return jnp.diagonal(precision, axis1=-2, axis2=-1)
        return precision[:, None] if self.covariance == "spherical" else precision

    def _log_det(self, precision: Array) -> Array:
        if self.covariance in MATRICES:
            return log_det(precision)
        if self.covariance == "spherical":
            return self.start.shape[1] * jnp.log(precision)
        return jnp.log(precision).sum(-1)

    def _inverse(self, precision: Array) -> Array:
        return jnp.linalg.inv(precision) if self.covariance in MATRICES else 1 / precision

    def _rows_of(self, statistics: MixtureStatistics) -> Array:
        """How many rows, those of the prior included, entries of the precision are estimated from."""
        prior = statistics.fraction * PRIOR_ROWS
        if self.covariance not in OWN_COVARIANCES:
            return statistics.fraction * self.n_rows + prior
        rows = statistics.mass + prior
        if self.covariance == "spherical":
            return rows * self.start.shape[1]
        return rows[:, None] if self.covariance == "diag" else rows

    def _prior_scatter(self) -> Array:
        """The scatter of one row of the prior: 1 over the precision of the start, which is 1 in whitened rows."""
        if self.covariance in MATRICES:
            return jnp.eye(self.start.shape[1], dtype=self.start.dtype)
        return (self.start.shape[1] if self.covariance == "spherical" else 1) / self.precision

    def _added(self) -> Array:
        """The added variance as the precision has it: a matrix, one for every component's frame, or a diagonal."""
        if self.covariance == "full":
            return self.frame @ self.added_variance @ self.frame.mT
        return self.added_variance if self.covariance == "tied" else jnp.diagonal(self.added_variance)

    def _scatter(self, globals_: Globals, statistics: MixtureStatistics) -> Array:
        """E_q of the summed squares of residuals, in the shape of the precision."""
        mean, variance, mass = globals_["mean"], jnp.exp(globals_["log_var"]), statistics.mass[:, None]
        total, square, spread = statistics.total, statistics.square, mass * variance
        if self.added_variance is not None:
            own = mass[:, :, None] if self.covariance == "full" else mass
            square = square + self._added() * (
                own if self.covariance in OWN_COVARIANCES else statistics.fraction * self.n_rows
            )
        left = total - 0.5 * mass * mean  # of this and the means the products are taken away twice
        if self.covariance == "full":
            both = jnp.einsum("kd,ke->kde", left, mean)
            return square - both - both.mT + jax.vmap(jnp.diag)(spread)
        if self.covariance in ("diag", "spherical"):
            found = square - 2 * left * mean + spread
            return found.sum(1) if self.covariance == "spherical" else found
        spread = spread.sum(0)
        if self.offset_variance is not None:
            offset, rows = globals_["offset"], statistics.sample_rows[:, None]
            spread += jnp.sum(rows * jnp.exp(globals_["offset_log_var"]), axis=0)
            left -= statistics.sample_mass.T @ offset
            left = jnp.concatenate([left, statistics.sample_total - 0.5 * rows * offset])
            mean = jnp.concatenate([mean, offset])
        if self.covariance == "diagonal":
            return square + spread - 2 * jnp.sum(left * mean, axis=0)
        both = left.T @ mean
        return square + jnp.diag(spread) - both - both.T


@registered
class PottsMixtureModel(MixtureModel):
    """The mixture on a graph: labels of a shard read those of others, across shards too."""

    def local_gradient(self, local: Array, globals_: Globals, shard: Shard) -> Array:
        """Return dF / dphi of the shard's own spots: an edge to another patch counts in full, in `loss` half."""
        logits = neighbor_sum(local, shard, self.logits(globals_, shard))
        return self.temperature * (1 + safe_log(local[: len(shard["x"])])) - logits
