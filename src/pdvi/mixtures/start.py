"""Where a fit begins: k-means or given labels, the hyper-parameters they suggest, and rows with white noise."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdvi.mixtures.recipe import RECIPE, Recipe
from pdvi.mixtures.samples import means_by_sample

USUAL = 1e-4, 1e4  # spreads that single precision squares and multiplies without loss: left as they are
POSSIBLE = 1e-150, 1e150  # spreads whose squares a double holds
UNUSED = 1e-9  # of the mean prior variance: that of the means of columns that are padding
RESOLVED = 1e-8  # least variance, over that of the data: less than single precision tells from rounding


class Centred(NamedTuple):
    """Hold rows about their mean, in a unit that single precision can work with."""

    X: np.ndarray
    offset: np.ndarray
    unit: float


def centred(rows: np.ndarray, sample: np.ndarray | None = None) -> Centred:
    """Return rows minus their (sample's) mean, divided by a power of two if their spread is very small or large."""
    largest = float(np.abs(rows).max())
    if largest > POSSIBLE[1]:
        raise _impossible(largest)
    offset = means_by_sample(rows, sample)
    X = rows - (offset if sample is None else offset[sample])
    deviation = float(np.abs(X).max())
    spread = deviation * float(np.sqrt(np.mean((X / deviation) ** 2, dtype=float))) if deviation else 1.0
    # what is left of a constant is rounding, and not to be made large
    spread = max(spread, 16 * float(np.finfo(X.dtype).eps) * largest)
    if USUAL[0] <= spread <= USUAL[1]:
        return Centred(X, offset, 1.0)
    if spread < POSSIBLE[0]:
        raise _impossible(spread)
    unit = 2.0 ** round(float(np.log2(spread)))  # a power of two: no digit of the data changes
    return Centred((X / unit).astype(X.dtype) if unit >= np.finfo(X.dtype).tiny else X * (1 / unit), offset, unit)


def _impossible(size: float) -> ValueError:
    low, high = POSSIBLE
    msg = f"`X` must vary by {low:g} to {high:g}, since variances are squares, got {size:.3g}; give it in other units."
    return ValueError(msg)


class EmpiricalBayes(NamedTuple):
    """Hold starting means and the hyper-parameters that an initial k-means suggests."""

    means: np.ndarray
    prior_mean: np.ndarray
    prior_variance: np.ndarray
    noise_variance: np.ndarray
    absent: int = 0  # how many of the last means are padding


def widened(X: np.ndarray, width: int) -> np.ndarray:
    """Return the rows with columns of 0 up to a width."""
    return np.pad(X, ((0, 0), (0, width - X.shape[1])))


def padded(settings: EmpiricalBayes, n_components: int, width: int) -> EmpiricalBayes:
    """Return the settings with absent components, and for rows with columns of 0, up to these sizes.

    The prior of the columns' means is so narrow that they stay 0.
    """
    more, columns = n_components - len(settings.means), width - settings.means.shape[1]
    means = np.vstack([settings.means, np.tile(settings.prior_mean, (more, 1))])
    narrow = UNUSED * settings.prior_variance.mean()
    return EmpiricalBayes(
        np.pad(means, ((0, 0), (0, columns))),
        np.pad(settings.prior_mean, (0, columns)),
        np.pad(settings.prior_variance, (0, columns), constant_values=narrow),
        np.pad(settings.noise_variance, (0, columns), constant_values=settings.noise_variance.mean()),
        more,
    )


def empirical_bayes(
    X: np.ndarray,
    n_components: int,
    *,
    seed: int = 0,
    subsample: int | None = None,
    runs: int = 1,
    recipe: Recipe = RECIPE,
) -> EmpiricalBayes:
    """Return the paper's settings from k-means, the best of so many runs, on at most ``subsample`` rows.

    The prior mean xi is the mean of the rows, s0^2 the average variance within clusters, s1^2 that of their means.
    """
    from sklearn.cluster import KMeans

    subsample = recipe.kmeans_rows if subsample is None else subsample
    rng = np.random.default_rng(seed)
    sample = X if len(X) <= subsample else X[np.sort(rng.choice(len(X), subsample, replace=False))]
    sample = np.asarray(sample, float)  # scikit-learn converts single precision again and again
    kmeans = KMeans(n_components, n_init=runs, tol=recipe.kmeans_tol, random_state=int(rng.integers(2**31))).fit(sample)
    return from_labels(sample, kmeans.labels_, kmeans.cluster_centers_, recipe)


def from_labels(X: np.ndarray, labels: np.ndarray, means: np.ndarray, recipe: Recipe = RECIPE) -> EmpiricalBayes:
    """Return the same settings from given labels and means."""
    X = np.asarray(X, float)
    prior_mean = X.mean(0)
    total = X.var(0)
    # a constant feature, or one cluster only: no NaN and no infinite precision
    floor = recipe.floor * (float(total.mean()) or 1.0)
    within = ((X - means[labels]) ** 2).mean(0)
    between = means.var(0) if len(means) > 1 else total
    return EmpiricalBayes(means, prior_mean, np.maximum(between, floor), np.maximum(within, floor))


def means_of(X: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Return the mean of every component's rows."""
    mass = np.maximum(probabilities.sum(0), 1e-6)
    return np.asarray(probabilities.T @ X / mass[:, None])


def whitening_of(
    X: np.ndarray, settings: EmpiricalBayes, labels: np.ndarray | None = None, recipe: Recipe = RECIPE
) -> np.ndarray:
    """Return the matrix after which the noise around the nearest means (or those of ``labels``) is white."""
    every = max(1, len(X) // recipe.whitening_rows)
    sample = X[::every]
    if labels is None:
        labels = ((sample**2).sum(1)[:, None] - 2 * sample @ settings.means.T + (settings.means**2).sum(1)).argmin(1)
    else:
        labels = labels[::every]
    residuals = np.asarray(sample - settings.means[labels], float)
    return np.linalg.inv(scale_of(residuals, recipe, spread=float(np.mean(np.square(sample, dtype=float)))))


def scale_of(residuals: np.ndarray, recipe: Recipe = RECIPE, *, spread: float = 0.0) -> np.ndarray:
    """Return the Cholesky factor of the residuals' covariance, which may be singular; ``spread``: that of the rows."""
    scatter = np.asarray(residuals.T @ residuals, float) / len(residuals)
    least = max(recipe.floor * np.trace(scatter) / len(scatter), RESOLVED * spread) or 1.0  # 1: nothing varies
    return np.linalg.cholesky(scatter + least * np.eye(len(scatter)))


def whitened(settings: EmpiricalBayes, whitening: np.ndarray, recipe: Recipe = RECIPE) -> EmpiricalBayes:
    """Return the settings for whitened rows: unit noise, and the means' own variance."""
    means = settings.means @ whitening.T
    between = means.var(0) if len(means) > 1 else np.ones(means.shape[1])
    floor = recipe.floor * max(float(between.mean()), 1e-3)  # of noise, which is 1
    noise = np.ones_like(settings.noise_variance)
    return EmpiricalBayes(means, whitening @ settings.prior_mean, np.maximum(between, floor), noise)
