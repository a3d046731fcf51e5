"""Where a fit begins: centered rows, labels from k-means, and units in which the noise around labels is white."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pdvi.shards.nearest import nearest_rows

if TYPE_CHECKING:
    from sklearn.cluster import KMeans

NORMAL_SPREAD = 1e-4, 1e4  # spreads that single precision squares and multiplies without loss: left as they are
POSSIBLE_SPREAD = 1e-150, 1e150  # spreads whose squares a double holds
MIN_VARIANCE = 1e-6  # over the mean variance: constant features must not divide by 0
RESOLVED = 1e-2  # of a feature's variance is added to the noise of the start: second moments in single precision do not
# resolve much less, and the precision can still grow a hundredfold
KMEANS_ROWS = 20_000  # that k-means and a covariance are computed from at most
KMEANS_TOL = 1e-3  # the fit goes on from there


class WhiteRows:
    """Rows as a model sees them, ``(x - offset) @ whitening.T``, made when they are asked for: X may lie on disk."""

    def __init__(self, X: Any, offset: np.ndarray, whitening: np.ndarray, sample: np.ndarray | None = None):
        self.X, self.offset, self.whitening, self.sample = X, offset, whitening, sample
        self.shape = X.shape
        # in the precision of X, unless that cannot hold it
        self._matrix = whitening.astype(np.result_type(X.dtype, np.min_scalar_type(float(np.abs(whitening).max()))))
        self._by_feature = np.count_nonzero(whitening) == len(whitening)

    def __getitem__(self, index: Any) -> np.ndarray:
        rows = self.X[index] - (self.offset if self.sample is None else self.offset[self.sample[index]])
        return np.asarray(rows * np.diag(self._matrix) if self._by_feature else rows @ self._matrix.T)


def means_by_sample(X: np.ndarray, sample: np.ndarray | None) -> np.ndarray:
    """Return the mean row of every sample, (S, d); of all rows, (d,), where there are no samples."""
    if sample is None:
        return np.asarray(X.mean(0))
    sums = np.stack([np.bincount(sample, column) for column in X.T], axis=1)
    return np.asarray(sums / np.bincount(sample)[:, None], X.dtype)


def about_mean(X: np.ndarray, sample: np.ndarray | None) -> np.ndarray:
    """Return every row minus the mean of its sample."""
    mean = means_by_sample(X, sample)
    return X - (mean if sample is None else mean[sample])


def center(X: np.ndarray, sample: np.ndarray | None = None) -> np.ndarray:
    """Return rows minus their (sample's) mean, in a unit that single precision can work with."""
    rows = about_mean(X, sample)
    return in_unit(rows, unit_of(X, rows))


def in_unit(X: np.ndarray, unit: float) -> np.ndarray:
    """Return ``X / unit``, in the same precision."""
    return (X / unit).astype(X.dtype) if unit >= np.finfo(X.dtype).tiny else X * (1 / unit)


def unit_of(X: np.ndarray, centered: np.ndarray) -> float:
    """Return 1, or if the spread of rows is very small or large the power of two that is nearest to it.

    ``centered`` has the rows, or some of them, minus their mean; the unit is one that the others can be given in, too.
    """
    low, high = X.min(0), X.max(0)
    largest = float(max(high.max(), -low.min()))
    if largest > POSSIBLE_SPREAD[1]:
        raise _impossible(largest)
    deviation = float(np.abs(centered).max())
    spread = deviation * float(np.sqrt(np.mean((centered / deviation) ** 2, dtype=float))) if deviation else 1.0
    if len(centered) < len(X):  # a row that is far off counts as it would among all rows
        spread = max(spread, float((high - low).max()) / X.size**0.5)
    # what is left of a constant is rounding, and not to be made large
    spread = max(spread, 16 * float(np.finfo(X.dtype).eps) * largest)
    if NORMAL_SPREAD[0] <= spread <= NORMAL_SPREAD[1]:
        return 1.0
    if spread < POSSIBLE_SPREAD[0]:
        raise _impossible(spread)
    return float(2.0 ** round(float(np.log2(spread))))  # a power of two: no digit of the data changes


def _impossible(size: float) -> ValueError:
    low, high = POSSIBLE_SPREAD
    msg = f"`X` must vary by {low:g} to {high:g}, since variances are squares, got {size:.3g}; give it in other units."
    return ValueError(msg)


def kmeans_of(X: np.ndarray, n_components: int, *, seed: int, runs: int, max_rows: int) -> tuple[np.ndarray, KMeans]:
    """Return at most ``max_rows`` rows, drawn at random, and the best of ``runs`` of k-means on them."""
    from sklearn.cluster import KMeans

    rng = np.random.default_rng(seed)
    sample = X if len(X) <= max_rows else X[np.sort(rng.choice(len(X), max_rows, replace=False))]
    sample = np.asarray(sample, float)  # scikit-learn converts single precision again and again
    kmeans = KMeans(n_components, n_init=runs, tol=KMEANS_TOL, random_state=int(rng.integers(2**31)))
    return sample, kmeans.fit(sample)


def kmeans_labels(
    X: np.ndarray, n_components: int, *, seed: int = 0, runs: int = 1, max_rows: int = KMEANS_ROWS
) -> np.ndarray:
    """Return the label of every row by the best of ``runs`` of k-means on at most ``max_rows`` rows."""
    sample, kmeans = kmeans_of(X, n_components, seed=seed, runs=runs, max_rows=max_rows)
    if len(sample) == len(X):
        return np.asarray(kmeans.labels_)
    means = np.asarray(kmeans.cluster_centers_, X.dtype)
    return np.asarray((0.5 * (means**2).sum(1) - X @ means.T).argmin(1))


def domains_of_types(
    types: np.ndarray, coordinates: np.ndarray, n_domains: int, *, n_neighbors: int = 30, seed: int = 0, runs: int = 1
) -> np.ndarray:
    """Return domains by k-means of the root mean fractions of types around each row, as probabilities, (rows, K)."""
    few = max(1, len(types) // n_domains)  # rows of an average domain: with more all places would look alike
    near = nearest_rows(coordinates, min(n_neighbors + 1, few))
    fractions = np.zeros_like(types)
    for column in near.T:
        fractions += types[column]
    roots = np.sqrt(fractions / near.shape[1])  # distances between roots tell compositions apart as counts do
    return one_hot(kmeans_labels(roots, n_domains, seed=seed, runs=runs), n_domains)


def means_of(X: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Return the mean of every component's rows."""
    mass = np.maximum(probabilities.sum(0), 1e-6)
    return np.asarray(probabilities.T @ X / mass[:, None], float)


def one_hot(labels: np.ndarray, n_labels: int, dtype: np.typing.DTypeLike = np.float32) -> np.ndarray:
    """Return probabilities that are 1 for the label of every row."""
    return np.eye(n_labels, dtype=dtype)[labels]


def whitening_of(X: np.ndarray, labels: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Return the matrix after which the residuals around the means of ``labels`` have about unit covariance."""
    every = max(1, len(X) // KMEANS_ROWS)
    X = np.asarray(X[::every], float)
    return np.linalg.inv(scale_of(X - means[labels[::every]], added=RESOLVED * X.var(0)))


def scale_of(residuals: np.ndarray, *, added: np.ndarray | float = 0.0) -> np.ndarray:
    """Return the Cholesky factor of the residuals' covariance, which may be singular; ``added`` to its diagonal."""
    scatter = np.asarray(residuals.T @ residuals, float) / len(residuals)
    added = np.broadcast_to(added, len(scatter))
    least = MIN_VARIANCE * float((np.diag(scatter) + added).mean()) or 1.0  # 1: nothing varies
    return np.linalg.cholesky(scatter + np.diag(np.maximum(added, least)))
