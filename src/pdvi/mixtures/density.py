"""What a fitted mixture says about rows: components with a normal density each, in double precision."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

BLOCK = 2**22  # numbers that are gathered at once


class Density(NamedTuple):
    """Hold the posterior of a mixture: means and their variances (K, d), covariances (K, d, d), log weights (K,)."""

    means: np.ndarray
    mean_variances: np.ndarray
    covariances: np.ndarray
    log_weights: np.ndarray

    def logits(self, X: np.ndarray) -> np.ndarray:
        """Return E_q log p(x, z = k), whose softmax over k are the responsibilities."""
        precisions = np.linalg.inv(self.covariances)
        spread = np.einsum("kdd,kd->k", precisions, self.mean_variances)
        return self.log_weights - 0.5 * spread + _log_normal(X, self.means, self.covariances)

    def log_density(self, X: np.ndarray) -> np.ndarray:
        """Return the log density of rows under the posterior predictive mixture."""
        n_features = self.means.shape[1]
        wider = self.covariances + self.mean_variances[:, :, None] * np.eye(n_features)
        return logsumexp(self.log_weights + _log_normal(X, self.means, wider), axis=1)


def _log_normal(X: np.ndarray, means: np.ndarray, covariances: np.ndarray) -> np.ndarray:
    """Return the log density of every row under every component."""
    found = np.empty((len(X), len(means)))
    rows = max(1, BLOCK // X.shape[1])
    for k, (mean, covariance) in enumerate(zip(means, covariances)):
        size = np.sqrt(np.diag(covariance))  # units of its own: a Cholesky factor of 1e-40 would not be one
        factor = np.linalg.cholesky(covariance / size[:, None] / size)
        whitening = np.linalg.inv(factor) / size
        constant = np.log(np.diag(factor)).sum() + np.log(size).sum() + 0.5 * len(mean) * np.log(2 * np.pi)
        for begin in range(0, len(X), rows):
            residual = (X[begin : begin + rows] - mean) @ whitening.T
            found[begin : begin + rows, k] = -0.5 * np.einsum("nd,nd->n", residual, residual) - constant
    return found


def nearest_component(X: np.ndarray, means: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Return rows' probabilities around given means: one variance per feature, that of the rows about the nearest."""
    size = X.std(0)
    size = np.where(size > 0, size, 1.0)
    x, centres = (X - X.mean(0)) / size, (means - X.mean(0)) / size
    squares = np.square(x[:, None] - centres).sum(-1) if x.size * len(means) <= BLOCK else _squares(x, centres)
    nearest = squares.argmin(1)
    variance = max(float(squares[np.arange(len(x)), nearest].mean()) / x.shape[1], 1e-6)
    logits = -0.5 * squares / variance + (0.0 if weights is None else np.log(np.maximum(weights, 1e-300)))
    return np.exp(logits - logsumexp(logits, axis=1, keepdims=True))


def _squares(x: np.ndarray, centres: np.ndarray) -> np.ndarray:
    squares = np.square(x).sum(1)[:, None] - 2 * x @ centres.T + np.square(centres).sum(1)
    return np.maximum(squares, 0.0)
