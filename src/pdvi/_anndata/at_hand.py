"""Rows and graphs that need not fit into memory, with fast access by row number, checked as those in memory are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.utils import gen_batches

from pdvi.mixtures.checks import (
    SYMMETRIC,
    asymmetry,
    averaged,
    check_graph,
    check_graph_shape,
    check_weights,
    proper_edges,
    warn_asymmetric,
)

BLOCK = 100_000  # rows of a lazy array that are in memory at once
PASSES = 20  # over a graph on disk, at most: of more rows than 20 blocks, larger blocks are compared


def rows_at_hand(rows: Any, folder: Path) -> np.ndarray:
    """Return the same rows with fast access by number: as they are if in memory, else copied to a file."""
    if isinstance(rows, np.ndarray):
        return rows
    dtype = np.result_type(rows.dtype, np.float32)
    copied = np.lib.format.open_memmap(folder / "rows", "w+", dtype, tuple(map(int, rows.shape)))
    for part in gen_batches(len(copied), BLOCK):
        copied[part] = np.asarray(rows[part])
    return copied


def check_rows(rows: np.ndarray, name: str) -> None:
    """Refuse rows that are no matrix of finite numbers; never more than a block of them is in memory."""
    if rows.ndim != 2 or 0 in rows.shape or rows.dtype.kind not in "fiub":
        msg = f"{name} must hold numbers, a row for each spot, got shape {rows.shape} of {rows.dtype}; give a matrix."
        raise ValueError(msg)
    bad = sum(int((~np.isfinite(rows[part])).sum()) for part in gen_batches(len(rows), BLOCK))
    if bad:
        msg = f"{name} must be finite: {bad} of {rows.size} values are NaN or infinite; remove or impute them."
        raise ValueError(msg)


def graph_at_hand(graph: Any, n_rows: int, folder: Path) -> sp.csr_array:
    """Return the checked graph: in memory if it was, else on disk.

    A lazy graph is copied block of rows by block of rows. For symmetry each is compared (and averaged, if need be) with
    the same block of columns, which are all that is in memory of it.
    """
    if sp.issparse(graph) or isinstance(graph, np.ndarray):
        return check_graph(graph, n_rows)
    lazy = graph
    if not hasattr(graph, "shape"):  # the group of a sparse matrix in a file
        from anndata.io import sparse_dataset

        lazy = sparse_dataset(graph)
    check_graph_shape(lazy.shape, n_rows)
    copied = _on_disk(_checked_blocks(lazy), n_rows, folder / "graph")
    difference = max((asymmetry(*both) for both in _both_directions(copied)), default=0.0)
    if difference > SYMMETRIC * max(copied.data.max(initial=0.0), 1e-300):
        warn_asymmetric()
        copied = _on_disk((averaged(*both) for both in _both_directions(copied)), n_rows, folder / "averaged")
    return copied


def _checked_blocks(lazy: Any) -> Iterator[sp.csr_array]:
    for part in gen_batches(int(lazy.shape[0]), BLOCK):
        rows = lazy[part]
        block = sp.csr_array(rows.compute() if hasattr(rows, "compute") else rows)
        block = block if block.dtype.kind == "f" else block.astype(np.float64)
        check_weights(block.data)
        yield proper_edges(block, part.start)


def _on_disk(blocks: Iterable[sp.csr_array], n_rows: int, path: Path) -> sp.csr_array:
    """Write blocks of rows one after the other; the matrix reads them where they are."""
    files = path.with_suffix(".columns"), path.with_suffix(".weights")
    degrees, dtype = [np.zeros(1, np.int64)], np.dtype(np.float32)
    with open(files[0], "wb") as columns, open(files[1], "wb") as weights:
        for block in blocks:
            block.indices.astype(np.int32).tofile(columns)
            block.data.tofile(weights)
            degrees.append(np.diff(block.indptr))
            dtype = block.dtype
    indptr = np.concatenate(degrees).cumsum()
    if indptr[-1] < 2**31:  # all indices of one type: scipy would copy them otherwise
        indptr = indptr.astype(np.int32)
    values, places = np.empty(0, dtype), np.empty(0, np.int32)
    if indptr[-1]:  # an empty file cannot be mapped
        values, places = np.memmap(files[1], dtype, "r"), np.memmap(files[0], np.int32, "r")
    return sp.csr_array((values, places, indptr), shape=(n_rows, n_rows))


def _both_directions(graph: sp.csr_array) -> Iterator[tuple[sp.csr_array, sp.csr_array]]:
    """Yield every block of rows, and the same block of the transposed graph."""
    # every block of columns is a pass over all entries: hence not many
    for part in gen_batches(graph.shape[0], max(BLOCK, graph.shape[0] // PASSES)):
        yield sp.csr_array(graph[part]), sp.csr_array(graph[:, part].T)
