"""The graph under the names that squidpy looks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp

from pdvi._anndata.checks import coordinates_of, to_change
from pdvi._anndata.keys import SPATIAL, WEIGHTS
from pdvi._base.checks import key_in

if TYPE_CHECKING:
    from anndata import AnnData


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
