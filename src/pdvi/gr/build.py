"""Spatial graphs as symmetric weights in ``obsp``, as scverse tools expect them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp

from pdvi import graphs
from pdvi._anndata.checks import MAKES_DOMAINS, coordinates_of, features_of, samples_of, say, to_change
from pdvi._anndata.keys import COMPONENTS, FLOW, NEIGHBORHOOD, PATCH, SPATIAL, WEIGHTS
from pdvi._base.checks import factor, key_in, positive, whole, wholes
from pdvi.pp.tiles import nearest_edges, neighbor_table
from pdvi.shards.partition import grid, median_cuts

if TYPE_CHECKING:
    from anndata import AnnData

MAKES_FLOW = "pdvi.gr.flow(adata, labels_key=...)"


def knn_graph(
    adata: AnnData,
    *,
    n_neighbors: int = 8,
    mutual: bool = False,
    tau: float = 1.0,
    use_rep: str | None = None,
    sample_key: str | None = None,
    spatial_key: str = SPATIAL,
    key_added: str = WEIGHTS,
    copy: bool = False,
) -> AnnData | None:
    """Join every spot to its nearest neighbours, and write the weighted edges to ``obsp[key_added]``.

    ``mutual`` keeps the pairs that are neighbours of each other (the paper), else of one of the two. Weights are
    tau (cos(x_i, x_l) + 1) with x from ``obsm[use_rep]``, centred (by default "X_neighborhood" if there is one, else
    "X_pca"; all weights are 1 without either).

    Parameters
    ----------
    n_neighbors
        how many neighbours a spot has; at most all other spots of its sample.
    tau
        how much similar features count, at least 0.
    sample_key
        a column of obs that tells samples apart: no edge joins two of them.
    spatial_key
        coordinates in obsm.
    copy
        change and return a copy of ``adata`` instead of ``adata`` itself.
    """
    whole("n_neighbors", n_neighbors, least=1)
    factor("tau", tau)
    adata = to_change(adata, copy=copy)
    coordinates, samples = coordinates_of(adata, spatial_key), samples_of(adata, sample_key)
    edges = nearest_edges(neighbor_table(coordinates, samples, n_neighbors), n_neighbors, mutual=mutual)
    adata.obsp[key_added] = sp.csr_matrix(edges)
    weights(adata, tau=tau, use_rep=use_rep, spatial_key=spatial_key, key=key_added)
    return adata if copy else None


def radius_graph(
    adata: AnnData,
    *,
    radius: float,
    tau: float = 1.0,
    use_rep: str | None = None,
    sample_key: str | None = None,
    spatial_key: str = SPATIAL,
    key_added: str = WEIGHTS,
    copy: bool = False,
) -> AnnData | None:
    """Join spots at most ``radius`` apart; weights and other parameters are those of `knn_graph`."""
    positive("radius", radius)
    factor("tau", tau)
    adata = to_change(adata, copy=copy)
    coordinates, samples = coordinates_of(adata, spatial_key), samples_of(adata, sample_key)
    edges = graphs.by_sample(samples, lambda rows: graphs.within(coordinates[rows], radius))
    adata.obsp[key_added] = sp.csr_matrix(edges)
    weights(adata, tau=tau, use_rep=use_rep, spatial_key=spatial_key, key=key_added)
    return adata if copy else None


def flow_graph(
    adata: AnnData,
    *,
    length: float,
    width: float,
    tau: float = 1.0,
    use_rep: str | None = None,
    flow_key: str = FLOW,
    sample_key: str | None = None,
    spatial_key: str = SPATIAL,
    key_added: str = WEIGHTS,
    copy: bool = False,
) -> AnnData | None:
    """Join every spot to those in a rectangle along its flow: at most ``length`` along and ``width`` across it.

    An edge counts if one of its two ends sees the other in its rectangle; where the flow is zero the rectangle is
    a disc of radius ``width``. Weights are those of `knn_graph` and the paper's flow term.
    """
    positive("length", length)
    positive("width", width)
    factor("tau", tau)
    adata = to_change(adata, copy=copy)
    direction = features_of(adata, flow_key, MAKES_FLOW)
    _say_flat(adata, spatial_key)
    coordinates, samples = coordinates_of(adata, spatial_key)[:, :2], samples_of(adata, sample_key)

    def along(rows: np.ndarray) -> sp.csr_array:
        return graphs.along_flow(coordinates[rows], direction[rows], length=length, width=width)

    adata.obsp[key_added] = sp.csr_matrix(graphs.by_sample(samples, along))
    weights(adata, tau=tau, use_rep=use_rep, flow_key=flow_key, spatial_key=spatial_key, key=key_added)
    return adata if copy else None


def flow(
    adata: AnnData,
    *,
    labels_key: str,
    n_neighbors: int = 100,
    sample_key: str | None = None,
    spatial_key: str = SPATIAL,
    key_added: str = FLOW,
    copy: bool = False,
) -> AnnData | None:
    """Write the direction along which labels do not change to ``obsm[key_added]``; zero where there is but one label.

    Parameters
    ----------
    labels_key
        a column of obs, such as "domain".
    n_neighbors
        how many of the nearest spots of the same sample the direction is estimated from.
    """
    whole("n_neighbors", n_neighbors, least=1)
    adata = to_change(adata, copy=copy)
    key_in(adata.obs, labels_key, "adata.obs", MAKES_DOMAINS)
    _say_flat(adata, spatial_key)
    coordinates, samples = coordinates_of(adata, spatial_key)[:, :2], samples_of(adata, sample_key)
    labels = np.unique(adata.obs[labels_key].astype(str).to_numpy(), return_inverse=True)[1]
    direction = np.zeros_like(coordinates)
    for sample in np.unique(samples):
        rows = np.flatnonzero(samples == sample)
        direction[rows] = graphs.flow_direction(coordinates[rows], labels[rows], n_neighbors=n_neighbors)
    adata.obsm[key_added] = direction.astype(np.float32)
    return adata if copy else None


def weights(
    adata: AnnData,
    *,
    tau: float = 1.0,
    use_rep: str | None = None,
    flow_key: str | None = None,
    spatial_key: str = SPATIAL,
    key: str = WEIGHTS,
    copy: bool = False,
) -> AnnData | None:
    """Replace the weights in ``obsp[key]`` by the paper's r_il, symmetric; which edges there are stays.

    Without features (``use_rep``, "X_neighborhood" or "X_pca") nothing is known that could tell edges apart, and the
    weights stay as they are. Coordinates are needed only with ``flow_key``.
    """
    factor("tau", tau)
    adata = to_change(adata, copy=copy)
    key_in(adata.obsp, key, "adata.obsp", "run pdvi.gr.knn_graph(adata) first")
    if use_rep is None:
        use_rep = next((name for name in (NEIGHBORHOOD, COMPONENTS) if name in adata.obsm), None)
    if use_rep is not None:
        graph = sp.csr_array(adata.obsp[key])
        features = features_of(adata, use_rep, "pdvi.pp.prepare(adata)")
        direction = None if flow_key is None else features_of(adata, flow_key, MAKES_FLOW)
        coordinates = None if flow_key is None else coordinates_of(adata, spatial_key)[:, :2]
        weighted = graphs.weights(graph, features - features.mean(0), coordinates, direction, tau=tau)
        adata.obsp[key] = sp.csr_matrix(weighted)
    return adata if copy else None


def partition(
    adata: AnnData,
    *,
    n_patches: int = 32,
    cells: tuple[int, int] | None = None,
    spatial_key: str = SPATIAL,
    key_added: str = PATCH,
    copy: bool = False,
) -> AnnData | None:
    """Write the patch of every spot to ``obs[key_added]``: balanced median cuts, or a grid of ``cells`` (nx, ny)."""
    if cells is not None:
        nx, ny = wholes("cells", cells, n=2, least=1)
    adata = to_change(adata, copy=copy)
    coordinates = coordinates_of(adata, spatial_key)
    if cells is None:
        whole("n_patches", n_patches, least=1, most=adata.n_obs, of="the number of spots")
        adata.obs[key_added] = median_cuts(coordinates, n_patches)
    else:
        _say_flat(adata, spatial_key)
        adata.obs[key_added] = grid(coordinates[:, :2], nx, ny)
    return adata if copy else None


def to_squidpy(
    adata: AnnData,
    *,
    key: str = WEIGHTS,
    spatial_key: str = SPATIAL,
    key_added: str = SPATIAL,
    copy: bool = False,
) -> AnnData | None:
    """Write a graph as squidpy's `spatial_neighbors` does, so that its functions take it as their own.

    Writes ``obsp[key_added + "_connectivities"]`` (1 for every edge), ``obsp[key_added + "_distances"]`` and
    ``uns[key_added + "_neighbors"]``. Graphs that are there under these names are replaced.

    Parameters
    ----------
    key
        of the graph in obsp.
    spatial_key
        coordinates in obsm, for the distances.
    key_added
        the beginning of the names; squidpy's own is "spatial".
    copy
        change and return a copy of ``adata`` instead of ``adata`` itself.
    """
    adata = to_change(adata, copy=copy)
    key_in(adata.obsp, key, "adata.obsp", "run pdvi.gr.knn_graph(adata) first")
    edges = sp.coo_array(adata.obsp[key])
    xy = coordinates_of(adata, spatial_key)
    length = np.linalg.norm(xy[edges.row] - xy[edges.col], axis=1)
    names = {"connectivities_key": f"{key_added}_connectivities", "distances_key": f"{key_added}_distances"}
    for name, values in zip(names.values(), (np.ones(edges.nnz, np.float32), length)):
        adata.obsp[name] = sp.csr_matrix((values, (edges.row, edges.col)), shape=edges.shape)
    adata.uns[f"{key_added}_neighbors"] = {**names, "params": {"source": key}}
    return adata if copy else None


def _say_flat(adata: AnnData, spatial_key: str) -> None:
    """Say that what is made lies in a plane, where coordinates do not."""
    depth = coordinates_of(adata, spatial_key)[:, 2:]
    if np.ptp(depth, axis=0).any():
        say(f"only the first two of {2 + depth.shape[1]} columns of obsm[{spatial_key!r}] count here.")
