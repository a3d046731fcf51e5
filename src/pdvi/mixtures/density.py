"""A fitted mixture, and what it says about rows: components with a normal density each, in double precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logsumexp

from pdvi.core.result import Result
from pdvi.mixtures.init import WhiteRows

BLOCK = 2**19  # numbers that are worked on at once


class MixtureFit(NamedTuple):
    """A fitted mixture; its model sees the rows as ``(x - offset) @ whitening.T``."""

    result: Result
    model: Any
    probabilities: np.ndarray  # of components, (rows, K)
    offset: np.ndarray  # of all rows, or of every sample
    whitening: np.ndarray
    types: np.ndarray | None = None  # of a hierarchical mixture, probabilities of types, (rows, T)

    @property
    def objective(self) -> float:
        """Return the negative ELBO, in the units of the rows."""
        return self.result.objective

    @property
    def labels(self) -> np.ndarray:
        """Return the most probable component of every row."""
        return np.asarray(self.probabilities.argmax(1))

    def rows(self, X: np.ndarray, sample: np.ndarray | None = None) -> np.ndarray:
        """Return rows as the model sees them."""
        return WhiteRows(X, self.offset, self.whitening, sample)[:]

    @property
    def composition(self) -> np.ndarray | None:
        """Return the expected fraction of every type in every domain, (K, T)."""
        if "log_concentration" not in self.result.global_params:
            return None
        concentration = np.exp(np.asarray(self.result.global_params["log_concentration"], float))
        return np.asarray(concentration / concentration.sum(1, keepdims=True))


class Density:
    """The posterior of a mixture in the units of the rows that were fitted.

    Attributes
    ----------
    means, mean_variances
        Of the components, (K, d), and the variances of their posterior.
    covariances
        Of the rows of every component, (K, d, d).
    log_weights
        (K,), normalized.
    """

    def __init__(self, fitted: MixtureFit):
        model, blocks = getattr(fitted.model, "types", fitted.model), fitted.result.global_params
        d = fitted.whitening.shape[0]
        back = np.linalg.inv(fitted.whitening)
        offset = fitted.offset if fitted.offset.ndim == 1 else fitted.offset.mean(0)
        self.means = component_means(fitted) @ back.T + offset
        precision = np.asarray(blocks.get("precision", model.precision), float)
        n_components = len(self.means)
        if model.covariance == "full":
            back = back @ np.linalg.inv(np.asarray(model.frame, float))
        own = {
            "diagonal": lambda: np.broadcast_to(np.diag(1 / precision) if precision.ndim == 1 else 0, (d, d)),
            "tied": lambda: np.linalg.inv(precision),
            "diag": lambda: np.stack([np.diag(1 / row) for row in precision]),
            "spherical": lambda: np.stack([np.eye(d) / value for value in precision]),
            "full": lambda: np.linalg.inv(precision),
        }[model.covariance]()
        covariances = back @ own @ np.swapaxes(back, -1, -2)
        self.covariances = np.broadcast_to(covariances, (n_components, d, d))
        variance = np.exp(np.asarray(blocks["log_var"], float))
        self.mean_variances = np.einsum("...de,ke->kd" if back.ndim == 2 else "kde,ke->kd", back**2, variance)
        log_weights = np.asarray(blocks.get("log_weight", model.log_weight), float)
        self.log_weights = log_weights - logsumexp(log_weights)

    def logits(self, X: np.ndarray) -> np.ndarray:
        """Return E_q log p(x, z = k), whose softmax over k are the responsibilities."""
        return np.concatenate(list(self._logits(X)))

    def labels(self, X: np.ndarray) -> np.ndarray:
        """Return the most probable component of every row."""
        return np.concatenate([block.argmax(1) for block in self._logits(X)])

    def _logits(self, X: np.ndarray) -> Iterator[np.ndarray]:
        precisions = np.linalg.inv(self.covariances)
        own = self.log_weights - 0.5 * np.einsum("kdd,kd->k", precisions, self.mean_variances)
        return (own + block for block in _log_normal(X, self.means, self.covariances))

    def probabilities(self, X: np.ndarray) -> np.ndarray:
        """Return the responsibilities of the components for rows."""
        logits = self.logits(X)
        return np.exp(logits - logsumexp(logits, axis=1, keepdims=True))

    def log_density(self, X: np.ndarray) -> np.ndarray:
        """Return the log density of rows under the posterior predictive mixture."""
        wider = self.covariances + self.mean_variances[:, :, None] * np.eye(self.means.shape[1])
        blocks = _log_normal(X, self.means, wider)
        return np.concatenate([logsumexp(self.log_weights + block, axis=1) for block in blocks])

    def shaped(self, matrices: np.ndarray, covariance: str) -> np.ndarray:
        """Return covariances or precisions, (K, d, d), in the shape that scikit-learn gives them."""
        if covariance == "full":
            return matrices
        if covariance in ("tied", "diagonal"):
            return matrices[0] if covariance == "tied" else np.diagonal(matrices[0]).copy()
        diagonals = np.diagonal(matrices, axis1=1, axis2=2)
        return diagonals.copy() if covariance == "diag" else diagonals.mean(1)

    def precisions(self) -> np.ndarray:
        """Return inverse covariances, in units in which they are close to 1: those of tiny ones would not be found."""
        size = np.sqrt(np.diagonal(self.covariances, axis1=1, axis2=2))
        both = size[:, :, None] * size[:, None, :]
        values, vectors = np.linalg.eigh(self.covariances / both)
        # columns that are the same but for one far row leave nothing of the least eigenvalue, or less
        values = np.maximum(values, np.finfo(float).eps * values.max(-1, keepdims=True))
        return (vectors / values[..., None, :]) @ np.swapaxes(vectors, -1, -2) / both


def component_means(fitted: MixtureFit) -> np.ndarray:
    """Return the means of components as the model sees rows, (K, d); a full covariance has them in its frames."""
    mean = np.asarray(fitted.result.global_params["mean"], float)
    if fitted.model.covariance != "full":
        return mean
    back = np.linalg.inv(np.asarray(fitted.model.frame, float))
    return np.einsum("kde,ke->kd", back, mean) + np.asarray(fitted.model.frame_mean, float)


def _log_normal(X: np.ndarray, means: np.ndarray, covariances: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the log density of rows under every component, in double precision, block by block.

    Where components share a covariance, or have diagonal ones, that is a product of matrices.
    """
    center = means.mean(0)
    centers = means - center
    rows = max(1, BLOCK // X.shape[1])
    blocks = (X[begin : begin + rows] - center for begin in range(0, len(X), rows))
    diagonals = np.diagonal(covariances, axis1=1, axis2=2)
    if np.count_nonzero(covariances) == np.count_nonzero(diagonals):
        precision = 1 / diagonals
        log_det = np.log(2 * np.pi * diagonals).sum(1)
        linear, constant = (-2 * centers * precision).T, (centers**2 * precision).sum(1)
        for x in blocks:
            squares = x**2 @ precision.T + x @ linear + constant
            yield -0.5 * (np.maximum(squares, 0) + log_det)
        return
    shared = bool((covariances == covariances[0]).all())
    whitening, constants = zip(*(_whitening(covariance) for covariance in covariances[: 1 if shared else None]))
    for x in blocks:
        if shared:
            x, own = x @ whitening[0].T, centers @ whitening[0].T
            squares = (x**2).sum(1)[:, None] - 2 * x @ own.T + (own**2).sum(1)
            yield -0.5 * np.maximum(squares, 0) - constants[0]
            continue
        found = np.empty((len(x), len(means)))
        for k, own in enumerate(centers):
            residual = (x - own) @ whitening[k].T
            found[:, k] = -0.5 * np.einsum("nd,nd->n", residual, residual) - constants[k]
        yield found


def _whitening(covariance: np.ndarray) -> tuple[np.ndarray, float]:
    """The matrix that whitens rows of this covariance, and the constant of their log density."""
    size = np.sqrt(np.diag(covariance))  # units of its own: a Cholesky factor of 1e-40 would not be one
    factor = np.linalg.cholesky(covariance / size[:, None] / size)
    constant = np.log(np.diag(factor)).sum() + np.log(size).sum() + 0.5 * len(covariance) * np.log(2 * np.pi)
    return np.linalg.inv(factor) / size, float(constant)


def nearest_component(X: np.ndarray, means: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Return rows' probabilities around given means: one variance per feature, that of the rows about the nearest."""
    size = X.std(0)
    size = np.where(size > 0, size, 1.0)
    x, centers = (X - X.mean(0)) / size, (means - X.mean(0)) / size
    squares = np.maximum((x**2).sum(1)[:, None] - 2 * x @ centers.T + (centers**2).sum(1), 0.0)
    variance = max(float(squares.min(1).mean()) / x.shape[1], 1e-6)
    logits = -0.5 * squares / variance + (0.0 if weights is None else np.log(np.maximum(weights, 1e-300)))
    return np.exp(logits - logsumexp(logits, axis=1, keepdims=True))
