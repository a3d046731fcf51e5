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
from pdvi.models.closed_forms import damp, log_det, log_variance, neighbor_sum, positive_root

ABSENT = -1e9  # log weight of a component that is padding: fits with several numbers of components are then one program
COVARIANCES = ("diagonal", "tied", "diag", "spherical", "full")
OWN_COVARIANCES = ("diag", "spherical", "full")  # each component has its own
PRIOR_ROWS = 1.0  # rows that the prior of a precision counts as
MAX_PRECISION = 100.0  # over that of the start: of noise that vanishes (one-hot rows) only rounding would be left
PRIOR_COUNT = 1.0  # rows that the prior of the weights gives to every component


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

    # ------------------------------------------------------------------------------------------------- the start

    @property
    def present(self) -> Array:
        """Whether each component is one, and no padding."""
        return self.log_weight > 0.5 * ABSENT

    def init_global(self, key: Array) -> Globals:
        """Return the starting means, with the variances they would have at equal weights, and the other blocks."""
        precision = self.n_rows / self.present.sum() * self._diagonal(self.precision) + 1 / self.prior_variance
        globals_ = {"mean": self.start, "log_var": jnp.broadcast_to(-jnp.log(precision), self.start.shape)}
        if self.learn_precision:
            globals_["precision"] = self.precision
        if self.learn_weight:
            globals_["log_weight"] = jnp.where(self.present, self.log_weight, 0.0)
        if self.offset_variance is not None:
            n_samples, d = len(self.offset_variance), self.start.shape[1]
            own = self.n_rows / n_samples * self._diagonal(self.precision) + 1 / self.offset_variance[:, None]
            globals_["offset"] = jnp.zeros((n_samples, d), self.start.dtype)
            globals_["offset_log_var"] = jnp.broadcast_to(-jnp.log(own), (n_samples, d))
        return globals_

    def init_local(self, key: Array, shard: Shard) -> Any:
        """Return the probabilities ``init`` of the shard, or equal ones."""
        if "init" in shard:
            return _masked(shard["init"], shard)
        equal = self.present / self.present.sum()
        return _masked(jnp.broadcast_to(equal, (len(shard["x"]), len(equal))), shard)

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
        precision = self._precision_of(globals_)
        per_row = self._log_weight_of(globals_)
        if self.covariance in OWN_COVARIANCES:
            per_row = per_row + 0.5 * self._log_det(precision)
        if self.frame is not None:
            per_row = per_row + jnp.linalg.slogdet(self.frame)[1]
        scatter = self._scatter(globals_, statistics)
        own = 0.5 * jnp.sum(precision * scatter) - jnp.sum(statistics.mass * per_row)
        return own + statistics.fraction * self._shared_loss(globals_)

    def _shared_loss(self, globals_: Globals) -> Array:
        """The part that depends on the globals alone, of which every shard has its fraction: constants and priors."""
        precision, d = self._precision_of(globals_), self.start.shape[1]
        log_det = self._log_det(precision)
        value = self._divergence(globals_) + 0.5 * self.n_rows * (d * math.log(2 * math.pi) - 2 * self.log_scale)
        if self.covariance not in OWN_COVARIANCES:
            value -= 0.5 * self.n_rows * jnp.sum(log_det)
        if self.learn_precision:  # a few rows with the covariance of the start: 0 where the precision is that
            if self.covariance not in ("tied", "full"):
                log_det = log_det - self._log_det(self.precision)
            size = d * (len(self.start) if self.covariance in OWN_COVARIANCES else 1)
            traces = jnp.sum(self._prior_scatter() * precision)
            value += 0.5 * PRIOR_ROWS * (traces - jnp.sum(log_det) - size)
        if self.learn_weight:  # log sum exp <= sum exp - 1: separable, and tight where the weights add up to 1
            eta, n_present = globals_["log_weight"], self.present.sum()
            total = self.n_rows + PRIOR_COUNT * n_present
            value += total * (jnp.sum(self.present * jnp.exp(eta)) - 1)
            value -= PRIOR_COUNT * jnp.sum(self.present * (eta + jnp.log(n_present)))  # 0 where weights are equal
        return value

    def logits(self, globals_: Globals, shard: Shard) -> Array:
        """Return E_q log p(x_i, z_i = k), without what is the same for all components of a row."""
        found = self._normal_logits(globals_, shard)
        if self.added_variance is None or self.covariance not in OWN_COVARIANCES:
            return found
        own = self._precision_of(globals_) * self._added()
        return found - 0.5 * own.reshape(len(self.start), -1).sum(1)

    def _normal_logits(self, globals_: Globals, shard: Shard) -> Array:
        """The same without the added variance."""
        x, mean, variance = shard["x"], globals_["mean"], jnp.exp(globals_["log_var"])
        precision = self._precision_of(globals_)
        if self.offset_variance is not None:
            x = x - globals_["offset"][shard["sample"]]
        log_weight = self._log_weight_of(globals_)
        if self.covariance == "full":
            log_det = jnp.linalg.slogdet(precision)[1] + 2 * jnp.linalg.slogdet(self.frame)[1]
            spread = jnp.sum(self._diagonal(precision) * variance, axis=1)
            residual = self._seen(x) - mean[:, None]
            squared = jnp.sum((residual @ precision) * residual, axis=-1).T
            return log_weight + 0.5 * (log_det - spread) - 0.5 * squared
        if self.covariance == "tied":
            scaled = mean @ precision
            norm = jnp.sum(mean * scaled + jnp.diagonal(precision) * variance, axis=1)
            return x @ scaled.T + (log_weight - 0.5 * norm)
        diagonal = jnp.broadcast_to(self._diagonal(precision), mean.shape)
        scaled = mean * diagonal
        norm = jnp.sum(mean * scaled + diagonal * variance, axis=1)
        own = x @ scaled.T + (log_weight - 0.5 * norm)
        if self.covariance == "diagonal":
            return own
        return own - 0.5 * (x * x) @ diagonal.T + 0.5 * jnp.sum(jnp.log(diagonal), axis=1)

    # ------------------------------------------------------------------------------------------------- the steps

    def local_step(self, local: Any, globals_: Globals, shard: Shard) -> Any:
        """Return the responsibilities, on a graph after one damped sweep over the shard's spots, all at once."""
        logits = self.logits(globals_, shard)
        if "table" in shard:
            logits = neighbor_sum(local, shard, logits)
            logits = damp(logits / self.temperature, local[: len(logits)], self.damping)
        else:
            logits = logits / self.temperature
        return _masked(jax.nn.softmax(logits, axis=1), shard)

    def statistics(self, local: Any, shard: Shard) -> MixtureStatistics:
        """Return masses, sums and second moments."""
        return self.statistics_of(local[: len(shard["x"])], shard)

    def statistics_of(self, phi: Array, shard: Shard) -> MixtureStatistics:
        """Return the statistics of given responsibilities."""
        x, mass = shard["x"], phi.sum(0)
        samples: tuple[Any, ...] = ()
        if self.offset_variance is not None:
            sample, n_samples = shard["sample"], len(self.offset_variance)
            weight = shard["mask"] if "mask" in shard else jnp.ones(len(x), x.dtype)
            samples = (
                jax.ops.segment_sum(phi, sample, n_samples),
                jax.ops.segment_sum(weight, sample, n_samples),
                jax.ops.segment_sum(weight[:, None] * x, sample, n_samples),
            )
        if self.covariance in ("diagonal", "tied"):
            return MixtureStatistics(mass, phi.T @ x, shard["square"], shard["fraction"], *samples)
        if self.covariance == "full":
            seen = self._seen(x)
            weighted = phi.T[:, :, None] * seen
            return MixtureStatistics(mass, weighted.sum(1), weighted.mT @ seen, shard["fraction"])
        return MixtureStatistics(mass, phi.T @ x, phi.T @ (x * x), shard["fraction"])

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
        globals_, basis = dict(globals_), None
        if self.learn_precision:
            globals_["precision"], basis = self._precision_step(globals_, statistics, augmentation)
        precision = self._precision_of(globals_)
        if self.covariance in ("tied", "full") and basis is None:
            basis = _Basis(*jnp.linalg.eigh(precision))
        globals_ |= self._mean_step(statistics, augmentation, precision, basis)
        diagonal = self._diagonal(precision)
        w, half = statistics.fraction, 0.5 * statistics.fraction
        curvature = 0.5 * (statistics.mass[:, None] * diagonal + w / self.prior_variance)
        parts = (centre["log_var"], dual["log_var"], penalty["log_var"])
        globals_["log_var"] = log_variance(jnp.broadcast_to(curvature, self.start.shape), half, *parts)
        if self.learn_weight:
            mass, prior = statistics.mass, w * PRIOR_COUNT * self.present
            total = jnp.broadcast_to(w * self.n_rows + prior.sum(), mass.shape)
            parts = (centre["log_weight"], dual["log_weight"], penalty["log_weight"])
            eta = log_variance(total, mass + prior, *parts)
            globals_["log_weight"] = jnp.where(self.present, eta, centre["log_weight"])
        return globals_

    def curvature(self, local: Array, globals_: Globals, shard: Shard) -> Globals:
        """Return the curvature of every block for these responsibilities; one number for every matrix and its means."""
        return self.curvature_of(globals_, self.statistics(local, shard))

    def curvature_of(self, globals_: Globals, statistics: MixtureStatistics) -> Globals:
        """Return the curvature of every block for given statistics."""
        w, mass, shape = statistics.fraction, statistics.mass[:, None], self.start.shape
        precision = self._precision_of(globals_)
        diagonal = jnp.abs(self._diagonal(precision))
        if self.covariance in ("tied", "full"):
            diagonal = diagonal.mean(-1, keepdims=True)
        mean = mass * diagonal + w / self.prior_variance
        found = {"mean": jnp.broadcast_to(mean, shape), "log_var": jnp.broadcast_to(0.5 * w, shape)}
        if self.learn_precision:
            rows = self._rows_of(statistics)
            if self.covariance in ("tied", "full"):
                # the mean of n / (2 P_ii P_jj) over the matrix
                value = 0.5 * rows * jnp.square((1 / jnp.abs(self._diagonal(precision))).mean(-1))
                value = value[..., None, None] if value.ndim else value
            else:
                value = 0.5 * rows / precision**2
            found["precision"] = jnp.broadcast_to(value, self.precision.shape)
        if self.learn_weight:
            prior = w * PRIOR_COUNT
            found["log_weight"] = jnp.where(self.present, statistics.mass + prior, prior)
        if self.offset_variance is not None:
            own = statistics.sample_rows[:, None] * diagonal + w / self.offset_variance[:, None]
            offsets = (len(self.offset_variance), shape[1])
            found["offset"] = jnp.broadcast_to(own, offsets)
            found["offset_log_var"] = jnp.broadcast_to(0.5 * w, offsets)
        return found

    # ----------------------------------------------------------------------------- exponential families, for SVI

    def natural(self, globals_: Globals) -> Globals:
        """Return natural parameters of q; of the point estimates the covariance and the weights, as in online EM."""
        found = dict(globals_)
        for mean, log_var in self._normal_blocks():
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
        for mean, log_var in self._normal_blocks():
            found[mean], found[log_var] = natural[mean] / natural[log_var], -jnp.log(natural[log_var])
        if self.learn_precision:
            found["precision"] = self._inverse(natural["precision"])
        if self.learn_weight:
            found["log_weight"] = jnp.log(natural["log_weight"])
        return found

    def natural_gradient(self, globals_: Globals, gradient: Globals) -> Globals:
        """Return the gradient in the expectation parameters that belong to `natural`."""
        found = dict(gradient)
        for mean, log_var in self._normal_blocks():
            by_variance = gradient[log_var] * jnp.exp(-globals_[log_var])
            found[mean], found[log_var] = gradient[mean] - 2 * globals_[mean] * by_variance, -2 * by_variance
        if self.learn_precision:
            rows = self.n_rows / (self.present.sum() if self.covariance in OWN_COVARIANCES else 1)
            size = self.start.shape[1] if self.covariance == "spherical" else 1
            found["precision"] = -2 * gradient["precision"] / ((rows + PRIOR_ROWS) * size)
        if self.learn_weight:
            found["log_weight"] = gradient["log_weight"] / (self.n_rows + PRIOR_COUNT * self.present.sum())
        return found

    # --------------------------------------------------------------------------------------- labels as logits

    def to_unconstrained(self, local: Array) -> Array:
        """Return responsibilities as logits."""
        return jnp.log(jnp.maximum(local, jnp.finfo(local.dtype).tiny))

    def from_unconstrained(self, x: Array, shard: Shard) -> Array:
        """Return the inverse of `to_unconstrained`; a floor keeps derivatives finite."""
        phi = jnp.maximum(jax.nn.softmax(x, axis=1), jnp.finfo(x.dtype).tiny)
        if "mask" not in shard:
            return phi
        weight = shard["mask"][:, None]
        return jnp.where(weight > 0, phi * weight, 0)

    # ------------------------------------------------------------------------------------------------- pieces

    def _normal_blocks(self) -> list[tuple[str, str]]:
        offsets = [] if self.offset_variance is None else [("offset", "offset_log_var")]
        return [("mean", "log_var"), *offsets]

    def _seen(self, x: Array) -> Array:
        """The rows in the frame of every component, (K, rows, d)."""
        return (x - self.frame_mean[:, None]) @ self.frame.mT

    def _precision_of(self, globals_: Globals) -> Array:
        return globals_["precision"] if self.learn_precision else self.precision

    def _log_weight_of(self, globals_: Globals) -> Array:
        if not self.learn_weight:
            return self.log_weight
        return jnp.where(self.present, globals_["log_weight"], ABSENT)

    def _diagonal(self, precision: Array) -> Array:
        """The diagonal of every component's precision, in a shape that broadcasts to (K, d)."""
        if self.covariance in ("tied", "full"):
            return jnp.diagonal(precision, axis1=-2, axis2=-1)
        return precision[:, None] if self.covariance == "spherical" else precision

    def _log_det(self, precision: Array) -> Array:
        if self.covariance in ("tied", "full"):
            return log_det(precision)
        if self.covariance == "spherical":
            return self.start.shape[1] * jnp.log(precision)
        return jnp.sum(jnp.log(precision), axis=-1) if self.covariance == "diag" else jnp.log(precision)

    def _inverse(self, precision: Array) -> Array:
        return jnp.linalg.inv(precision) if self.covariance in ("tied", "full") else 1 / precision

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
        if self.covariance in ("tied", "full"):
            return jnp.eye(self.start.shape[1], dtype=self.start.dtype)
        if self.covariance == "spherical":
            return self.start.shape[1] / self.precision
        return 1 / self.precision

    def _scatter(self, globals_: Globals, statistics: MixtureStatistics) -> Array:
        """E_q of the summed squares of residuals, in the shape of the precision block."""
        found = self._residual_scatter(globals_, statistics)
        if self.added_variance is None:
            return found
        rows = statistics.mass if self.covariance in OWN_COVARIANCES else statistics.fraction * self.n_rows
        added = self._added()
        return found + (rows.reshape(-1, *(1,) * (added.ndim - 1)) if rows.ndim else rows) * added

    def _added(self) -> Array:
        """The added variance in the shape of the precision, with an axis for components if they have their own."""
        if self.covariance == "tied":
            return self.added_variance
        if self.covariance == "full":
            return self.frame @ self.added_variance @ jnp.swapaxes(self.frame, 1, 2)
        diagonal = jnp.diagonal(self.added_variance)
        return {"diagonal": diagonal, "diag": diagonal[None], "spherical": diagonal.sum()[None]}[self.covariance]

    def _residual_scatter(self, globals_: Globals, statistics: MixtureStatistics) -> Array:
        """The same without the added variance."""
        mean, variance, mass = globals_["mean"], jnp.exp(globals_["log_var"]), statistics.mass[:, None]
        total, square = statistics.total, statistics.square
        if self.covariance == "full":
            both = jnp.einsum("kd,ke->kde", total, mean)
            outer = jnp.einsum("kd,ke->kde", mass * mean, mean)
            own: Array = jax.vmap(jnp.diag)(mass * variance)
            return square - both - jnp.swapaxes(both, 1, 2) + outer + own
        if self.covariance in ("diag", "spherical"):
            found = square - 2 * total * mean + mass * (mean**2 + variance)
            return found.sum(1) if self.covariance == "spherical" else found
        spread = jnp.sum(mass * variance, axis=0)
        pairs = [(total - 0.5 * mass * mean, mean)]  # of rows whose products are taken away
        if self.offset_variance is not None:
            offset, rows = globals_["offset"], statistics.sample_rows[:, None]
            spread = spread + jnp.sum(rows * jnp.exp(globals_["offset_log_var"]), axis=0)
            pairs[0] = (pairs[0][0] - statistics.sample_mass.T @ offset, mean)
            pairs.append((statistics.sample_total - 0.5 * rows * offset, offset))
        if self.covariance == "diagonal":
            return square + spread - 2 * sum(jnp.sum(left * right, axis=0) for left, right in pairs)
        both = pairs[0][0].T @ pairs[0][1]
        for left, right in pairs[1:]:
            both += left.T @ right
        return square + jnp.diag(spread) - both - both.T

    def _precision_step(
        self, globals_: Globals, statistics: MixtureStatistics, augmentation: Augmentation
    ) -> tuple[Array, _Basis | None]:
        """The precision for given means; of a matrix its eigenvalues and eigenvectors, too."""
        centre, dual, penalty = augmentation
        scatter = self._scatter(globals_, statistics) + statistics.fraction * PRIOR_ROWS * self._prior_scatter()
        rows = self._rows_of(statistics)
        if self.covariance not in ("tied", "full"):
            D = penalty["precision"]
            found = positive_root(0.5 * scatter + dual["precision"] - D * centre["precision"], D, rows)
            return jnp.minimum(found, MAX_PRECISION * self.precision), None
        D = penalty["precision"].mean((-2, -1))
        gradient = 0.5 * scatter + dual["precision"] - D[..., None, None] * centre["precision"]
        values, vectors = jnp.linalg.eigh(0.5 * (gradient + jnp.swapaxes(gradient, -1, -2)))
        values = jnp.minimum(positive_root(values, D[..., None], rows[..., None]), MAX_PRECISION)
        matrix = (vectors * values[..., None, :]) @ jnp.swapaxes(vectors, -1, -2)
        return matrix, _Basis(values, vectors)

    def _mean_step(
        self, statistics: MixtureStatistics, augmentation: Augmentation, precision: Array, basis: _Basis | None
    ) -> Globals:
        """The means given the precision, and with samples the offsets: exact, in the basis where it is diagonal."""
        centre, dual, penalty = augmentation
        w, mass = statistics.fraction, statistics.mass[:, None]
        D, prior = penalty["mean"], w / self.prior_variance
        pull = prior * self.prior_mean + D * centre["mean"] - dual["mean"]
        total = statistics.total
        if basis is not None:
            D, prior = D.mean(1, keepdims=True), jnp.mean(prior)
            turned = "kd,kde->ke" if self.covariance == "full" else "kd,de->ke"
            pull = prior * self.prior_mean + D * centre["mean"] - dual["mean"]
            pull, total = (jnp.einsum(turned, part, basis.vectors) for part in (pull, total))
            diagonal = basis.values
        else:
            diagonal = jnp.broadcast_to(self._diagonal(precision), self.start.shape)
        curvature = mass * diagonal + prior + D
        pull = diagonal * total + pull
        if self.offset_variance is None:
            mean = pull / curvature
            return {"mean": mean if basis is None else _turn_back(mean, basis)}
        by_sample = statistics.sample_mass
        shared = jnp.broadcast_to(diagonal, self.start.shape)[0]
        own_D, own_prior = penalty["offset"], w / self.offset_variance[:, None]
        own_total, own_pull = statistics.sample_total, own_D * centre["offset"] - dual["offset"]
        if basis is not None:
            own_D = own_D.mean(1, keepdims=True)
            own_pull = (own_D * centre["offset"] - dual["offset"]) @ basis.vectors
            own_total = own_total @ basis.vectors
        rows = statistics.sample_rows[:, None]
        own_curvature = rows * shared + own_prior + own_D
        own_pull = shared * own_total + own_pull

        # offsets are eliminated: what is left has as many unknowns as there are components, for every feature
        def means(precision: Array, curvature: Array, pull: Array, own: Array, own_pull: Array) -> Array:
            coupled = precision * by_sample
            matrix = jnp.diag(curvature) - coupled.T @ (coupled / own[:, None])
            return jnp.linalg.solve(matrix, pull - coupled.T @ (own_pull / own))

        columns = (shared, curvature.T, pull.T, jnp.broadcast_to(own_curvature, own_pull.shape).T, own_pull.T)
        mean = jax.vmap(means)(*columns).T
        offset = (own_pull - shared * (by_sample @ mean)) / own_curvature
        parts = (part["offset_log_var"] for part in augmentation)
        own_rows = 0.5 * (rows * self._diagonal(precision) + own_prior)
        return {
            "mean": mean if basis is None else _turn_back(mean, basis),
            "offset": offset if basis is None else offset @ basis.vectors.T,
            "offset_log_var": log_variance(jnp.broadcast_to(own_rows, offset.shape), 0.5 * w, *parts),
        }

    def _divergence(self, globals_: Globals) -> Array:
        """KL(q(c) || p(c)), and with samples that of the offsets."""
        value = _divergence(globals_["mean"] - self.prior_mean, globals_["log_var"], self.prior_variance)
        if self.offset_variance is not None:
            value += _divergence(globals_["offset"], globals_["offset_log_var"], self.offset_variance[:, None])
        return value


@registered
class PottsMixtureModel(MixtureModel):
    """The mixture on a graph: labels of a shard read those of others, across shards too."""

    def local_gradient(self, local: Array, globals_: Globals, shard: Shard) -> Array:
        """Return dF / dphi of the shard's own spots: an edge to another patch counts in full, in `loss` half."""
        phi = jnp.maximum(local[: len(shard["x"])], jnp.finfo(local.dtype).tiny)
        logits = neighbor_sum(local, shard, self.logits(globals_, shard))
        return self.temperature * (1 + jnp.log(phi)) - logits


class _Basis(NamedTuple):
    """Eigenvalues and eigenvectors of a precision, or of every component's."""

    values: Array
    vectors: Array


def _divergence(distance: Array, log_var: Array, prior_variance: Array) -> Array:
    ratio = (distance**2 + jnp.exp(log_var)) / prior_variance
    return 0.5 * jnp.sum(ratio - 1 + jnp.log(prior_variance) - log_var)


def _turn_back(mean: Array, basis: _Basis) -> Array:
    turned = "ke,kde->kd" if basis.vectors.ndim == 3 else "ke,de->kd"
    return jnp.einsum(turned, mean, basis.vectors)


def _masked(phi: Array, shard: Shard) -> Array:
    return phi * shard["mask"][:, None] if "mask" in shard else phi
