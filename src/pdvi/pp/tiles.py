"""Nearest neighbours of millions of spots, a block of rows at a time, and what is made from their table."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from scipy.spatial import cKDTree
from sklearn.utils import gen_batches

BLOCK = 100_000  # rows of a table of neighbours that are worked on at once


def nearest_by_tiles(coordinates: np.ndarray, samples: np.ndarray, table: np.ndarray) -> None:
    """Fill a table (rows, k + 1) with the spot itself and its k nearest of the same sample, nearest first.

    All spots of a sample are in one tree, which a block of them asks at a time. Where a sample has fewer spots than
    columns the rest is -1.
    """
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
