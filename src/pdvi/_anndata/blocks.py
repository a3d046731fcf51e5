"""Expression that need not fit into memory, read block of rows by block of rows."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from pdvi._anndata.checks import check_numbers, is_sparse

NUMBERS = 16_000_000  # of a dense block: 64 MB in single precision
MOST_ROWS = 100_000


class Part(NamedTuple):
    """Expression of one slide: an array, a sparse matrix, or either on disk or of dask; and which columns count."""

    matrix: Any
    columns: np.ndarray | None = None

    def read(self, begin: int, end: int) -> Any:
        """Return some rows in single precision, sparse or dense as they are."""
        rows = self.matrix[begin:end]
        if type(rows).__module__.startswith("dask."):
            rows = rows.compute(scheduler="threads")  # here, not on a cluster
        rows = sp.csr_array(rows, dtype=np.float32) if is_sparse(rows) else np.asarray(rows, np.float32)
        rows = rows if self.columns is None else rows[:, self.columns]
        if not np.isfinite(np.asarray(rows.data if sp.issparse(rows) else rows)).all():
            msg = f"adata.X must be finite; rows {begin} to {end} have NaN or infinite values."
            raise ValueError(msg)
        return rows


class Blocks:
    """Expression of one slide, or of several with the same genes one below the other, in blocks of rows."""

    def __init__(self, parts: Sequence[Part], n_genes: int):
        for part in parts:
            _check(part.matrix)
        self.parts, self.n_genes = list(parts), n_genes
        self.n_rows = sum(int(part.matrix.shape[0]) for part in parts)
        self._step = int(np.clip(NUMBERS // max(1, n_genes), 1, MOST_ROWS))

    def __iter__(self) -> Iterator[tuple[slice, Any]]:
        """Yield every block with the place of its rows; the next is read meanwhile."""
        with ThreadPoolExecutor(1, thread_name_prefix="pdvi-read-ahead") as thread:
            before = None
            for rows, part, begin in self._places():
                ahead = thread.submit(part.read, begin, begin + rows.stop - rows.start)
                if before is not None:
                    yield before[0], before[1].result()
                before = rows, ahead
            if before is not None:
                yield before[0], before[1].result()

    def signature(self) -> str:
        """Return a text that other expression does not have: its shape, and checksums of a few blocks."""
        places = list(self._places())
        told = [f"{self.n_rows}x{self.n_genes}"]
        for rows, part, begin in (places[0], places[len(places) // 2], places[-1]):
            block = part.read(begin, begin + min(1_000, rows.stop - rows.start))
            told.append(f"{zlib.crc32(np.ascontiguousarray(block.toarray() if is_sparse(block) else block)):x}")
        return "-".join(told)

    def _places(self) -> Iterator[tuple[slice, Part, int]]:
        first = 0
        for part in self.parts:
            n = int(part.matrix.shape[0])
            for begin in range(0, n, self._step):
                yield slice(first + begin, first + min(n, begin + self._step)), part, begin
            first += n


def is_on_disk(matrix: Any) -> bool:
    """Return whether a matrix is neither an array nor a sparse matrix in memory."""
    return matrix is not None and not isinstance(matrix, np.ndarray) and not is_sparse(matrix)


def _check(matrix: Any) -> None:
    check_numbers(matrix)
    if matrix.shape[0] < 2 or matrix.shape[1] < 1:
        msg = f"adata must have at least 2 spots and a gene, got shape {tuple(matrix.shape)}."
        raise ValueError(msg)
    if type(matrix).__name__ in ("CSCDataset", "_CSCDataset"):  # blocks of its rows would each read all of it
        msg = "adata.X must be stored by rows to be read in blocks, got CSC; write it as scipy.sparse.csr_matrix."
        raise ValueError(msg)
