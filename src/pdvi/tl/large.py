"""From counts that are read in blocks to a tissue in files: components, neighbors, averages, graph."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from pdvi._anndata.blocks import Blocks
from pdvi._anndata.checks import coordinates_of, samples_of, say
from pdvi._anndata.keys import SPATIAL_COMPONENTS
from pdvi._base import room
from pdvi._base.stages import Draft, Made, Stages
from pdvi._base.work_dir import WorkDir
from pdvi.executors.disk import Disk, parse_bytes
from pdvi.pp.blocked import Scaled, choose_genes, leading_components, write_expression
from pdvi.pp.tiles import averaged, mean_of_others, nearest_by_tiles
from pdvi.spatial.streaming import Storage
from pdvi.spatial.views import Tissue, View, ViewSettings
from pdvi.tl.missing import EDGES, WEIGHED_NEIGHBORS, are_logarithms, given_graph, separate_samples, usual_graph

if TYPE_CHECKING:
    from anndata import AnnData

# What `pp.spatial_components` takes in `tl.domains`.
COMPONENTS, AGREEING, GENES, CLIP = 30, 6, 2_000, 10.0

FREE = 0.7  # of the memory that is free now: the limit unless told
PROCESS = 0.7e9  # bytes that a process has before it holds any row
ROW = 1_750  # bytes that the fit of a row takes in memory, with its graph and all made of it (2 million: 4.2 GB)


@contextmanager
def tissue_in_files(
    adata: AnnData,
    blocks: Blocks,
    views: tuple[View, ...],
    settings: ViewSettings,
    *,
    graph_key: str,
    sample_key: str | None,
    spatial_key: str,
    memory_limit: str | float | None,
    executor: Any,
    stages: str | os.PathLike[str] | None,
) -> Iterator[tuple[Tissue, ViewSettings]]:
    """Give what ``views`` see, and settings that fit rows that do not fit into memory from a store.

    Its arrays are in files, in a temporary folder or in ``stages``. Components, and how they were made, are written to
    ``adata`` as by `pp.spatial_components`.
    """
    coordinates, samples = coordinates_of(adata, spatial_key), samples_of(adata, sample_key)
    genes, n, log = adata.var_names.to_numpy(), blocks.n_rows, are_logarithms(int(samples.max(initial=0)) + 1)
    given, counts = given_graph(adata, graph_key, sample_key), {v.n_neighbors for v in views if v.kind == "averages"}
    seed, limit = settings.options.seed, free_memory() if memory_limit is None else parse_bytes(memory_limit)
    work = hashlib.sha256(json.dumps([blocks.signature(), sorted(counts), seed, log]).encode())
    work.update(repr(settings).encode())
    for array in (coordinates, samples):
        work.update(np.ascontiguousarray(array))
    work.update("\n".join(map(str, genes)).encode())
    with ExitStack() as stack:
        if stages is None:
            folder = WorkDir(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdvi-stages-")))
        else:
            folder = WorkDir(stages)
            stack.enter_context(folder.lock())
        stage = Stages(folder, work.hexdigest())
        if stage.found:
            say(f"going on with what is in {str(folder.path)!r}.")
        # what has been read of mapped arrays counts as memory as long as they are there: they are opened anew
        chosen, made = _make_arrays(stage, blocks, coordinates, samples, counts, log=log, seed=seed)
        components = stage.load("components")["components"]
        made["params"] |= {"sample_key": sample_key or "", "spatial_key": spatial_key}
        adata.obsm[SPATIAL_COMPONENTS] = np.array(components)
        adata.uns[SPATIAL_COMPONENTS] = made | {"genes": genes[chosen].astype(str)}
        averages = {count: stage.load(f"averages-{count}")["mean"] for count in counts}
        graph = _matrix(stage.load("graph"), n) if given is None else given
        places = separate_samples(coordinates, samples), samples if samples.any() else None
        tissue = Tissue(components, averages, graph, *places)
        max_rows = int(max(0, limit - PROCESS) / ROW) if executor is None else 0
        place = Disk(limit, scratch=folder.path, strict=False) if executor is None else executor
        yield tissue, replace(settings, storage=Storage(place, folder, max(max_rows, settings.config.group_above)))


def _make_arrays(
    stage: Stages,
    blocks: Blocks,
    coordinates: np.ndarray,
    samples: np.ndarray,
    counts: Collection[int],
    *,
    log: bool,
    seed: int,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Make neighbors, components, averages and graph in files; return the chosen genes, and how it was done."""
    n = blocks.n_rows

    def make_neighbors(draft: Draft) -> None:
        k = min(max(*counts, WEIGHED_NEIGHBORS, EDGES), int(np.bincount(samples).max()) - 1)
        nearest_by_tiles(coordinates, samples, draft.array("table", np.int32, (n, k + 1)))

    def make_agreeing(draft: Draft) -> None:
        W = mean_of_others(near, AGREEING)
        _keep(draft, sp.csr_array(W + W.T))

    def make_averages(draft: Draft) -> None:
        averaged(near, count, np.asarray(components), draft.array("mean", np.float32, components.shape))

    near = stage("neighbours", make_neighbors)["table"]
    chosen = stage("genes", lambda draft: choose_genes(draft, blocks, samples, GENES, None))
    expression = stage("expression", lambda draft: write_expression(draft, blocks, samples, chosen, log=log))
    agreeing = _matrix(stage("agreeing", make_agreeing), n)
    found = leading_components(stage, Scaled(expression, CLIP), agreeing, samples, COMPONENTS, seed)
    components = found["components"]
    for count in sorted({*counts, WEIGHED_NEIGHBORS}):
        stage(f"averages-{count}", make_averages)
    weighed = stage.load(f"averages-{WEIGHED_NEIGHBORS}")["mean"]
    stage("graph", lambda draft: _keep(draft, usual_graph(near, weighed)))
    normalized = bool(len(chosen["factors"]))
    made = {
        "params": {
            "n_components": components.shape[1],
            "n_neighbors": AGREEING,
            "n_genes": GENES,
            "layer": "",
            "use_rep": "",
            "clip": CLIP,
            "normalize": normalized,
            "log": log and normalized,
            "seed": int(seed),
        },
        "scale": np.array(expression["scale"]),
        "target": float(chosen["target"]),
        **{name: np.array(found[name]) for name in ("mean", "loadings", "values")},
    }
    return np.asarray(chosen["genes"]), made


def _keep(draft: Draft, matrix: sp.csr_array) -> None:
    matrix.sort_indices()
    draft["indptr"], draft["indices"], draft["data"] = matrix.indptr, matrix.indices, matrix.data


def _matrix(made: Made, n: int) -> sp.csr_array:
    return sp.csr_array((made["data"], made["indices"], made["indptr"]), shape=(n, n))


def free_memory() -> float:
    """Most of the memory that is free, in bytes; 4 GB where the system does not tell."""
    free = room.available()
    return 4e9 if free == float("inf") else FREE * free
