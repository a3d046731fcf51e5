"""From a slide that need not fit into memory to a store of shards on disk."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdvi._anndata.at_hand import check_rows, graph_at_hand, rows_at_hand
from pdvi._anndata.checks import SPATIAL, way_to_adata
from pdvi._anndata.lazy import open_group
from pdvi._base.checks import instance, whole
from pdvi._base.checks import seed as checked_seed
from pdvi.core.model import described
from pdvi.core.problem import Problem
from pdvi.mixtures.build import EmpiricalBayes, empirical_bayes, mixture_shards, potts_model, write_shards
from pdvi.mixtures.checks import check_coordinates, check_coupling
from pdvi.mixtures.sharded_graph import safe_damping
from pdvi.shards.partition import along_space, layout, median_cuts
from pdvi.shards.store import StoreWriter

if TYPE_CHECKING:
    from anndata import AnnData


def write_store(
    path: str | os.PathLike,
    data: Problem | AnnData | str | os.PathLike,
    *,
    n_domains: int | None = None,
    use_rep: str = "X_pca",
    graph_key: str = "potts_weights",
    spatial_key: str = SPATIAL,
    beta: float = 1.0,
    shard_size: int = 100_000,
    damping: float | None = None,
    settings: EmpiricalBayes | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Write the shards of ``data`` to a store that `Problem.from_store` opens, one after the other.

    The store appears under its name when it is whole. Lazy arrays are copied block by block to plain files first.

    Parameters
    ----------
    data
        a `Problem` in memory; or a slide: an AnnData whose features and graph are arrays in memory, on disk or of
        dask, or the path of an h5ad file or zarr folder, of which only coordinates are read whole. The model is then
        the Potts mixture with one patch of tissue per shard. Only ``path`` and ``overwrite`` matter for a `Problem`.
    n_domains
        of the mixture.
    use_rep, graph_key
        features in obsm, symmetric edge weights in obsp (those of both directions are averaged if they differ).
    spatial_key
        coordinates in obsm.
    beta
        strength of the coupling between neighbours.
    shard_size
        most spots in a patch. A shard is the unit of reading and of work: a few dozen megabytes are good.
    damping
        of parallel sweeps; by default as much as keeps the objective from rising (see `mixtures.safe_damping`).
    settings
        starting means and hyper-parameters; by default from k-means on a sample of the spots.
    """
    if isinstance(data, Problem):
        _write_problem(path, data, overwrite)
        return
    kinds = "a Problem, an AnnData, or the path of an h5ad file or zarr folder"
    if not (hasattr(data, "obsm") and hasattr(data, "obsp")):  # pieces of a slide will do, lazy ones say
        instance("data", data, (str, os.PathLike), kinds, way_to_adata(data))
    n_domains = whole("n_domains", n_domains, least=1)
    seed = checked_seed("seed", seed)
    shard_size = whole("shard_size", shard_size, least=1)
    check_coupling(beta, damping=damping)
    with ExitStack() as stack:
        slide = _open(data, stack)
        writer = stack.enter_context(StoreWriter(path, overwrite=overwrite))
        scratch = writer.folder / "scratch"
        scratch.mkdir()
        X = rows_at_hand(_part(slide, "obsm", use_rep), scratch)
        whole("n_domains", n_domains, least=1, most=len(X), of="the number of spots")
        check_rows(X, f"{use_rep!r} in obsm")
        spatial = check_coordinates(_part(slide, "obsm", spatial_key)[:], len(X))[:, :2]
        graph = graph_at_hand(_part(slide, "obsp", graph_key), len(X), scratch)
        where = layout(median_cuts(spatial, -(-len(spatial) // shard_size)), along_space(spatial))
        settings = empirical_bayes(X, n_domains, seed=seed) if settings is None else settings
        damping = safe_damping(graph, beta) if damping is None else damping
        halo = write_shards(writer, mixture_shards(X, where, graph, beta=beta))
        shutil.rmtree(scratch, ignore_errors=True)
        model = potts_model(settings, len(X), damping=damping)
        writer.finish(halo=halo, rows=where.rows, model=described(model))


def _write_problem(path: str | os.PathLike, problem: Problem, overwrite: bool) -> None:
    if problem.store is not None or not isinstance(problem.shards, dict):
        msg = "`data` must be a problem in memory whose shards are dicts of arrays."
        raise ValueError(msg)
    with StoreWriter(path, overwrite=overwrite) as writer:
        for b in range(problem.n_shards):
            writer.add({name: np.asarray(leaf[b]) for name, leaf in problem.shards.items()})
        halo = None if problem.halo is None else np.asarray(problem.halo)
        writer.finish(halo=halo, model=described(problem.model))


def _open(data: Any, stack: ExitStack) -> Any:
    """Something with obsm and obsp: an AnnData, or the groups of a file, whose arrays stay on disk."""
    if not isinstance(data, str | os.PathLike):
        return {"obsm": data.obsm, "obsp": data.obsp}
    group = open_group(Path(data))
    return group if Path(data).is_dir() else stack.enter_context(group)


def _part(slide: Any, kind: str, key: str) -> Any:
    if key not in slide[kind]:
        maker = {"obsm": "pdvi.pp.prepare(adata)", "obsp": "pdvi.gr.knn_graph(adata)"}[kind]
        found = sorted(slide[kind])
        msg = f"{key!r} not in {kind} of `data` (it has {found}); give another key, or run {maker} first."
        raise ValueError(msg)
    return slide[kind][key]
