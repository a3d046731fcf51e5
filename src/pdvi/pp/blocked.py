"""Spatial components of expression that is read in blocks: the same as `spatial_components`, in a few passes.

The counts themselves are read three times: for totals and genes, for logarithms and their scales, and (only where genes
are selected) for the trend of variances in between. Logarithms of the selected genes are kept in files, sparse. Each
round of a randomised block Krylov iteration then goes over these twice: for X Q, and for X' (W + W') X Q.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.utils import gen_batches

from pdvi._anndata.blocks import Blocks
from pdvi._anndata.checks import is_sparse
from pdvi._base.stages import Draft, Made, Stages
from pdvi.pp.normalise import check_not_negative, looks_like_counts, to_median, wants_normalizing
from pdvi.pp.spatial_components import scale_of_genes, upright
from pdvi.pp.tiles import BLOCK
from pdvi.pp.variable_genes import Trend, best_ranked

SPARE = 10  # directions beyond those asked for
ROUNDS = 6  # at most; with a panel of 300 genes some three are made
SETTLED = 1e-3  # change of the eigenvalues between rounds, over the largest: what is left is below the noise


class Sums:
    """Sums over the rows of every sample, (samples, columns), in double precision."""

    def __init__(self, samples: np.ndarray, width: int):
        self.samples, self.shape = samples, (int(samples.max()) + 1, width)
        self.sizes = np.bincount(samples, minlength=self.shape[0]).astype(float)
        self.totals: dict[str, np.ndarray] = {}

    def add(self, name: str, rows: slice, block: sp.csr_array, values: np.ndarray) -> None:
        """Add values at the places of those of a sparse block of rows."""
        at = np.repeat(self.samples[rows] * self.shape[1], np.diff(block.indptr)) + block.indices
        found = np.bincount(at, values, minlength=self.shape[0] * self.shape[1]).reshape(self.shape)
        self.totals[name] = self.totals.get(name, 0.0) + found

    def mean(self, name: str) -> np.ndarray:
        """Return the mean row of every sample."""
        return self.totals[name] / np.maximum(self.sizes, 1)[:, None]


def choose_genes(draft: Draft, blocks: Blocks, samples: np.ndarray, n_genes: int, normalize: bool | None) -> None:
    """Write which genes count, and what every row is multiplied by (nothing for logarithms)."""
    sums, totals, counts = Sums(samples, blocks.n_genes), np.zeros(blocks.n_rows), True
    for rows, block in _sparse(blocks):
        counts = counts and looks_like_counts(block.data)
        if normalize:
            check_not_negative(block.data)
        for name, values in (("sum", block.data), ("square", block.data**2), ("present", block.data != 0)):
            sums.add(name, rows, block, values)
        totals[rows] = np.asarray(block.sum(1)).ravel()
    normalize = wants_normalizing(normalize, counts=counts)
    present = sums.totals["present"].sum(0)
    genes = np.flatnonzero(present)
    if not len(genes):
        msg = "adata.X must have at least one value that is not 0; all genes are empty."
        raise ValueError(msg)
    factors, target = np.empty(0, np.float32), np.nan
    if normalize:
        if len(genes) > n_genes:
            genes = genes[_are_most_variable(blocks, sums, genes, n_genes)]
            for rows, block in _sparse(blocks):
                totals[rows] = np.asarray(block[:, genes].sum(1)).ravel()
        target, factors = to_median(totals)
    draft["genes"], draft["factors"], draft["target"] = genes, factors, target
    draft["size"] = int(present[genes].sum())


def _are_most_variable(blocks: Blocks, sums: Sums, genes: np.ndarray, n_genes: int) -> np.ndarray:
    """Return which of some genes vary most (see `variable_genes`): one more pass."""
    means = zip(sums.sizes, sums.mean("sum")[:, genes], sums.mean("square")[:, genes])
    trends = [Trend.of(int(n), mean, square) for n, mean, square in means]
    most = np.stack([trend.most for trend in trends]).astype(np.float32)
    clipped = Sums(sums.samples, len(genes))
    for rows, block in _sparse(blocks):
        X = sp.csr_array(block[:, genes])
        values = np.minimum(X.data, most[np.repeat(sums.samples[rows], np.diff(X.indptr)), X.indices])
        clipped.add("sum", rows, X, values)
        clipped.add("square", rows, X, values.astype(float) ** 2)
    both = zip(trends, clipped.totals["sum"], clipped.totals["square"])
    return best_ranked(np.stack([trend.excess(total, square) for trend, total, square in both]), n_genes)


def write_expression(draft: Draft, blocks: Blocks, samples: np.ndarray, chosen: Made, *, log: bool) -> None:
    """Write expression of the chosen genes, sparse, and the scale of every gene."""
    genes, factors = np.asarray(chosen["genes"]), np.asarray(chosen["factors"])
    size, sums = int(chosen["size"]), Sums(samples, len(genes))
    indptr = np.zeros(blocks.n_rows + 1, np.int64)
    with (
        draft.written("data", np.float32, (size,)) as data,
        draft.written("indices", np.int32, (size,)) as indices,
    ):
        for rows, block in _sparse(blocks):
            X = block if len(genes) == block.shape[1] else sp.csr_array(block[:, genes])
            values = X.data * np.repeat(factors[rows], np.diff(X.indptr)) if len(factors) else X.data
            values = np.log1p(values) if log and len(factors) else values
            sums.add("sum", rows, X, values)
            sums.add("square", rows, X, values.astype(float) ** 2)
            values.astype(np.float32).tofile(data)
            X.indices.astype(np.int32).tofile(indices)
            indptr[rows.start + 1 : rows.stop + 1] = indptr[rows.start] + X.indptr[1:]
    draft["indptr"] = indptr
    draft["scale"] = scale_of_genes(sums.mean("sum"), sums.mean("square"), sums.sizes / sums.sizes.sum())


@dataclass(frozen=True)
class Scaled:
    """Expression as `spatial_components` has it, from files: divided by the scale of genes, clipped."""

    written: Made
    clip: float

    @property
    def n_genes(self) -> int:
        """Return the number of columns."""
        return len(self.written["scale"])

    def __iter__(self) -> Iterator[tuple[slice, sp.csr_array]]:
        """Yield every block of rows; no part of the files stays mapped."""
        indptr, scale = self.written["indptr"], np.asarray(self.written["scale"]).astype(np.float32)
        for rows in gen_batches(len(indptr) - 1, BLOCK):
            begin, end = int(indptr[rows.start]), int(indptr[rows.stop])
            indices = _piece(self.written["indices"], begin, end)
            data = _piece(self.written["data"], begin, end) / scale[indices]
            np.clip(data, -self.clip, self.clip, out=data)
            starts = (np.asarray(indptr[rows.start : rows.stop + 1]) - begin).astype(np.int32)
            yield rows, sp.csr_array((data, indices, starts), shape=(len(starts) - 1, self.n_genes))


def leading_components(
    stages: Stages, X: Scaled, both_ways: sp.csr_array, samples: np.ndarray, count: int, seed: int
) -> Made:
    """Return the projections on the directions in which neighbours agree most, best first, and these directions.

    ``components`` has the projections, ``loadings`` the directions, ``values`` their eigenvalues, ``mean`` that of
    every sample. Every pass is a stage of its own.
    """
    count = min(count, X.n_genes)
    width = min(count + SPARE, X.n_genes)
    next_ = np.linalg.qr(np.random.default_rng(seed).standard_normal((X.n_genes, width)))[0]

    def make_mean(draft: Draft) -> None:
        sums = Sums(samples, X.n_genes)
        for rows, block in X:
            sums.add("sum", rows, block, block.data)
        draft["mean"] = sums.mean("sum")

    mean = stages("mean", make_mean)["mean"]
    basis, image = np.empty((X.n_genes, 0)), np.empty((X.n_genes, 0))
    values, vectors = np.zeros(count), next_[:, :count]
    for number in range(ROUNDS):
        product = _product_with(stages, str(number), X, both_ways, samples, mean, next_)
        basis, image = np.hstack([basis, next_]), np.hstack([image, product])
        matrix = basis.T @ image  # the largest eigenvalues within the subspace
        rising, within = np.linalg.eigh(0.5 * (matrix + matrix.T))
        before, values, vectors = values, rising[::-1][:count], basis @ within[:, ::-1][:, :count]
        left = X.n_genes - basis.shape[1]
        if left <= 0 or np.abs(values - before).max() <= SETTLED * np.abs(values).max():
            break
        rest = product - basis @ (basis.T @ product)
        rest -= basis @ (basis.T @ rest)  # once more: what was taken off is most of it
        next_ = np.linalg.qr(rest)[0][:, :left]
    loadings = upright(vectors)

    def make(draft: Draft) -> None:
        _project(draft.array("components", np.float32, (len(samples), count)), X, samples, mean, loadings)
        draft["loadings"], draft["values"], draft["mean"] = loadings.astype(np.float32), values, np.asarray(mean)

    return stages("components", make)


def _product_with(
    stages: Stages, name: str, X: Scaled, both_ways: sp.csr_array, samples: np.ndarray, mean: np.ndarray, Q: np.ndarray
) -> np.ndarray:
    """Return A Q = X' (W + W') X Q, all rows centred in their samples: two passes."""

    def along(draft: Draft) -> None:
        _project(draft.array("along", np.float32, (len(samples), Q.shape[1])), X, samples, mean, Q)

    def product(draft: Draft) -> None:
        projected = stages(f"along-{name}", along)["along"]
        total, per_sample = np.zeros(Q.shape), np.zeros((len(mean), Q.shape[1]))
        for rows, block in X:
            around = np.asarray(sp.csr_array(both_ways[rows]) @ projected)
            total += block.T @ around
            own = samples[rows]
            member = sp.csr_array((np.ones(len(own), np.float32), (own, np.arange(len(own)))), (len(mean), len(own)))
            per_sample += member @ around
        draft["product"] = total - np.asarray(mean).T @ per_sample

    found = np.array(stages(f"product-{name}", product)["product"])
    stages.forget(f"along-{name}")
    return found


def _project(out: np.ndarray, X: Scaled, samples: np.ndarray, mean: np.ndarray, directions: np.ndarray) -> None:
    """Fill ``out`` with the centred rows' coordinates along directions."""
    V, shift = directions.astype(np.float32), (np.asarray(mean) @ directions).astype(np.float32)
    for rows, block in X:
        out[rows] = block @ V - shift[samples[rows]]


def _sparse(blocks: Blocks) -> Iterator[tuple[slice, sp.csr_array]]:
    for rows, block in blocks:
        block = block if is_sparse(block) else sp.csr_array(block)
        block.eliminate_zeros()
        yield rows, block


def _piece(array: Any, begin: int, end: int) -> np.ndarray:
    """A part of an array, read from its file if it is mapped: mapped pages would count as memory of the process."""
    if not isinstance(array, np.memmap):
        return np.asarray(array[begin:end])
    offset = array.offset + begin * array.itemsize
    return np.fromfile(str(array.filename), array.dtype, end - begin, offset=offset)
