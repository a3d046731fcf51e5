"""Neighbourhood graphs on coordinates, as symmetric sparse matrices."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from scipy.spatial import cKDTree


def nearest(coordinates: np.ndarray, k: int, *, mutual: bool = True) -> sp.csr_array:
    """Edges between k nearest neighbours: of each other (``mutual``, the paper), or of one of the two."""
    n = len(coordinates)
    if not 1 <= k < n:
        msg = f"`k` must be between 1 and the number of spots less one ({n - 1}), got {k!r}."
        raise ValueError(msg)
    # one more than asked for, since a spot is its own neighbour, and not always the first among duplicates
    found = np.asarray(cKDTree(coordinates).query(coordinates, k=k + 1, workers=-1)[1])
    others = found != np.arange(n)[:, None]
    others[others.all(1), -1] = False
    target = found[others]
    directed = sp.csr_array((np.ones(len(target), np.float32), (np.repeat(np.arange(n), k), target)), shape=(n, n))
    reverse = sp.csr_array(directed.T)
    return sp.csr_array(directed.minimum(reverse) if mutual else directed.maximum(reverse))


def within(coordinates: np.ndarray, radius: float) -> sp.csr_array:
    """Edges between spots at most ``radius`` apart."""
    if not radius > 0:
        msg = f"`radius` must be positive, got {radius!r}."
        raise ValueError(msg)
    pairs = cKDTree(coordinates).query_pairs(radius, output_type="ndarray")
    n = len(coordinates)
    half = sp.csr_array((np.ones(len(pairs), np.float32), (pairs[:, 0], pairs[:, 1])), shape=(n, n))
    return sp.csr_array(half + half.T)


def weights(
    graph: sp.csr_array,
    X: np.ndarray,
    coordinates: np.ndarray | None = None,
    flow: np.ndarray | None = None,
    *,
    tau: float = 1.0,
) -> sp.csr_array:
    """The paper's edge weights, made symmetric by averaging.

    r_il = |g_i . (l_l - l_i)| / (|g_i| |l_l - l_i|) + tau (cos(x_i, x_l) + 1); without a flow, or where it is
    zero, the first term is left out.
    """
    edges = sp.coo_array(sp.csr_array(graph))
    i, j = edges.row, edges.col
    norms = np.linalg.norm(X, axis=1, keepdims=True)
    unit = np.asarray(X / np.maximum(norms, 1e-12), np.float32)
    values = np.empty(len(i), np.float32)
    for part in np.array_split(np.arange(len(i)), max(1, len(i) // 1_000_000)):  # keeps the gathered rows small
        values[part] = tau * (1 + np.einsum("ed,ed->e", unit[i[part]], unit[j[part]]))
    if flow is not None and coordinates is not None:
        steps = coordinates[j] - coordinates[i]
        lengths = np.linalg.norm(flow[i], axis=1) * np.linalg.norm(steps, axis=1)
        along = np.abs((flow[i] * steps).sum(1))
        values += np.divide(along, lengths, out=np.zeros(len(i)), where=lengths > 0)
    directed = sp.csr_array((values, (i, j)), shape=graph.shape)
    return sp.csr_array((directed + directed.T) * 0.5)
