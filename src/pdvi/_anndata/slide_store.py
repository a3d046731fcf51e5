"""From a slide that need not fit into memory to a store of shards on disk."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from pdvi._anndata.checks import SPATIAL
from pdvi.core.model import described
from pdvi.core.problem import Problem
from pdvi.mixtures.build import LARGE, SPARE, EmpiricalBayes, empirical_bayes, potts_model, safe_damping
from pdvi.shards.neighbours import shard_table
from pdvi.shards.partition import Layout, along_space, layout, median_cuts
from pdvi.shards.store import StoreWriter

BLOCK = 100_000  # rows of a lazy array that are in memory at once
DAMPING_SHARDS = 64  # on whose own edges the damping is measured


def write_store(
    path: str | os.PathLike,
    data: Any,
    *,
    n_domains: int | None = None,
    use_rep: str = "X_pca",
    graph_key: str = "potts_weights",
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
        features in obsm, symmetric edge weights in obsp.
    beta
        strength of the coupling between neighbours.
    shard_size
        most spots in a patch. A shard is the unit of reading and of work: a few dozen megabytes are good.
    damping
        of parallel sweeps; by default measured on up to 64 patches (see `mixtures.safe_damping`).
    settings
        starting means and hyper-parameters; by default from k-means on a sample of the spots.
    """
    if isinstance(data, Problem):
        _write_problem(path, data, overwrite)
        return
    if not isinstance(n_domains, int | np.integer) or n_domains < 1:
        msg = f"`n_domains` must be a whole number of at least 1, got {n_domains!r}."
        raise ValueError(msg)
    if not isinstance(shard_size, int | np.integer) or shard_size < 1:
        msg = f"`shard_size` must be a whole number of at least 1, got {shard_size!r}."
        raise ValueError(msg)
    with ExitStack() as stack:
        slide = _open(data, stack)
        writer = stack.enter_context(StoreWriter(path, overwrite=overwrite))
        spatial = np.asarray(_part(slide, "obsm", SPATIAL)[:], np.float32)[:, :2]
        X = _rows_at_hand(_part(slide, "obsm", use_rep), writer.folder)
        graph = _graph_at_hand(_part(slide, "obsp", graph_key), writer.folder)
        where = layout(median_cuts(spatial, -(-len(spatial) // shard_size)), along_space(spatial))
        _write_mixture(writer, X, graph, where, int(n_domains), beta, damping, settings, seed)


def _write_problem(path: str | os.PathLike, problem: Problem, overwrite: bool) -> None:
    if problem.store is not None or not isinstance(problem.shards, dict):
        msg = "`data` must be a problem in memory whose shards are dicts of arrays."
        raise ValueError(msg)
    with StoreWriter(path, overwrite=overwrite) as writer:
        for b in range(problem.n_shards):
            writer.add({name: np.asarray(leaf[b]) for name, leaf in problem.shards.items()})
        halo = None if problem.halo is None else np.asarray(problem.halo)
        writer.finish(halo=halo, model=described(problem.model))


def _write_mixture(
    writer: StoreWriter,
    X: np.ndarray,
    graph: sp.csr_array,
    where: Layout,
    n_domains: int,
    beta: float,
    damping: float | None,
    settings: EmpiricalBayes | None,
    seed: int,
) -> None:
    settings = empirical_bayes(X, n_domains, seed=seed) if settings is None else settings
    slots, mask, fraction = where.slots, where.mask, where.fraction
    degree = max(1, int(np.diff(graph.indptr).max(initial=0)))
    measured = np.unique(np.linspace(0, len(mask) - 1, DAMPING_SHARDS).astype(int))
    if damping is None and graph.shape[0] <= LARGE:
        damping = safe_damping(sp.csr_array(graph) * beta)
    halos, dampings = [], [0.0]
    for b, rows in enumerate(where.rows):
        own = rows[mask[b]]
        x = np.asarray(X[np.maximum(rows, 0)], np.float32)
        edges = sp.csr_array(graph[own])
        edges.data = (edges.data * beta).astype(np.float32)
        table, weight, halo = shard_table(edges, b, slots, len(rows), degree)
        square = np.einsum("nd,nd,n->d", x, x, mask[b].astype(x.dtype), dtype=float, casting="same_kind")
        shard = {"x": x, "fraction": np.float32(fraction[b]), "square": square.astype(np.float32)}
        shard |= {"table": table, "weight": weight}
        writer.add(shard if mask.all() else {**shard, "mask": mask[b].astype(np.float32)})
        halos.append(halo)
        if damping is None and b in measured:
            dampings.append(safe_damping(sp.csr_array(edges[:, own]), spare=SPARE))
    model = potts_model(settings, len(slots), damping=max(dampings) if damping is None else damping)
    writer.finish(halo=_padded(halos), rows=where.rows, model=described(model))


def _padded(halos: list[np.ndarray]) -> np.ndarray | None:
    longest = max(map(len, halos))
    if longest == 0:
        return None
    padded = np.zeros((len(halos), longest), np.int32)
    for line, halo in zip(padded, halos):
        line[: len(halo)] = halo
    return padded


def _open(data: Any, stack: ExitStack) -> Any:
    """Something with obsm and obsp: an AnnData, or the groups of a file, whose arrays stay on disk."""
    if not isinstance(data, str | os.PathLike):
        return {"obsm": data.obsm, "obsp": data.obsp}
    path = Path(data)
    if not path.exists():
        msg = f"no file at {str(path)!r}; give the path of an h5ad file or of a zarr folder."
        raise FileNotFoundError(msg)
    if path.is_dir():
        import zarr

        return zarr.open_group(path, mode="r")
    import h5py

    return stack.enter_context(h5py.File(path, "r"))


def _part(slide: Any, kind: str, key: str) -> Any:
    if key not in slide[kind]:
        maker = {"obsm": "pdvi.pp.prepare(adata)", "obsp": "pdvi.gr.knn_graph(adata)"}[kind]
        found = sorted(slide[kind])
        msg = f"{key!r} not in {kind} of `data` (it has {found}); give another key, or run {maker} first."
        raise ValueError(msg)
    return slide[kind][key]


def _rows_at_hand(rows: Any, folder: Path) -> np.ndarray:
    """The same rows with fast access by number: as they are if in memory, else copied to a file."""
    if isinstance(rows, np.ndarray):
        return rows
    copied = np.lib.format.open_memmap(folder / "rows.tmp", "w+", np.float32, tuple(map(int, rows.shape)))
    for begin in range(0, len(copied), BLOCK):
        copied[begin : begin + BLOCK] = np.asarray(rows[begin : begin + BLOCK])
    return copied


def _graph_at_hand(graph: Any, folder: Path) -> sp.csr_array:
    """The same for the rows of a sparse matrix."""
    rows: Any = graph
    if sp.issparse(graph):
        return sp.csr_array(rows)
    if not hasattr(graph, "shape"):  # the group of a sparse matrix in a file
        from anndata.io import sparse_dataset

        rows = sparse_dataset(graph)
    n, degrees = int(rows.shape[0]), []
    with open(folder / "indices.tmp", "wb") as indices, open(folder / "weights.tmp", "wb") as weights:
        for begin in range(0, n, BLOCK):
            lazy = rows[begin : min(n, begin + BLOCK)]
            block = sp.csr_array(lazy.compute() if hasattr(lazy, "compute") else lazy)
            block.indices.astype(np.int64).tofile(indices)
            block.data.astype(np.float32).tofile(weights)
            degrees.append(np.diff(block.indptr))
    indptr = np.concatenate([[0], *degrees]).cumsum()
    columns = np.memmap(folder / "indices.tmp", np.int64, "r")
    values = np.memmap(folder / "weights.tmp", np.float32, "r")
    return sp.csr_array((values, columns, indptr), shape=(n, n))
