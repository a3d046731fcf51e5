"""Neighbourhood graphs on coordinates, as symmetric sparse matrices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.sparse as sp
from scipy.spatial import cKDTree

from pdvi._base.checks import factor, finite, positive, whole
from pdvi.shards.nearest import nearest_rows, other_rows

EDGES_AT_ONCE = 100_000  # whose rows are gathered: few enough to stay in the cache


def nearest(coordinates: np.ndarray, k: int, *, mutual: bool = True) -> sp.csr_array:
    """Join spots that are among the k nearest of each other (``mutual``, the paper), or of one of the two."""
    coordinates = _points(coordinates)
    n = len(coordinates)
    k = whole("k", k, least=1, most=n - 1, of="the number of spots less one")
    index = np.dtype(np.int32 if n * k <= np.iinfo(np.int32).max else np.int64)  # of half the size if that will do
    target: np.ndarray = other_rows(coordinates, k).ravel().astype(index, copy=False)
    begin: np.ndarray = np.arange(0, n * k + 1, k).astype(index, copy=False)
    directed = sp.csr_array((np.ones(n * k, np.float32), target, begin), shape=(n, n))
    directed.sort_indices()
    reverse = sp.csr_array(directed.T)
    return sp.csr_array(directed.minimum(reverse) if mutual else directed.maximum(reverse))


def by_sample(samples: np.ndarray, edges: Callable[[np.ndarray], sp.csr_array]) -> sp.csr_array:
    """Return the graph of which ``edges`` gives the part of each sample's rows: no edge joins two samples."""
    each = np.unique(samples)
    if len(each) == 1:
        return edges(np.arange(len(samples)))
    sources, targets = [], []
    for sample in each:
        rows = np.flatnonzero(samples == sample)
        found = sp.coo_array(edges(rows))
        sources.append(rows[found.row])
        targets.append(rows[found.col])
    i, j = np.concatenate(sources), np.concatenate(targets)
    return sp.csr_array((np.ones(len(i), np.float32), (i, j)), shape=(len(samples), len(samples)))


def within(coordinates: np.ndarray, radius: float) -> sp.csr_array:
    """Join spots at most ``radius`` apart."""
    positive("radius", radius)
    coordinates = _points(coordinates)
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
    """Return the graph with the paper's edge weights, made symmetric by averaging.

    r_il = |g_i . (l_l - l_i)| / (|g_i| |l_l - l_i|) + tau (cos(x_i, x_l) + 1); without a flow, or where it is
    zero, the first term is left out.
    """
    factor("tau", tau)
    graph = sp.csr_array(graph)
    if not graph.has_canonical_format:
        graph = graph.copy()
        graph.sum_duplicates()
    i, j = np.repeat(np.arange(len(X), dtype=graph.indices.dtype), np.diff(graph.indptr)), graph.indices
    norms = np.linalg.norm(X, axis=1, keepdims=True)
    unit = np.asarray(X / np.maximum(norms, 1e-12), np.float32)
    values = np.empty(len(i), np.float32)
    for begin in range(0, len(i), EDGES_AT_ONCE):
        part = slice(begin, begin + EDGES_AT_ONCE)
        values[part] = tau * (1 + np.einsum("ed,ed->e", unit[i[part]], unit[j[part]]))
    if flow is not None and coordinates is not None:
        steps = coordinates[j] - coordinates[i]
        lengths = np.linalg.norm(flow[i], axis=1) * np.linalg.norm(steps, axis=1)
        along = np.abs((flow[i] * steps).sum(1))
        values += np.divide(along, lengths, out=np.zeros(len(i)), where=lengths > 0)
    del i
    directed = sp.csr_array((values, j, graph.indptr), shape=graph.shape)
    both = sp.csr_array(directed + directed.T)
    np.multiply(both.data, 0.5, out=both.data)
    return both


def along_flow(coordinates: np.ndarray, flow: np.ndarray, *, length: float, width: float) -> sp.csr_array:
    """Join every spot to those in a rectangle aligned with its flow; in a disc where the flow is zero."""
    positive("length", length)
    positive("width", width)
    coordinates = _points(coordinates)
    candidates = sp.coo_array(within(coordinates, float(np.hypot(length, width))))
    i, j = candidates.row, candidates.col
    unit = _unit(flow)
    step = coordinates[j] - coordinates[i]
    along = np.abs((unit[i] * step).sum(1))
    distance = np.linalg.norm(step, axis=1)
    across = np.sqrt(np.maximum(distance**2 - along**2, 0))
    still = ~unit[i].any(1)
    keep = np.where(still, distance <= width, (along <= length) & (across <= width))
    n = len(coordinates)
    directed = sp.csr_array((np.ones(int(keep.sum()), np.float32), (i[keep], j[keep])), shape=(n, n))
    return sp.csr_array(directed.maximum(sp.csr_array(directed.T)))


def flow_direction(coordinates: np.ndarray, labels: np.ndarray, *, n_neighbors: int = 100) -> np.ndarray:
    """Estimate the direction along which labels do not change, spot by spot: a local Fisher discriminant.

    Among the nearest spots, with W the scatter of positions within labels and S that between the labels' mean
    positions, labels change most along the first eigenvector of W^-1 S; the flow is perpendicular to it.
    Directions have length 1; they are zero where the neighbourhood has one label.
    """
    coordinates = _points(coordinates)
    n = len(coordinates)
    k = min(whole("n_neighbors", n_neighbors, least=1), n)
    index = nearest_rows(coordinates, k)
    direction = np.zeros((n, 2))
    for rows in np.array_split(np.arange(n), max(1, n // 20_000)):  # bounds the memory of the gathered neighbourhoods
        position = coordinates[index[rows]] - coordinates[index[rows]].mean(1, keepdims=True)
        label = labels[index[rows]]
        total = np.einsum("nka,nkb->nab", position, position)
        between = np.zeros_like(total)
        for value in np.unique(label):
            member = (label == value)[..., None]
            count = member.sum(1)
            mean = np.divide((position * member).sum(1), count, out=np.zeros((len(rows), 2)), where=count > 0)
            between += count[..., None] * mean[:, :, None] * mean[:, None, :]
        scale = np.trace(total, axis1=1, axis2=2)[:, None, None] * np.eye(2)
        inner = total - between + 1e-3 * scale + 1e-300 * np.eye(2)
        change = np.linalg.eig(np.linalg.solve(inner, between))
        first = np.take_along_axis(change[1].real, change[0].real.argmax(1)[:, None, None], axis=2)[..., 0]
        mixed = (label != label[:, :1]).any(1)
        direction[rows[mixed]] = np.stack([-first[mixed, 1], first[mixed, 0]], 1)
    return _unit(direction)


def _unit(vectors: np.ndarray) -> np.ndarray:
    """The same directions with length 1; zero stays zero."""
    norm = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, norm, out=np.zeros_like(vectors), where=norm > 0)


def _points(coordinates: np.ndarray) -> np.ndarray:
    points = np.asarray(coordinates)
    if points.ndim != 2:
        msg = f"`coordinates` must have a row for each spot, got shape {points.shape}; give a matrix."
        raise ValueError(msg)
    return finite("coordinates", points, "remove these spots")
