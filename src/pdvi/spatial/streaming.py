"""Rows that do not fit into memory: written to a store once, and fitted there by an executor."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from pdvi._base.memory import give_back
from pdvi._base.work_dir import WorkDir
from pdvi.core.problem import Problem
from pdvi.mixtures.build import mixture_shards
from pdvi.mixtures.density import MixtureFit
from pdvi.mixtures.fit_mixture import FitOptions, mixture_model, run_fit
from pdvi.mixtures.init import center
from pdvi.mixtures.samples import means_by_sample
from pdvi.mixtures.sharded_graph import pad_halo
from pdvi.shards.partition import along_space, layout, median_cuts
from pdvi.shards.store import StoreWriter

SHARD_ROWS = 100_000  # at most
SAMPLED_ROWS = 200_000  # that the model is built from
STORE = "rows.store"


class Storage(NamedTuple):
    """Where rows are fitted that are more than ``max_rows``: by an executor, from a store in a folder."""

    executor: Any
    folder: WorkDir
    max_rows: int


class LazyRows:
    """Rows minus their (sample's) mean, whitened; made when they are asked for."""

    def __init__(self, X: Any, sample: np.ndarray | None, offset: np.ndarray, whitening: np.ndarray):
        self.X, self.sample, self.offset, self.whitening = X, sample, offset, whitening.astype(np.float32)

    def __len__(self) -> int:
        return len(self.X)

    def __getitem__(self, index: Any) -> np.ndarray:
        shift = self.offset if self.sample is None else self.offset[self.sample[index]]
        return np.asarray(self.X[index] - shift, np.float32) @ self.whitening.T


def fit_from_store(
    X: Any,
    graph: sp.csr_array,
    coordinates: np.ndarray,
    sample: np.ndarray | None,
    start: np.ndarray,
    options: FitOptions,
    *,
    beta: float,
    storage: Storage,
) -> MixtureFit:
    """Fit rows on a graph from probabilities, as `fit_mixture` does in memory; the store is removed at the end."""
    give_back()
    n_shards = max(options.config.patches(len(X)), -(-len(X) // SHARD_ROWS))
    where = layout(median_cuts(coordinates, n_shards), along_space(coordinates))
    every = slice(None, None, max(1, len(X) // SAMPLED_ROWS))
    offset = means_by_sample(X, sample)
    unit = center(np.asarray(X[every])).unit
    some = (X[every] - (offset if sample is None else offset[sample[every]])) / unit
    n_samples = 0 if sample is None else len(offset)
    model, whitening = mixture_model(
        some, start[every], options, unit, n_rows=len(X), n_samples=n_samples, on_graph=True
    )
    whitening = whitening / unit
    path = storage.folder.new_file(STORE)
    halos = []
    with StoreWriter(path) as writer:
        rows = LazyRows(X, sample, offset, whitening)
        shards = mixture_shards(rows, where, graph, covariance=options.covariance, beta=beta, sample=sample)
        for arrays, halo in shards:
            writer.add({name: _single(np.asarray(values)) for name, values in arrays.items()})
            halos.append(halo)
        writer.finish(halo=pad_halo(halos, bucketed=False), rows=where.rows)
    problem = Problem.from_store(path, model, verify=False)
    local = where.shard(np.asarray(start, np.float32)) * where.mask[..., None].astype(np.float32)
    result = run_fit(problem, local, dataclasses.replace(options, executor=storage.executor))
    probabilities = np.asarray(where.unshard(result.local_params))
    storage.folder.remove(STORE)
    return MixtureFit(result, model, probabilities, offset, whitening)


def _single(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32) if values.dtype.kind == "f" else values
