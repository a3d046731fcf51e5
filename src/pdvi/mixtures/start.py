"""Where a fit begins: k-means or given labels, the hyper-parameters they suggest, and rows with white noise."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdvi.mixtures.recipe import RECIPE, Recipe


class EmpiricalBayes(NamedTuple):
    """Hold starting means and the hyper-parameters that an initial k-means suggests."""

    means: np.ndarray
    prior_mean: np.ndarray
    prior_variance: np.ndarray
    noise_variance: np.ndarray


def empirical_bayes(
    X: np.ndarray, n_components: int, *, seed: int = 0, subsample: int | None = None, recipe: Recipe = RECIPE
) -> EmpiricalBayes:
    """Return the paper's settings from k-means on at most ``subsample`` rows (default: as the recipe says).

    The prior mean xi is the mean of the rows, s0^2 the average variance within clusters, s1^2 that of their means.
    """
    from sklearn.cluster import KMeans

    subsample = recipe.kmeans_rows if subsample is None else subsample
    rng = np.random.default_rng(seed)
    sample = X if len(X) <= subsample else X[np.sort(rng.choice(len(X), subsample, replace=False))]
    kmeans = KMeans(n_components, n_init=recipe.kmeans_runs, random_state=int(rng.integers(2**31))).fit(sample)
    return from_labels(sample, kmeans.labels_, kmeans.cluster_centers_, recipe)


def from_labels(X: np.ndarray, labels: np.ndarray, means: np.ndarray, recipe: Recipe = RECIPE) -> EmpiricalBayes:
    """Return the same settings from given labels and means."""
    X = np.asarray(X, float)
    prior_mean = X.mean(0)
    total = X.var(0)
    # a constant feature, or one cluster only: no NaN and no infinite precision
    floor = recipe.floor * max(float(total.mean()), 1e-12)
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
    return np.linalg.inv(scale_of(np.asarray(sample - settings.means[labels], float), recipe))


def scale_of(residuals: np.ndarray, recipe: Recipe = RECIPE) -> np.ndarray:
    """Return the Cholesky factor of the residuals' covariance, which may be singular."""
    scatter = np.asarray(residuals.T @ residuals, float) / len(residuals)
    scatter += recipe.floor * max(np.trace(scatter) / len(scatter), 1e-12) * np.eye(len(scatter))
    return np.linalg.cholesky(scatter)


def whitened(settings: EmpiricalBayes, whitening: np.ndarray, recipe: Recipe = RECIPE) -> EmpiricalBayes:
    """Return the settings for whitened rows: unit noise, and the means' own variance."""
    means = settings.means @ whitening.T
    between = means.var(0) if len(means) > 1 else np.ones(means.shape[1])
    floor = recipe.floor * max(float(between.mean()), 1e-12)
    noise = np.ones_like(settings.noise_variance)
    return EmpiricalBayes(means, whitening @ settings.prior_mean, np.maximum(between, floor), noise)
