"""Groups of rows of counts: `CountMixtureModel` with the face of scikit-learn's mixtures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import scipy.sparse as sp
from scipy.special import gammaln, logsumexp, xlogy
from sklearn.base import DensityMixin
from sklearn.cluster import KMeans
from sklearn.utils.validation import check_is_fitted

from pdvi._base.checks import finite, whole
from pdvi.core.problem import Problem
from pdvi.estimators.fitting import CountEstimator
from pdvi.models.count_mixture import CountMixtureModel
from pdvi.shards.grouping import shards_for
from pdvi.shards.partition import consecutive, layout
from pdvi.solvers import P2DVI

SHARDS = 20  # at most, where they are not too large
ROWS = 25  # in a shard at least
AT_ONCE = 2**22  # rows of a shard x components x columns: what a visit works on
LOOKED_AT = 20_000  # rows that the start is made of
SCALE = 0.5  # of the penalty: components that overlap, or rows sorted by component, need a firm one
TRIES = 5  # k-means runs, of which the best is the start
DISPERSIONS = 0.01, 10.0  # between which the start has them


def count_problem(
    X: Any, n_components: int, *, size_factors: Any = None, n_shards: int | None = None, seed: int = 0
) -> Problem:
    """Return the problem of grouping rows of counts, for `pdvi.fit`.

    Parameters
    ----------
    X
        counts (rows, columns), sparse or dense; shards are dense. Rows stay in their order: a shard has consecutive
        ones.
    size_factors
        of every row, by which its means are multiplied; by default its total over the mean total.
    n_shards
        by default at most 20, with at least 25 rows each, and more where rows, components and columns are many.
    seed
        of the k-means that the start is made of.
    """
    X = sp.csr_matrix(X, copy=True).astype(float)
    X.sum_duplicates()
    n, n_columns = X.shape
    whole("n_components", n_components, least=1, most=n, of="the number of rows")
    s = _checked(size_factors, n) if size_factors is not None else _size_factors(X, _mean_total(X))
    if n_shards is None:
        few = shards_for(n, n_components * n_columns, most=SHARDS, least_rows=ROWS)
        n_shards = min(n, max(few, -(-n * n_components * n_columns // AT_ONCE)))
    where = layout(consecutive(n, n_shards))
    mask = where.mask.astype(float)
    alone = X.copy()  # what entries add whatever the unknowns: log y! - y log y + y
    alone.data = gammaln(X.data + 1) - xlogy(X.data, X.data) + X.data
    constant = np.asarray(alone.sum(1)).ravel()
    shards = {
        "y": where.shard(X.toarray()) * mask[..., None],
        "size_factor": where.shard(s),
        "mask": mask,
        "constant": (where.shard(constant) * mask).sum(1),
    }
    return Problem(_start(X, s, n_components, seed), shards)


def _start(X: sp.csr_matrix, s: np.ndarray, K: int, seed: int) -> CountMixtureModel:
    """Clusters of log counts, which are of similar variance; dispersions from the variance within."""
    rng = np.random.default_rng(seed)
    n, everything = X.shape[0], np.asarray(X.sum(0)).ravel()
    some = rng.choice(n, LOOKED_AT, replace=False) if n > LOOKED_AT else np.arange(n)
    counts, own = X[some].toarray(), s[some][:, None]
    label = KMeans(K, n_init=TRIES, random_state=seed).fit_predict(np.log1p(counts / own))
    member = np.eye(K)[label]
    common = np.maximum(everything, 0.5) / s.sum()  # a column without counts has half of one
    mean = (member.T @ counts + common) / (member.T @ own + 1)
    expected = own * mean[label]
    dispersion = ((counts - expected) ** 2 - expected).sum(0) / (expected**2).sum(0)
    return CountMixtureModel(
        log_mean=jax.device_put(np.log(mean)),
        log_size=jax.device_put(-np.log(np.clip(dispersion, *DISPERSIONS))),
        log_weight=jax.device_put(np.log(member.mean(0))),
        prior_mean=jax.device_put(common),
    )


def _mean_total(X: sp.csr_matrix) -> float:
    total = float(X.sum())
    if total == 0:
        msg = f"`X` must have at least one count, got {X.shape[0]} rows without any."
        raise ValueError(msg)
    return total / X.shape[0]


def _size_factors(X: sp.csr_matrix, mean_total: float) -> np.ndarray:
    """Totals over the mean total; a row without counts is taken as one that had a thousandth of them."""
    total = np.asarray(X.sum(1)).ravel() / mean_total
    return np.where(total > 0, total, 1e-3)


def _checked(size_factors: Any, n: int) -> np.ndarray:
    s = finite("size_factors", np.asarray(size_factors, float))
    if s.shape != (n,) or not (s > 0).all():
        found = f"shape {s.shape}" if s.shape != (n,) else f"{s.min():g}"
        msg = f"`size_factors` must be positive, one for each of the {n} rows, got {found}."
        raise ValueError(msg)
    return s


@dataclass(eq=False, repr=False)
class CountMixture(DensityMixin, CountEstimator):
    """A mixture of negative binomials by P2D-VI: rows of counts in groups, whatever their totals and their order.

    Sparse counts are accepted; inside they are dense. Counts need not be whole. The dispersion is a column's, the same
    in all components; means and dispersions have weak priors, which keep them finite.

    Parameters
    ----------
    n_components
        number of groups.
    max_epochs, tol
        of the fit, see `pdvi.fit`. A fit that ends before it has converged warns
        (`sklearn.exceptions.ConvergenceWarning`).
    solver
        any solver of `pdvi.solvers` that does without closed forms, or its name; by default `P2DVI(scale=0.5)`.
    n_shards
        into how many shards rows are grouped; by default as `pdvi.estimators.count_problem` does.
    verbose
        print the course of the fit.
    random_state
        seed of the start and the draws.

    Attributes
    ----------
    weights_, means_ (n_components, columns), of a row with size factor 1; dispersions_ (of every column: the variance
    is mean + dispersion mean^2), mean_total_ (of the rows of the fit), labels_, elbo_, n_iter_ (epochs), converged_,
    result_, fit_seconds_
    """

    n_components: int = 2

    def fit(self, X: Any, y: Any = None, *, size_factors: Any = None) -> CountMixture:
        """Group rows of counts; ``size_factors`` are by default totals over the mean total."""
        whole("n_components", self.n_components, least=1)
        counts = self._validated(X, reset=True)
        seed = self._seed()
        problem = count_problem(counts, self.n_components, size_factors=size_factors, n_shards=self.n_shards, seed=seed)
        self.mean_total_ = _mean_total(counts)
        result = self._fit_problem(problem, seed, default=P2DVI(scale=SCALE))
        found = {name: np.exp(np.asarray(value, float)) for name, value in result.global_params.items()}
        self.means_ = found["log_mean"]
        self.dispersions_ = 1 / found["log_size"]
        self.weights_ = found["log_weight"] / found["log_weight"].sum()
        self.labels_ = self.predict(X, size_factors=size_factors)
        return self

    def fit_predict(self, X: Any, y: Any = None, *, size_factors: Any = None) -> np.ndarray:
        """Group rows, and return the group of each."""
        return self.fit(X, size_factors=size_factors).labels_

    def predict(self, X: Any, *, size_factors: Any = None) -> np.ndarray:
        """Return the most probable component of rows."""
        return self._joint(X, size_factors).argmax(1)

    def predict_proba(self, X: Any, *, size_factors: Any = None) -> np.ndarray:
        """Return the probabilities of the components for rows."""
        joint = self._joint(X, size_factors)
        return np.exp(joint - logsumexp(joint, axis=1, keepdims=True))

    def score_samples(self, X: Any, *, size_factors: Any = None) -> np.ndarray:
        """Return the log-likelihood of every row."""
        return logsumexp(self._joint(X, size_factors), axis=1)

    def score(self, X: Any, y: Any = None, *, size_factors: Any = None) -> float:
        """Return the mean log-likelihood of rows, as scikit-learn does."""
        return float(self.score_samples(X, size_factors=size_factors).mean())

    def _joint(self, X: Any, size_factors: Any) -> np.ndarray:
        """Log-likelihood of rows with each component, and the logarithm of its weight."""
        check_is_fitted(self)
        X = self._validated(X, reset=False)
        s = _size_factors(X, self.mean_total_) if size_factors is None else _checked(size_factors, X.shape[0])
        size, entries = 1 / self.dispersions_, X.copy()
        # what a count adds to the log-likelihood of none: only entries that are there have to be looked at
        at = size[X.indices]
        entries.data = gammaln(X.data + at) - gammaln(at) - gammaln(X.data + 1)
        alone = np.asarray(entries.sum(1)).ravel()
        row = np.repeat(np.arange(X.shape[0]), np.diff(X.indptr))
        joint = np.empty((X.shape[0], self.n_components))
        for k, mean in enumerate(self.means_):
            expected = s[row] * mean[X.indices]
            entries.data = X.data * (np.log(expected) - np.log(at + expected))
            nothing = np.log1p(s[:, None] * (mean / size)) @ size
            joint[:, k] = alone + np.asarray(entries.sum(1)).ravel() - nothing
        return joint + np.log(self.weights_)
