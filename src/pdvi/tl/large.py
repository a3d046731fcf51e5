"""From counts that are read in blocks to a tissue in files: components, neighbours, averages, graph."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from pdvi import graphs
from pdvi._anndata.blocks import Blocks
from pdvi._anndata.checks import say
from pdvi._base import room
from pdvi._base.stages import Draft, Made, Stages
from pdvi._base.work_dir import WorkDir
from pdvi.executors.disk import Disk, parse_bytes
from pdvi.mixtures.checks import proper_edges
from pdvi.pp.blocked import Scaled, choose_genes, leading_components, write_expression
from pdvi.pp.tiles import averaged, nearest_by_tiles, nearest_others
from pdvi.spatial.streaming import Storage
from pdvi.spatial.views import Tissue, ViewSettings
from pdvi.tl.missing import are_logarithms

# What `pp.spatial_components`, `pp.neighborhood` and `gr.knn_graph` take in `tl.domains`.
COMPONENTS, AGREEING, GENES, CLIP = 30, 6, 2_000, 10.0
WEIGHED_NEIGHBORS, WEIGHED_COMPONENTS = 30, 20
EDGES = 8

FREE = 0.7  # of the memory that is free now: the limit unless told
PROCESS = 0.7e9  # bytes that a process has before it holds any row
ROW = 1_750  # bytes that the fit of a row takes in memory, with its graph and all made of it (2 million: 4.2 GB)


@dataclass(frozen=True)
class LargeTissue:
    """Expression in blocks, with all that is known of its rows, and the counts of neighbours to be averaged."""

    blocks: Blocks
    coordinates: np.ndarray
    samples: np.ndarray
    genes: np.ndarray
    counts: Collection[int]
    seed: int = 0

    @contextmanager
    def prepared(
        self,
        settings: ViewSettings,
        *,
        memory_limit: str | float | None = None,
        executor: Any = None,
        stages: str | os.PathLike[str] | None = None,
    ) -> Iterator[tuple[Tissue, dict[str, Any], ViewSettings]]:
        """Give what `pp.spatial_components`, `pp.neighborhood` and `gr.knn_graph` would make in `tl.domains`.

        With it come how components were made, for ``uns``, and settings that fit rows that would not fit into memory
        from a store in the same folder. A temporary folder is removed at the end; one that was given is not.
        """
        limit = free_memory() if memory_limit is None else parse_bytes(memory_limit)
        with _folder(stages) as folder:
            kept = Stages(folder, self._signature(settings))
            if kept.found:
                say(f"going on with what is in {str(folder.path)!r}.")
            max_rows = int(max(0, limit - PROCESS) / ROW) if executor is None else 0
            place = Disk(limit, scratch=folder.path, strict=False) if executor is None else executor
            storage = Storage(place, folder, max(max_rows, settings.config.group_above))
            yield *self._made(kept), replace(settings, storage=storage)

    def _made(self, stages: Stages) -> tuple[Tissue, dict[str, Any]]:
        counts, n, samples = sorted({*self.counts, WEIGHED_NEIGHBORS}), self.blocks.n_rows, self.samples
        k = min(max(*counts, EDGES), int(np.bincount(samples).max()) - 1)

        def neighbours(draft: Draft) -> None:
            nearest_by_tiles(self.coordinates, samples, draft.array("table", np.int32, (n, k + 1)))

        near = stages("neighbours", neighbours)["table"]
        chosen = stages("genes", lambda draft: choose_genes(draft, self.blocks, samples, GENES, None))
        expression = stages(
            "expression", lambda draft: write_expression(draft, self.blocks, samples, chosen, log=self._log)
        )
        agreeing = stages("agreeing", lambda draft: _agreeing(draft, near))
        X = Scaled(expression, CLIP)
        found = leading_components(stages, X, _matrix(agreeing, n), samples, COMPONENTS, self.seed)
        components = found["components"]
        averages = {count: _averages(stages, near, count, components) for count in counts}
        stages("graph", lambda draft: _graph(draft, near, averages[WEIGHED_NEIGHBORS]))
        made = {
            "params": {
                "n_components": components.shape[1],
                "n_neighbors": AGREEING,
                "n_genes": GENES,
                "layer": "",
                "use_rep": "",
                "clip": CLIP,
                "normalize": bool(len(chosen["factors"])),
                "log": self._log and bool(len(chosen["factors"])),
                "seed": int(self.seed),
            },
            "scale": np.array(expression["scale"]),
            "genes": self.genes[np.asarray(chosen["genes"])].astype(str),
            "target": float(chosen["target"]),
            **{name: np.array(found[name]) for name in ("mean", "loadings", "values")},
        }
        # opened anew: what has been read of those above counts as memory as long as they are there
        tissue = Tissue(
            stages.load("components")["components"],
            {count: stages.load(f"averages-{count}")["mean"] for count in self.counts},
            _matrix(stages.load("graph"), n),
            self.coordinates,
            samples,
        )
        return tissue, made

    @property
    def _log(self) -> bool:
        return are_logarithms(int(self.samples.max(initial=0)) + 1)

    def _signature(self, settings: ViewSettings) -> str:
        """Return a text that names this piece of work: other data, or other settings, have another one."""
        told = hashlib.sha256(json.dumps([self.blocks.signature(), sorted(self.counts), self.seed, self._log]).encode())
        told.update(repr(settings).encode())
        for array in (self.coordinates, self.samples):
            told.update(np.ascontiguousarray(array))
        told.update("\n".join(map(str, self.genes)).encode())
        return told.hexdigest()


def _agreeing(draft: Draft, near: np.ndarray) -> None:
    """W + W', where W takes the mean over neighbours without the spot itself."""
    W = nearest_others(near, AGREEING)
    degree = np.diff(W.indptr)
    W.data[:] = np.repeat(1 / np.maximum(degree, 1), degree)
    _keep(draft, sp.csr_array(W + W.T))


def _averages(stages: Stages, near: np.ndarray, count: int, components: np.ndarray) -> np.ndarray:
    def make(draft: Draft) -> None:
        averaged(near, count, np.asarray(components), draft.array("mean", np.float32, components.shape))

    return stages(f"averages-{count}", make)["mean"]


def _graph(draft: Draft, near: np.ndarray, features: np.ndarray) -> None:
    directed = nearest_others(near, EDGES)
    edges = sp.csr_array(directed.maximum(sp.csr_array(directed.T)))
    del directed
    features = np.array(features[:, :WEIGHED_COMPONENTS])
    features -= features.mean(0)
    _keep(draft, proper_edges(graphs.weights(edges, features)))


def _keep(draft: Draft, matrix: sp.csr_array) -> None:
    matrix.sort_indices()
    draft["indptr"], draft["indices"], draft["data"] = matrix.indptr, matrix.indices, matrix.data


def _matrix(made: Made, n: int) -> sp.csr_array:
    return sp.csr_array((made["data"], made["indices"], made["indptr"]), shape=(n, n))


@contextmanager
def _folder(given: str | os.PathLike[str] | None) -> Iterator[WorkDir]:
    if given is None:
        with tempfile.TemporaryDirectory(prefix="pdvi-stages-") as temporary:
            yield WorkDir(temporary)
        return
    folder = WorkDir(given)
    with folder.lock():
        yield folder


def free_memory() -> float:
    """Most of the memory that is free, in bytes; 4 GB where the system does not tell."""
    free = room.available()
    return 4e9 if free == float("inf") else FREE * free
