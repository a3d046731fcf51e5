"""The nearest neighbors of every spot as a table, and what is made from it, a block of rows at a time."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from scipy.spatial import cKDTree
from sklearn.utils import gen_batches

from pdvi.shards.nearest import nearest_rows

BLOCK = 100_000  # rows of a table of neighbors that are worked on at once


def neighbor_table(coordinates: np.ndarray, samples: np.ndarray, k: int) -> np.ndarray:
    """Return the spot itself and its k nearest of the same sample, nearest first; -1 where a sample has fewer."""
    k = min(k, int(np.bincount(samples).max()) - 1)
    table = np.full((len(coordinates), k + 1), -1, np.int32)
    for sample in np.unique(samples):
        own = np.flatnonzero(samples == sample)
        table[own, : len(own)] = own[nearest_rows(coordinates[own], k + 1)]
    return table


def nearest_by_tiles(coordinates: np.ndarray, samples: np.ndarray, table: np.ndarray) -> None:
    """Fill such a table, which may lie in a file: all spots of a sample are in one tree, which a block of them asks."""
    for sample in np.unique(samples):
        own = np.flatnonzero(samples == sample)
        k = min(table.shape[1], len(own))
        tree = cKDTree(coordinates[own])
        for block in gen_batches(len(own), BLOCK):
            rows = own[block]
            near = np.asarray(tree.query(coordinates[rows], k=[*range(1, k + 1)], workers=-1)[1])
            table[rows, :k], table[rows, k:] = own[near], -1


def averaged(table: np.ndarray, count: int, features: np.ndarray, out: np.ndarray) -> None:
    """Fill ``out`` with the mean of the features of each spot and its ``count`` nearest, a block of rows at a time."""
    for rows in gen_batches(len(table), BLOCK):
        index = np.asarray(table[rows, : count + 1])
        there = index >= 0
        size = there.sum(1)
        weight = np.repeat((1 / size).astype(np.float32), size)
        indptr = np.concatenate([[0], np.cumsum(size)])
        out[rows] = sp.csr_array((weight, index[there], indptr), shape=(len(index), len(features))) @ features


def nearest_others(table: np.ndarray, k: int) -> sp.csr_array:
    """Return edges of weight 1 from every spot to its k nearest others, as far as its sample has so many."""
    degrees, targets = [np.zeros(1, np.int64)], []
    for rows in gen_batches(len(table), BLOCK):
        index = np.asarray(table[rows, : k + 1])
        others = index != np.arange(rows.start, rows.stop)[:, None]
        others[others.all(1), -1] = False  # among duplicates a spot need not find itself
        others &= index >= 0
        degrees.append(others.sum(1))
        targets.append(index[others].astype(np.int32))
    indptr, indices = np.concatenate(degrees).cumsum(), np.concatenate(targets)
    indptr = indptr.astype(np.int32) if len(indices) < 2**31 else indptr
    return sp.csr_array((np.ones(len(indices), np.float32), indices, indptr), shape=(len(table), len(table)))


def mean_of_others(table: np.ndarray, k: int) -> sp.csr_array:
    """Return the matrix that takes the mean over the k nearest of a spot's sample, without the spot itself."""
    W = nearest_others(table, k)
    degree = np.diff(W.indptr)
    W.data[:] = np.repeat(1 / np.maximum(degree, 1), degree)
    W.sort_indices()
    return W


def nearest_edges(table: np.ndarray, k: int, *, mutual: bool = False) -> sp.csr_array:
    """Return edges of weight 1 between spots of which one (``mutual``: each) is among the k nearest of the other."""
    directed = nearest_others(table, k)
    directed.sort_indices()
    reverse = sp.csr_array(directed.T)
    return sp.csr_array(directed.minimum(reverse) if mutual else directed.maximum(reverse))
