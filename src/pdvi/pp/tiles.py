"""Nearest neighbours of millions of spots, tile by tile: exact, with the memory of a tile."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from scipy.spatial import cKDTree
from sklearn.utils import gen_batches

from pdvi.shards.partition import median_cuts

TILE = 100_000  # spots
BLOCK = 100_000  # rows of a table of neighbours that are worked on at once
MARGIN = 1.5  # times the distance at which so many neighbours are expected


def nearest_by_tiles(coordinates: np.ndarray, samples: np.ndarray, table: np.ndarray, tile: int = TILE) -> None:
    """Fill a table (rows, k + 1) with the spot itself and its k nearest of the same sample, nearest first.

    A tile's spots look for neighbours among those in its box and a margin around. One whose last neighbour is farther
    than the end of the margin may have missed some: it looks again, with a margin twice as wide. Where a sample has
    fewer spots than columns the rest is -1.
    """
    for sample in range(int(samples.max()) + 1):
        own = np.flatnonzero(samples == sample)
        if not len(own):
            continue
        places = coordinates[own]
        k = min(table.shape[1], len(own))
        patch = median_cuts(places, max(1, len(own) // tile))
        order = np.argsort(patch, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(patch[order])) + 1):
            found = own[_of_tile(places, rows, k)]
            if k < table.shape[1]:
                found = np.pad(found, ((0, 0), (0, table.shape[1] - k)), constant_values=-1)
            table[own[rows]] = found


def _of_tile(places: np.ndarray, rows: np.ndarray, k: int) -> np.ndarray:
    low, high = places[rows].min(0), places[rows].max(0)
    extent = np.maximum(high - low, 1e-12 * max(float(np.abs(high).max()), 1.0))
    # were spots spread evenly over the tile, k of them would lie in a ball of about this size
    margin = MARGIN * float(extent.max()) * (k / len(rows)) ** (1 / places.shape[1])
    found = np.empty((len(rows), k), np.int64)
    left = np.arange(len(rows))
    while len(left):
        near = ((places >= low - margin) & (places <= high + margin)).all(1)
        candidates = np.flatnonzero(near)
        if len(candidates) >= k:
            tree = cKDTree(places[candidates])
            distance, index = map(np.asarray, tree.query(places[rows[left]], k=[*range(1, k + 1)], workers=-1))
            room = np.minimum(places[rows[left]] - (low - margin), (high + margin) - places[rows[left]]).min(1)
            sure = (distance[:, -1] < room) | near.all()
            found[left[sure]] = candidates[index[sure]]
            left = left[~sure]
        margin *= 2
    return found


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
