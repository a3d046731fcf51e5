"""Components, averages and a graph, made where an AnnData has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdvi import gr, pp
from pdvi._anndata.checks import say
from pdvi._anndata.keys import SPATIAL, WEIGHTS

if TYPE_CHECKING:
    from anndata import AnnData


def make_missing(
    adata: AnnData,
    *,
    use_rep: str | None = None,
    graph_key: str = WEIGHTS,
    sample_key: str | None = None,
    spatial_key: str = SPATIAL,
) -> None:
    """Make what a fit needs and ``adata`` lacks, with the defaults of `pp` and `gr`, and say so once.

    Features other than the default ones and graphs under other names are the user's own: they are not made.
    """
    made = []
    if use_rep is None and "X_neighborhood" not in adata.obsm:
        if "X_pca" not in adata.obsm:
            pp.prepare(adata)
            made.append("pdvi.pp.prepare")
        pp.neighborhood(adata, sample_key=sample_key, spatial_key=spatial_key)
        made.append("pdvi.pp.neighborhood")
    if graph_key not in adata.obsp:
        if graph_key != WEIGHTS:
            msg = f"{graph_key!r} not in adata.obsp (it has {sorted(adata.obsp)}); run pdvi.gr.knn_graph(adata) first."
            raise ValueError(msg)
        gr.knn_graph(adata, use_rep=use_rep, sample_key=sample_key, spatial_key=spatial_key)
        made.append("pdvi.gr.knn_graph")
    if made:
        say(f"made what was missing with the defaults of {', '.join(made)}.")
