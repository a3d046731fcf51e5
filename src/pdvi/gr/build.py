"""Spatial graphs as symmetric weights in ``obsp``, as scverse tools expect them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp

from pdvi import graphs
from pdvi._anndata.checks import coordinates_of, features_of, samples_of
from pdvi.shards.partition import grid, median_cuts

KEY = "potts_weights"


def knn_graph(
    adata: Any,
    *,
    n_neighbors: int = 8,
    mutual: bool = False,
    tau: float = 1.0,
    use_rep: str | None = None,
    sample_key: str | None = None,
    key_added: str = KEY,
) -> None:
    """Edges between nearest neighbours, weighted; to ``obsp[key_added]``.

    ``mutual`` keeps the pairs that are neighbours of each other (the paper), else of one of the two. Weights are
    tau (cos(x_i, x_l) + 1) with x from ``obsm[use_rep]``, centred (by default "X_neighborhood" if there is one, else
    "X_pca"; all weights are 1 without either).
    """

    def edges(coordinates: np.ndarray, rows: np.ndarray) -> sp.csr_array:
        k = min(n_neighbors, len(coordinates) - 1)
        return graphs.nearest(coordinates, k, mutual=mutual) if k >= 1 else sp.csr_array((1, 1))

    _build(adata, edges, sample_key, key_added)
    weights(adata, tau=tau, use_rep=use_rep, key=key_added)


def radius_graph(
    adata: Any,
    *,
    radius: float,
    tau: float = 1.0,
    use_rep: str | None = None,
    sample_key: str | None = None,
    key_added: str = KEY,
) -> None:
    """Edges between spots at most ``radius`` apart, weighted as in `knn_graph`."""
    _build(adata, lambda coordinates, rows: graphs.within(coordinates, radius), sample_key, key_added)
    weights(adata, tau=tau, use_rep=use_rep, key=key_added)


def flow_graph(
    adata: Any,
    *,
    length: float,
    width: float,
    tau: float = 1.0,
    use_rep: str | None = None,
    flow_key: str = "flow",
    sample_key: str | None = None,
    key_added: str = KEY,
) -> None:
    """Edges to the spots in a rectangle along the flow: at most ``length`` along and ``width`` across it.

    An edge counts if one of its two ends sees the other in its rectangle; where the flow is zero the rectangle is
    a disc of radius ``width``. Weights have the paper's flow term too.
    """
    direction = features_of(adata, flow_key, "pdvi.gr.flow(adata, labels_key=...)")
    _build(
        adata,
        lambda xy, rows: graphs.along_flow(xy, direction[rows], length=length, width=width),
        sample_key,
        key_added,
    )
    weights(adata, tau=tau, use_rep=use_rep, flow_key=flow_key, key=key_added)


def flow(
    adata: Any, *, labels_key: str, n_neighbors: int = 100, sample_key: str | None = None, key_added: str = "flow"
) -> None:
    """The direction along which labels do not change, to ``obsm[key_added]``; zero where there is but one label."""
    if labels_key not in adata.obs:
        msg = f"{labels_key!r} not in adata.obs (it has {sorted(adata.obs)}); run pdvi.tl.domains(adata, ...) first."
        raise ValueError(msg)
    coordinates, samples = coordinates_of(adata)[:, :2], samples_of(adata, sample_key)
    labels = np.unique(adata.obs[labels_key].astype(str).to_numpy(), return_inverse=True)[1]
    direction = np.zeros_like(coordinates)
    for sample in np.unique(samples):
        rows = np.flatnonzero(samples == sample)
        direction[rows] = graphs.flow_direction(coordinates[rows], labels[rows], n_neighbors=n_neighbors)
    adata.obsm[key_added] = direction.astype(np.float32)


def weights(
    adata: Any, *, tau: float = 1.0, use_rep: str | None = None, flow_key: str | None = None, key: str = KEY
) -> None:
    """The paper's edge weights r_il, symmetric, in place of those in ``obsp[key]``."""
    if key not in adata.obsp:
        msg = f"{key!r} not in adata.obsp (it has {sorted(adata.obsp)}); run pdvi.gr.knn_graph(adata) first."
        raise ValueError(msg)
    graph = sp.csr_array(adata.obsp[key])
    if use_rep is None:
        use_rep = next((name for name in ("X_neighborhood", "X_pca") if name in adata.obsm), None)
    if use_rep is None:
        return  # no features yet: all edges weigh the same
    features = features_of(adata, use_rep, "pdvi.pp.prepare(adata)")
    direction = None if flow_key is None else features_of(adata, flow_key, "pdvi.gr.flow(adata, labels_key=...)")
    weighted = graphs.weights(graph, features - features.mean(0), coordinates_of(adata)[:, :2], direction, tau=tau)
    adata.obsp[key] = sp.csr_matrix(weighted)


def partition(
    adata: Any,
    *,
    n_patches: int = 32,
    cells: tuple[int, int] | None = None,
    key_added: str = "patch",
) -> None:
    """The patch of every spot, to ``obs[key_added]``: balanced median cuts, or a grid of ``cells`` (nx, ny)."""
    coordinates = coordinates_of(adata)[:, :2]
    adata.obs[key_added] = median_cuts(coordinates, n_patches) if cells is None else grid(coordinates, *cells)


def _build(
    adata: Any,
    edges: Callable[[np.ndarray, np.ndarray], sp.csr_array],
    sample_key: str | None,
    key_added: str,
) -> None:
    """One graph per sample, so that no edge joins two samples."""
    coordinates, samples = coordinates_of(adata)[:, :2], samples_of(adata, sample_key)
    sources, targets = [], []
    for sample in np.unique(samples):
        rows = np.flatnonzero(samples == sample)
        found = sp.coo_array(edges(coordinates[rows], rows))
        sources.append(rows[found.row])
        targets.append(rows[found.col])
    i, j = np.concatenate(sources), np.concatenate(targets)
    shape = (adata.n_obs, adata.n_obs)
    adata.obsp[key_added] = sp.csr_matrix((np.ones(len(i), np.float32), (i, j)), shape=shape)
