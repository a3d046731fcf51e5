"""A graph laid over shards: padded neighbour tables, and the rows of other shards that each reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.sparse as sp

from pdvi.shards.partition import Layout


class NeighbourTable(NamedTuple):
    """A graph cut to shards: ``table`` and ``weight`` are (shards, degree, slots), ``halo`` (shards, halo rows).

    A table entry below the number of slots is a row of the same shard, one above a halo row.
    """

    table: np.ndarray
    weight: np.ndarray
    halo: np.ndarray | None


def neighbour_table(graph: sp.csr_array, where: Layout, *, halo: bool = True) -> NeighbourTable:
    """The padded neighbour table of a symmetric graph; without ``halo``, edges between shards are dropped."""
    n_shards, n_slots = where.rows.shape
    slots = where.slots
    row = np.repeat(np.arange(graph.shape[0]), np.diff(graph.indptr))
    source, target, weight = slots[row], slots[graph.indices], graph.data
    crossing = source // n_slots != target // n_slots
    entry = target % n_slots
    ghosts = None
    if halo and crossing.any():
        key = (source[crossing] // n_slots) * (n_shards * n_slots) + target[crossing]
        unique, position = np.unique(key, return_inverse=True)
        reader = unique // (n_shards * n_slots)
        counts = np.bincount(reader, minlength=n_shards)
        first = np.concatenate([[0], np.cumsum(counts)[:-1]])
        rank = np.arange(len(unique)) - first[reader]
        ghosts = np.zeros((n_shards, counts.max()), np.int32)
        ghosts[reader, rank] = unique % (n_shards * n_slots)
        entry[crossing] = n_slots + rank[position]
    else:
        keep = ~crossing
        source, entry, weight, row = source[keep], entry[keep], weight[keep], row[keep]
    degree = np.bincount(row, minlength=graph.shape[0])
    column = np.arange(len(row)) - np.concatenate([[0], np.cumsum(degree)[:-1]])[row]
    deepest = max(1, int(degree.max(initial=0)))
    table = np.zeros((n_shards, deepest, n_slots), np.int32)
    weights = np.zeros((n_shards, deepest, n_slots), np.float32 if weight.dtype == np.float32 else np.float64)
    table[source // n_slots, column, source % n_slots] = entry
    weights[source // n_slots, column, source % n_slots] = weight
    return NeighbourTable(table, weights, ghosts)


def shard_table(
    graph: sp.csr_array, b: int, slots: np.ndarray, n_slots: int, degree: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One shard's part of `neighbour_table`, from the graph's rows in the order of the shard's slots.

    Table and weight are (degree, slots), the halo rows are as many as the shard has.
    """
    row = np.repeat(np.arange(graph.shape[0]), np.diff(graph.indptr))
    column = np.arange(len(row)) - graph.indptr[:-1][row]
    target = slots[graph.indices]
    entry = target % n_slots
    crossing = target // n_slots != b
    halo, rank = np.unique(target[crossing], return_inverse=True)
    entry[crossing] = n_slots + rank
    table, weight = np.zeros((degree, n_slots), np.int32), np.zeros((degree, n_slots), np.float32)
    table[column, row], weight[column, row] = entry, graph.data
    return table, weight, halo.astype(np.int32)
