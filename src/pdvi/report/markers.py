"""Marker genes of domains: Welch's t of each domain against the rest, as scanpy's ``rank_genes_groups`` has it.

Here it takes two passes over blocks of rows, without a normalized copy of the matrix, which may be on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from pdvi._anndata.blocks import Blocks, Part
from pdvi._anndata.checks import is_sparse
from pdvi.pp.normalise import looks_like_counts, times, to_median

if TYPE_CHECKING:
    from anndata import AnnData

LOOKED_AT = 10_000  # values of a block, which tell whether they are counts


class Markers(NamedTuple):
    """Scores of all genes in every domain; rows are domains, columns genes, both as in ``adata``."""

    names: np.ndarray
    scores: np.ndarray
    means: np.ndarray  # of log expression
    shares: np.ndarray  # of spots with any
    expression: Expression

    def best(self, domain: int, n: int) -> list[int]:
        """Return the columns of up to ``n`` genes that are higher in a domain than in the rest, the clearest first."""
        order = np.argsort(-self.scores[domain], kind="stable")[:n]
        return [int(gene) for gene in order if self.scores[domain, gene] > 0]


class Expression:
    """Log expression: spots scaled to the median total and log1p, unless the matrix has logarithms already."""

    def __init__(self, matrix: Any):
        matrix = sp.csr_array(matrix) if is_sparse(matrix) else matrix  # rows of another format are slow to take
        self._blocks = Blocks([Part(matrix)], matrix.shape[1])
        totals, some = np.zeros(self._blocks.n_rows), [np.empty(0, np.float32)]
        for rows, block in self._blocks:
            values = block.data if is_sparse(block) else block.ravel()
            totals[rows] = np.asarray(block.sum(1), float).ravel()
            some += [values[:: max(1, values.size // LOOKED_AT)], values[values < 0][:1]]
        # of spots scaled to the median total; None where the matrix has logarithms already
        self._factors = to_median(totals)[1] if looks_like_counts(np.concatenate(some)) else None

    def blocks(self, genes: list[int] | None = None) -> Iterator[tuple[slice, Any]]:
        """Yield blocks of rows, of some genes or all, sparse if the counts are."""
        for rows, block in self._blocks:
            block = block if genes is None else block[:, genes]
            yield rows, block if self._factors is None else times(block, self._factors[rows], log=True)

    def columns(self, genes: list[int]) -> np.ndarray:
        """Return some genes of all spots, dense."""
        found = np.empty((self._blocks.n_rows, len(genes)), np.float32)
        for rows, block in self.blocks(genes):
            found[rows] = block.toarray() if is_sparse(block) else block
        return found


def find_markers(adata: AnnData, codes: np.ndarray, n_domains: int, *, layer: str | None = None) -> Markers | None:
    """Return the markers of domains given as codes (-1: none); None where ``adata`` has no expression to look at."""
    matrix = adata.X if layer is None else adata.layers[layer]
    if matrix is None or adata.n_vars == 0 or adata.n_obs < 2:
        return None
    expression = Expression(matrix)
    total, square, present = (np.zeros((n_domains, adata.n_vars)) for _ in range(3))
    for rows, block in expression.blocks():
        mine = np.flatnonzero(codes[rows] >= 0)
        member = sp.csr_array(
            (np.ones(len(mine), np.float32), (codes[rows][mine], mine)), shape=(n_domains, block.shape[0])
        )
        for sums, values in ((total, block), (square, block * block), (present, (block != 0).astype(np.float32))):
            found = member @ values
            sums += found.toarray() if is_sparse(found) else found
    sizes = np.bincount(codes[codes >= 0], minlength=n_domains)[:, None].astype(float)
    scores = _welch(total, square, sizes)
    many = np.maximum(sizes, 1)
    return Markers(adata.var_names.to_numpy().astype(str), scores, total / many, present / many, expression)


def _welch(total: np.ndarray, square: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The statistic of each group against all others; 0 where a group is too small to have a variance."""
    rest_total, rest_square, rest = total.sum(0) - total, square.sum(0) - square, sizes.sum() - sizes
    spread = _variance(total, square, sizes) / np.maximum(sizes, 1)
    spread += _variance(rest_total, rest_square, rest) / np.maximum(rest, 1)
    gap = total / np.maximum(sizes, 1) - rest_total / np.maximum(rest, 1)
    usable = (spread > 0) & (sizes > 1) & (rest > 1)
    return np.where(usable, gap / np.sqrt(np.where(usable, spread, 1.0)), 0.0)


def _variance(total: np.ndarray, square: np.ndarray, n: np.ndarray) -> np.ndarray:
    return np.maximum(square - total**2 / np.maximum(n, 1), 0) / np.maximum(n - 1, 1)
