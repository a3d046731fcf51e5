"""Draw the expression of the spots: the counts of their genes, or features in place of these."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from pdvi._anndata.keys import COMPONENTS
from pdvi.datasets.tissue.cells import ENTRIES, LIGANDS, Block

AT_ONCE = 40  # blocks that are collected before they go elsewhere
DIRECT = 8.0  # means above it are drawn as gamma-Poisson, below it by inversion


class Counts:
    """Collects sparse counts, block by block.

    The mean of a gene comes from the types of a spot's cells, its domain, its sample and, for some genes, ligands.
    """

    def __init__(
        self,
        n_genes: int,
        mixtures: np.ndarray,
        n_samples: int,
        depth: float,
        dropout: float,
        sink: Callable[[sp.csr_matrix], None] | None,
        rng: np.random.Generator,
    ):
        def sparse_normal(rows: int, share: float, mean: float, spread: float) -> np.ndarray:
            return rng.normal(mean, spread, (rows, n_genes)) * (rng.random((rows, n_genes)) < share)

        n_domains, n_types = mixtures.shape
        types = np.exp(rng.normal(0, 1, n_genes) + sparse_normal(n_types, 0.08, 1.2, 0.4))
        self.types = (types / types.sum(1, keepdims=True)).astype(np.float32)
        self.regional = np.exp(sparse_normal(n_domains, 0.08, 0.0, 0.5)).astype(np.float32)
        shift = rng.normal(0, 0.15, (n_samples, n_genes)) * (np.arange(n_samples) > 0)[:, None]  # none of the first
        self.batch = np.exp(shift).astype(np.float32)
        response = sparse_normal(LIGANDS, 0.05, 1.0, 0.3)
        self.responding = np.flatnonzero(response.any(0))
        self.response = response[:, self.responding].astype(np.float32)  # in logs
        self.shape = rng.uniform(1, 6, n_genes).astype(np.float32)  # of the gamma in a gene's negative binomial
        self.depth, self.dropout, self.sink = depth, dropout, sink
        self._lock, self._next = Lock(), 0
        self.rows = max(1, ENTRIES // n_genes)
        self.blocks: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def __call__(self, block: Block) -> None:
        """Draw the counts of one block."""
        mean = block.cells @ self.types
        mean *= self.regional[block.domain]
        if len(self.batch) > 1:
            mean *= self.batch[block.sample]
        mean[:, self.responding] *= np.exp(block.ligand @ self.response)
        mean *= (np.float32(self.depth) * block.library)[:, None]
        row, column, value = negative_binomial(mean, self.shape, self.dropout, block.rng)
        self.blocks[block.begin] = np.bincount(row, minlength=len(mean)), column, value
        if self.sink is not None and len(self.blocks) >= AT_ONCE:
            with self._lock:
                self._flush()

    def parts(self) -> dict[str, Any]:
        """Return what AnnData takes: without counts where they went elsewhere."""
        n_genes = len(self.shape)
        names = pd.RangeIndex(1, n_genes + 1).astype(str)
        var = pd.DataFrame({"gradient": np.isin(np.arange(n_genes), self.responding)}, index="gene" + names)
        if self.sink is None:
            return {"X": self._take(), "var": var}
        self._flush()
        return {"var": var}

    def _flush(self) -> None:
        """Give away the blocks that follow those given away before."""
        if self.sink is not None and self._next in self.blocks:
            self.sink(self._take())

    def _take(self) -> sp.csr_matrix:
        """Return the next blocks in a row as one matrix; they are given up while they are copied."""
        ready = []
        while self._next in self.blocks:
            ready.append(self.blocks.pop(self._next))
            self._next += self.rows
        sizes, columns, values = zip(*ready)
        del ready
        starts = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
        starts = starts.astype(np.int32 if starts[-1] < 2**31 else np.int64)
        indices = np.concatenate(columns, dtype=starts.dtype)
        del columns
        shape = len(starts) - 1, len(self.shape)
        return sp.csr_matrix((np.concatenate(values), indices, starts), shape=shape)


class Features:
    """Collects features like principal components, without counts."""

    def __init__(self, n: int, n_features: int, mixtures: np.ndarray, n_samples: int, rng: np.random.Generator):
        spread = np.linspace(1.6, 0.3, n_features)
        n_domains, n_types = mixtures.shape
        tables = [rng.standard_normal((k, n_features)) * spread for k in (n_types, n_domains, n_samples, LIGANDS)]
        self.types, self.regional, self.batch, self.ligands = (table.astype(np.float32) for table in tables)
        self.batch[0] = 0
        self.X = np.empty((n, n_features), np.float32)
        self.rows = max(1, ENTRIES // n_features)

    def __call__(self, block: Block) -> None:
        """Draw the features of one block."""
        out = self.X[block.begin : block.begin + self.rows]
        block.rng.standard_normal(out=out, dtype=np.float32)
        out += block.cells @ self.types
        out += np.float32(0.3) * (self.regional[block.domain] + self.batch[block.sample])
        out += block.ligand @ self.ligands

    def parts(self) -> dict[str, Any]:
        """Return what AnnData takes."""
        return {"obsm": {COMPONENTS: self.X}}


def negative_binomial(
    mean: np.ndarray, shape: np.ndarray, dropout: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw the positive entries (row, column, value) of negative binomial counts with variance mean + mean^2 / shape.

    Most entries are zero, so one uniform number decides that first; only for the others is the rest of the
    distribution looked up.
    """
    zero = np.exp(-shape * np.log1p(mean / shape))
    kept = np.float32(1 - dropout)
    uniform = 1 - rng.random(mean.shape, np.float32)  # in (0, 1]
    positive = (1 - zero) * kept
    row, column = np.nonzero(uniform <= positive)
    at = row * mean.shape[1] + column
    m, r = mean.ravel()[at].astype(float), shape[column].astype(float)
    value = np.ones(len(at), np.float32)
    large = m > DIRECT
    value[large] = np.maximum(rng.poisson(rng.gamma(r[large]) * m[large] / r[large]), 1)
    # the tail probability of what was drawn, to be compared with P(count > x)
    left = np.flatnonzero(~large)
    m, r, tail = m[left], r[left], uniform.ravel()[at[left]] / float(kept)
    q = m / (r + m)
    probability = (r / (r + m)) ** r * r * q
    above = -np.expm1(r * np.log1p(-q)) - probability
    x = 1.0
    while True:
        more = (tail <= above) & (probability > 1e-12)
        left, r, q, tail, probability, above = (v[more] for v in (left, r, q, tail, probability, above))
        if not len(left):
            break
        probability *= q * (x + r) / (x + 1)
        above -= probability
        x += 1
        value[left] = x
    return row, column.astype(np.int32), value
