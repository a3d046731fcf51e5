"""Rows that do not fit into memory: written to a store once, and fitted there by an executor."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from pdvi._base.memory import give_back
from pdvi._base.work_dir import WorkDir
from pdvi.core.problem import Problem
from pdvi.mixtures.build import mixture_shards, write_shards
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.shards.partition import along_space, layout, median_cuts
from pdvi.shards.store import StoreWriter

SHARD_ROWS = 100_000  # at most
SAMPLED_ROWS = 200_000  # that a model is built from
STORE = "rows.store"


class Storage(NamedTuple):
    """Where rows are fitted that are more than ``max_rows``: by an executor, from a store in a folder."""

    executor: Any
    folder: WorkDir
    max_rows: int


class StoredGraph(ShardedGraph):
    """The same as `ShardedGraph` for rows that do not fit into memory; `unshard` removes the store of a problem."""

    def __init__(
        self,
        n_rows: int,
        graph: sp.csr_array,
        coordinates: np.ndarray,
        storage: Storage,
        *,
        n_shards: int,
        beta: float = 1.0,
        sample: np.ndarray | None = None,
    ):
        give_back()
        cuts = median_cuts(coordinates, max(n_shards, -(-n_rows // SHARD_ROWS)))
        self.layout, self.total_weight = layout(cuts, along_space(coordinates)), float(n_rows)
        self.weight, self._blocks = None, None
        self.graph, self.sample, self.beta = graph, sample, float(beta)
        self.executor, self._folder = storage.executor, storage.folder
        self.sampled = slice(None, None, max(1, n_rows // SAMPLED_ROWS))
        self._arrays = {"mask": self.layout.mask.astype(np.float32)}

    def problem(self, model: Any, rows: Any) -> Problem:
        """Return the problem of a mixture of rows as ``model`` sees them, whose shards are written to a store."""
        path = self._folder.new_file(STORE)
        with StoreWriter(path) as writer:
            options = {"covariance": model.covariance, "beta": self.beta, "sample": self.sample}
            halo = write_shards(writer, mixture_shards(rows, self.layout, self.graph, **options))
            writer.finish(halo=halo, rows=self.layout.rows)
        return Problem.from_store(path, model, verify=False)

    def unshard(self, local: Any) -> np.ndarray:
        """Return the probabilities of rows, and remove the store."""
        probabilities = super().unshard(local)
        self._folder.remove(STORE)
        return probabilities
