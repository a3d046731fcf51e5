"""Measures of how good an answer is: agreement of labels, distance between mixtures."""

from __future__ import annotations

import numpy as np
from scipy.linalg import sqrtm
from scipy.optimize import linear_sum_assignment, linprog
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score


def ari(truth: np.ndarray, labels: np.ndarray) -> float:
    """Return the adjusted Rand index: 1 for equal partitions, about 0 for unrelated ones."""
    return float(adjusted_rand_score(truth, labels))


def nmi(truth: np.ndarray, labels: np.ndarray) -> float:
    """Return the normalised mutual information (arithmetic mean): 1 for equal partitions, 0 for unrelated ones."""
    return float(normalized_mutual_info_score(truth, labels))


def bures(
    means: np.ndarray, covariances: np.ndarray, other_means: np.ndarray, other_covariances: np.ndarray
) -> np.ndarray:
    """Return the squared Wasserstein-2 distances between all pairs of Gaussians.

    Covariances are variances per feature (components, d), or matrices (components, d, d); the same for both sides.

        |m - m'|^2 + tr( C + C' - 2 (C^1/2 C' C^1/2)^1/2 )
    """
    means, other_means = np.asarray(means, float), np.asarray(other_means, float)
    a, b = np.asarray(covariances, float), np.asarray(other_covariances, float)
    if a.ndim != b.ndim:
        msg = f"covariances must both be variances or both be matrices, got {a.ndim - 1} and {b.ndim - 1} axes."
        raise ValueError(msg)
    squared = ((means[:, None] - other_means[None]) ** 2).sum(-1)
    if a.ndim == 2:
        return squared + ((np.sqrt(a)[:, None] - np.sqrt(b)[None]) ** 2).sum(-1)
    roots = [np.real(sqrtm(c)) for c in a]
    cross = np.array([[np.real(np.trace(sqrtm(r @ c @ r))) for c in b] for r in roots])
    return squared + np.trace(a, axis1=1, axis2=2)[:, None] + np.trace(b, axis1=1, axis2=2)[None] - 2 * cross


def wasserstein_matched(
    means: np.ndarray, covariances: np.ndarray, other_means: np.ndarray, other_covariances: np.ndarray
) -> float:
    """Return the root mean squared Wasserstein-2 distance of components matched one to one (equal weights)."""
    cost = bures(means, covariances, other_means, other_covariances)
    return float(np.sqrt(max(cost[linear_sum_assignment(cost)].mean(), 0.0)))


def wasserstein_transport(
    means: np.ndarray,
    covariances: np.ndarray,
    weights: np.ndarray,
    other_means: np.ndarray,
    other_covariances: np.ndarray,
    other_weights: np.ndarray,
) -> float:
    """Return the Wasserstein-2 distance among mixtures: optimal transport between weighted components."""
    cost = bures(means, covariances, other_means, other_covariances)
    rows, columns = cost.shape
    sums = np.vstack([np.kron(np.eye(rows), np.ones(columns)), np.kron(np.ones(rows), np.eye(columns))])
    wanted = np.concatenate([np.asarray(weights) / np.sum(weights), np.asarray(other_weights) / np.sum(other_weights)])
    plan = linprog(cost.ravel(), A_eq=sums[:-1], b_eq=wanted[:-1], bounds=(0, None), method="highs").x
    return float(np.sqrt(max(plan @ cost.ravel(), 0.0)))


def matched_mean_error(means: np.ndarray, truth: np.ndarray) -> float:
    """Return the mean distance of the component means from the true ones, matched one to one."""
    distance = np.linalg.norm(np.asarray(means)[:, None] - np.asarray(truth)[None], axis=-1)
    return float(distance[linear_sum_assignment(distance)].mean())
