"""What a mixture asks of its arrays, in memory and in a store alike."""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp

from pdvi._base.checks import LARGEST, at_least, factor, finite, positive, seed

SYMMETRIC = 1e-6  # weights of both directions may differ by this part of the largest: rounding, not direction


def check_graph(graph: Any, n_rows: int) -> sp.csr_array:
    """Return a symmetric sparse matrix of non-negative, finite weights without self-loops; the given one is kept."""
    checked = _matrix(graph)
    if checked.dtype.kind != "f":
        checked = checked.astype(np.float64)
    check_graph_shape(checked.shape, n_rows)
    check_weights(checked.data)
    checked = proper_edges(checked)
    reverse = sp.csr_array(checked.T)
    if asymmetry(checked, reverse) > SYMMETRIC * checked.data.max(initial=1e-300):
        warn_asymmetric()
        checked = averaged(checked, reverse)
    return checked


def _matrix(graph: Any) -> sp.csr_array:
    given: Any = graph if sp.issparse(graph) else np.asarray(graph)
    if given.ndim != 2 or given.dtype.kind not in "fiub":
        what = f"shape {given.shape} of {given.dtype}"
        msg = f"`graph` must be a matrix of edge weights, a row for each row of X, got {what}; give a sparse matrix."
        raise ValueError(msg)
    return sp.csr_array(given)


def check_graph_shape(shape: tuple[int, ...], n_rows: int) -> None:
    """Refuse a graph that is not one of the rows."""
    if tuple(shape) != (n_rows, n_rows):
        msg = f"`graph` must have a row and a column for each of the {n_rows} rows of X, got shape {tuple(shape)}."
        raise ValueError(msg)


def check_weights(weights: np.ndarray) -> None:
    """Refuse weights that are negative or not finite."""
    good = np.isfinite(weights) & (weights >= 0)
    if not good.all():
        bad = float(weights[~good][0])
        msg = f"`graph` must have finite weights of at least 0, got {bad!r}; clip or remove such edges."
        raise ValueError(msg)
    if weights.max(initial=0.0) > LARGEST:
        msg = f"`graph` must have weights of at most {LARGEST:g}, got {weights.max():g}; divide them by their mean."
        raise ValueError(msg)


def proper_edges(block: sp.csr_array, first_row: int = 0) -> sp.csr_array:
    """Return rows of a graph from ``first_row`` on in order of their columns, without self-loops and zeros."""
    if not block.has_canonical_format:
        block = block.copy()
        block.sum_duplicates()
    row = np.repeat(np.arange(first_row, first_row + block.shape[0]), np.diff(block.indptr))
    keep = (row != block.indices) & (block.data != 0)
    if keep.all():
        return block
    kept = (block.data[keep], (row[keep] - first_row, block.indices[keep]))
    return sp.csr_array(kept, shape=block.shape)


def asymmetry(graph: sp.csr_array, reverse: sp.csr_array) -> float:
    """Return the largest difference between an edge's weight and its reverse's."""
    if np.array_equal(graph.indptr, reverse.indptr) and np.array_equal(graph.indices, reverse.indices):
        return float(np.abs(graph.data - reverse.data).max(initial=0.0))  # without a sum of two sparse matrices
    return float(abs(graph - reverse).max())


def averaged(graph: sp.csr_array, reverse: sp.csr_array) -> sp.csr_array:
    """Return the mean of the weights of both directions."""
    return sp.csr_array((graph + reverse) * 0.5)


def warn_asymmetric() -> None:
    """Tell that a graph had directions."""
    warnings.warn("`graph` is not symmetric; the weights of both directions are averaged.", stacklevel=4)


def check_coupling(beta: Any, temperature: Any = 1.0, damping: Any = None) -> float:
    """Return the strength; refuse a bad one, a bad temperature or damping (None: to be chosen)."""
    factor("beta", at_least("beta", beta))
    factor("temperature", positive("temperature", temperature))
    if damping is not None:
        at_least("damping", damping)
    return float(beta)


def check_coordinates(coordinates: Any, n_rows: int) -> np.ndarray:
    """Return a finite matrix with one row per row of X."""
    coordinates = np.asarray(coordinates, float)
    if coordinates.ndim != 2 or len(coordinates) != n_rows:
        msg = f"`coordinates` must have one row for each of the {n_rows} rows of X, got shape {coordinates.shape}."
        raise ValueError(msg)
    if not np.isfinite(coordinates).all():
        bad = int((~np.isfinite(coordinates).all(1)).sum())
        msg = f"`coordinates` must be finite: {bad} of {n_rows} rows are not; remove these spots."
        raise ValueError(msg)
    return coordinates


def check_probabilities(start: Any, shape: tuple[int, int]) -> np.ndarray:
    """Return one row of probabilities for each row of X."""
    start = np.asarray(start, np.result_type(jnp.result_type(float)))
    if start.shape != shape or not (start >= 0).all() or not np.allclose(start.sum(1), 1, atol=1e-3):
        msg = f"`start` must have rows of {shape[1]} probabilities for {shape[0]} rows of X, got shape {start.shape}"
        msg += "." if start.shape != shape else ", whose rows do not all add up to 1; divide each by its sum."
        raise ValueError(msg)
    return start


def check_means(means: Any, shape: tuple[int, int]) -> np.ndarray:
    """Return a finite mean for each component."""
    means = np.asarray(means)
    if means.shape != shape or means.dtype.kind not in "fiu":
        msg = f"`means_init` must have {shape[0]} rows of {shape[1]} numbers, got shape {means.shape} of {means.dtype}."
        raise ValueError(msg)
    return finite("means_init", means.astype(float), "give numbers")


def check_shares(shares: Any, n_components: int) -> np.ndarray:
    """Return the share of each component; they add up to 1."""
    shares = np.asarray(shares)
    good = shares.shape == (n_components,) and shares.dtype.kind in "fiu" and bool((shares >= 0).all())
    if not good or not np.isclose(shares.sum(), 1, atol=1e-3):
        msg = f"`weights_init` must be {n_components} numbers of at least 0 that add up to 1, got {shares!r}."
        raise ValueError(msg)
    return shares.astype(float)


def weighted_rows(X: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the rows that count, with their weights; where weights are few whole numbers, rows repeated instead."""
    real = weight > 0
    if int(real.sum()) < 2:
        msg = f"`sample_weight` must be above 0 for at least 2 rows, got {int(real.sum())}."
        raise ValueError(msg)
    X, weight = X[real], weight[real]
    if (weight == np.round(weight)).all() and weight.sum() <= 8 * len(X):
        return np.repeat(X, weight.astype(int), axis=0), None
    return X, weight


def check_random(value: Any) -> None:
    """Refuse what scikit-learn would not take as a random state, by name."""
    if value is None or isinstance(value, np.random.RandomState) or value is np.random:
        return
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        seed("random_state", value)
        return
    msg = f"`random_state` must be a whole number, a numpy.random.RandomState or None, got {value!r}."
    raise ValueError(msg)


def in_order(X: np.ndarray) -> np.ndarray:
    """Return the rows' numbers by size, so that nothing depends on the order in which they come; three columns decide.

    Only rows that have their first number in common are compared in the others.
    """
    order = np.argsort(X[:, 0])
    same = np.diff(X[order, 0]) == 0
    tied = np.append(same, False) | np.insert(same, 0, False)
    among = order[tied]
    order[tied] = among[np.lexsort(X[among].T[2::-1])]
    return order
