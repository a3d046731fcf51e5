"""A graph laid over shards: padded neighbour tables, and the rows of other shards that each reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp

from pdvi.shards.buckets import degree_bucket
from pdvi.shards.partition import Layout


class NeighbourTable(NamedTuple):
    """Hold one shard's part of a graph: ``table`` and ``weight`` are (degree, slots), ``halo`` has flat slots.

    A table entry below the number of slots is a row of the same shard, one above a halo row.
    """

    table: np.ndarray
    weight: np.ndarray
    halo: np.ndarray


def neighbour_tables(
    graph: sp.csr_array, where: Layout, beta: float = 1.0, *, halo: bool = True
) -> Iterator[NeighbourTable]:
    """Yield the padded neighbour table of every shard, one after the other; the graph may lie on disk.

    Weights are multiplied by ``beta``, and in working precision: in double their table would be the largest array of
    all. Without ``halo`` edges between shards are dropped. All tables have columns for the row with most neighbours.
    """
    dtype = np.dtype(jnp.result_type(float))
    slots, n_slots = where.slots.astype(np.int32), where.rows.shape[1]
    if not halo:
        pairs, patch = sp.coo_array(graph), slots // n_slots
        inside = patch[pairs.row] == patch[pairs.col]
        graph = sp.csr_array((pairs.data[inside], (pairs.row[inside], pairs.col[inside])), shape=graph.shape)
    degree = int(np.diff(graph.indptr).max(initial=0))
    # an even number: half of them can be worked on at once
    degree = degree_bucket(degree) if where.bucketed else max(2, degree + degree % 2)
    for b, rows in enumerate(where.rows):
        taken = np.flatnonzero(rows >= 0)
        edges = sp.csr_array(graph[rows[taken]])
        begin, entry, weights = edges.indptr, slots[edges.indices] - b * n_slots, edges.data
        outside = (entry < 0) | (entry >= n_slots)
        unique, rank = np.unique(entry[outside], return_inverse=True)
        entry[outside] = n_slots + rank
        ghosts = (unique + b * n_slots).astype(np.int32)
        count = np.diff(begin)
        table, weight = np.zeros((degree, n_slots), np.int32), np.zeros((degree, n_slots), dtype)
        for column in range(degree):  # one after the other: all at once would jump through memory
            has = np.flatnonzero(count > column)
            at = begin[has] + column
            table[column, taken[has]], weight[column, taken[has]] = entry[at], beta * weights[at]
        yield NeighbourTable(table, weight, ghosts)
