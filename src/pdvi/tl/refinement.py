"""Domains found on averaged neighbourhoods, refined on the components of single spots where these allow it.

Averages find the domains but blur their borders. Single spots do not, and where a domain is one cloud of noise around
one mean, a mixture on them is sharper. Where a domain has several cell types it is not: such a mixture tears domains
into types. Two checks tell: the spots of a domain must be one normal cloud, and the refined labels of a spot's
neighbours must predict its components no worse than the labels before. On the five labelled slides that the defaults
were chosen on, spots and cells alike, the first check says no, and refinement by force gains nothing.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from pdvi import graphs
from pdvi.mixtures.build import means_of
from pdvi.mixtures.estimators import PottsMixture

# Many weak edges gave better borders than eight strong ones, on simulated clouds at 154,000 real coordinates. Equal
# weights: with learned ones and a weak coupling all spots ended in one domain there.
NEIGHBORS, COUPLING = 24, 0.4
# Kurtosis over that of a normal cloud: 1.00 in simulated clouds, 1.06 to 1.52 on five real slides and two simulated
# tissues with several cell types in a domain. All these are what the limits were set on.
NORMAL = 0.03
# Domains torn into cell types predict neighbours worse by 0.4 and more; averages know a little of the spot itself,
# which lets their labels look better than they are by 0.01.
WORSE = 0.1


def refined(
    X: np.ndarray,
    probability: np.ndarray,
    coordinates: np.ndarray,
    samples: np.ndarray,
    *,
    beta: float,
    covariance: str,
    seed: int,
    force: bool = False,
) -> PottsMixture | None:
    """The fit on ``X`` from given probabilities; None where one of the checks says no (``force``: no checks)."""
    if not force and abs(kurtosis(X, probability) - 1) > NORMAL:
        return None
    graph = _graph(coordinates, samples)
    start = probability / probability.sum(1, keepdims=True)
    mixture = PottsMixture(probability.shape[1], beta=beta * COUPLING, covariance=covariance, random_state=seed)
    mixture.fit(X, graph=graph, coordinates=coordinates, start=start, exchange=True)
    if not force and surprise(X, mixture.probabilities_, graph) > surprise(X, probability, graph) + WORSE:
        return None
    return mixture


def kurtosis(X: np.ndarray, probability: np.ndarray) -> float:
    """Mardia's multivariate kurtosis of the rows within their domains, over that of a normal distribution."""
    residuals = X - means_of(X, probability)[probability.argmax(1)]
    squares = (_white(residuals) ** 2).sum(1, dtype=float)
    dim = X.shape[1]
    return float((squares**2).mean() / (dim * (dim + 2)))


def surprise(X: np.ndarray, probability: np.ndarray, graph: sp.csr_array) -> float:
    """Log volume of the errors when each row is predicted from the domains of its neighbours alone."""
    degree = np.maximum(np.asarray(graph.sum(1)).reshape(-1, 1), 1)
    errors = X - (graph @ np.asarray(probability, np.float32) / degree) @ means_of(X, probability)
    return 2 * float(np.log(np.diagonal(_scale(errors))).sum())


def _graph(coordinates: np.ndarray, samples: np.ndarray) -> sp.csr_array:
    edges = sp.coo_array(graphs.nearest(coordinates, min(NEIGHBORS, len(coordinates) - 1), mutual=False))
    same = samples[edges.row] == samples[edges.col]
    return sp.csr_array((edges.data[same], (edges.row[same], edges.col[same])), shape=edges.shape)


def _scale(rows: np.ndarray) -> np.ndarray:
    scatter = np.asarray(rows.T @ rows, float) / len(rows)
    return np.linalg.cholesky(scatter + 1e-6 * max(np.trace(scatter) / len(scatter), 1e-12) * np.eye(len(scatter)))


def _white(rows: np.ndarray) -> np.ndarray:
    return rows @ np.linalg.inv(_scale(rows)).T.astype(rows.dtype)
