"""Components, averages and a graph, made where an AnnData has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import scipy.sparse as sp

from pdvi import gr, pp
from pdvi._anndata.checks import samples_of, say
from pdvi._anndata.keys import COMPONENTS, NEIGHBORHOOD, SPATIAL, WEIGHTS

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

    Features other than the default ones and graphs under other names are the user's own: they are not made. A graph
    whose edges join samples was made without ``sample_key``, and so were the averages beside it: both are made anew.
    """
    made = []
    again = _joining(adata, graph_key, sample_key)
    if again and (graph_key != WEIGHTS or use_rep is not None or COMPONENTS not in adata.obsm):
        msg = (
            f"adata.obsp[{graph_key!r}] has {again} edges between samples of obs[{sample_key!r}]; "
            f"make it with pdvi.gr.knn_graph(adata, sample_key={sample_key!r})."
        )
        raise ValueError(msg)
    if use_rep is None and (again or NEIGHBORHOOD not in adata.obsm):
        if COMPONENTS not in adata.obsm:
            pp.prepare(adata)
            made.append("pdvi.pp.prepare")
        pp.neighborhood(adata, sample_key=sample_key, spatial_key=spatial_key)
        made.append("pdvi.pp.neighborhood")
    if again or graph_key not in adata.obsp:
        if graph_key != WEIGHTS:
            msg = f"{graph_key!r} not in adata.obsp (it has {sorted(adata.obsp)}); run pdvi.gr.knn_graph(adata) first."
            raise ValueError(msg)
        gr.knn_graph(adata, use_rep=use_rep, sample_key=sample_key, spatial_key=spatial_key)
        made.append("pdvi.gr.knn_graph")
    if again:
        say(f"{again} edges of {WEIGHTS!r} joined samples; made anew for each sample: {', '.join(made)}.")
    elif made:
        say(f"made what was missing with the defaults of {', '.join(made)}.")


def _joining(adata: AnnData, graph_key: str, sample_key: str | None) -> int:
    """Return how many edges of a graph that is there join two samples."""
    if sample_key is None or graph_key not in adata.obsp:
        return 0
    samples, edges = samples_of(adata, sample_key), sp.coo_array(adata.obsp[graph_key])
    return int((samples[edges.row] != samples[edges.col]).sum())
