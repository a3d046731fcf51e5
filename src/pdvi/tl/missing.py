"""Components, averages and a graph, made where an AnnData has none that suit."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.sparse as sp
from anndata import AnnData

from pdvi import gr, graphs, pp
from pdvi._anndata.blocks import Blocks, Part, is_on_disk
from pdvi._anndata.checks import samples_of, say
from pdvi._anndata.keys import COMPONENTS, NEIGHBORHOOD, SPATIAL, SPATIAL_COMPONENTS, WEIGHTS
from pdvi._base.telling import tell
from pdvi.mixtures.checks import check_graph, proper_edges
from pdvi.pp.tiles import nearest_edges

MADE_COMPONENTS = inspect.signature(pp.spatial_components).parameters["n_components"].default
COMPONENTS_MADE = "pdvi.pp.spatial_components"
EDGES, WEIGHED_NEIGHBORS, WEIGHED_COMPONENTS = 8, 30, 20  # of `gr.knn_graph`, and of the averages that weight edges


def are_logarithms(n_samples: int) -> bool:
    """Return whether components are made of logarithms: where there are several samples.

    What is typical of a place is the mean of its counts; but what differs between samples multiplies them, and only in
    logarithms is that an offset, which can be learned.
    """
    return n_samples > 1


def make_missing(
    adata: AnnData,
    *,
    use_rep: str | None = None,
    graph_key: str = WEIGHTS,
    sample_key: str | None = None,
    spatial_key: str = SPATIAL,
    components: bool = True,
) -> None:
    """Make what a fit needs and ``adata`` lacks, with the defaults of `pp` and `gr`, and say so once.

    Features under other names (``use_rep``) and graphs under other names are the user's own: they are not made. What
    was made for other samples (a graph whose edges join them, components that tell them apart) is made anew; of the
    user's own features that is refused. Without ``components`` averages that are there are enough.
    """
    made = []
    again = _joining(adata, graph_key, sample_key)
    if again and (graph_key != WEIGHTS or use_rep is not None):
        msg = (
            f"adata.obsp[{graph_key!r}] has {again} edges between samples of obs[{sample_key!r}]; "
            f"make it with pdvi.gr.knn_graph(adata, sample_key={sample_key!r})."
        )
        raise ValueError(msg)
    where: dict[str, Any] = {"sample_key": sample_key, "spatial_key": spatial_key}
    if use_rep is not None and sample_key is not None and _made_otherwise(adata, use_rep, sample_key):
        msg = (
            f"adata.obsm[{use_rep!r}] was made without the samples of obs[{sample_key!r}]; "
            f"make it again with sample_key={sample_key!r}."
        )
        raise ValueError(msg)
    if use_rep is None:
        averages = again or _unsuitable(adata, NEIGHBORHOOD, sample_key)
        if (components or averages) and (again or _unsuitable(adata, SPATIAL_COMPONENTS, sample_key)):
            tell("spatial components")
            log = are_logarithms(adata.obs[sample_key].nunique() if sample_key else 1)
            pp.spatial_components(adata, log=log, **_source(adata), **where)
            made.append(f"{COMPONENTS_MADE}({log=})")
        if averages:
            tell("averages of neighbours")
            pp.neighborhood(adata, use_rep=SPATIAL_COMPONENTS, **where)
            made.append("pdvi.pp.neighborhood")
    if again or graph_key not in adata.obsp:
        tell("the graph")
        gr.knn_graph(adata, use_rep=use_rep, **where)
        made.append("pdvi.gr.knn_graph")
    if again:
        say(f"{again} edges of {WEIGHTS!r} joined samples; made anew for each sample: {', '.join(made)}.")
    elif any(not name.startswith(COMPONENTS_MADE) for name in made):  # components alone are a part of the fit
        say(f"made what was missing with {', '.join(made)}.")


def _source(adata: AnnData) -> dict[str, Any]:
    """Return what spatial components are made of: expression, unless components are there that came from elsewhere."""
    if COMPONENTS not in adata.obsm:
        return {}
    params = _params(adata, COMPONENTS)
    if params is None or "n_genes" not in params:  # scanpy's, or what another tool has integrated
        return {"use_rep": COMPONENTS}
    if not adata.n_vars or (adata.X is None and not params["layer"]):  # the expression itself is gone
        return {"use_rep": COMPONENTS}
    return {"layer": params["layer"] or None, "n_genes": int(params["n_genes"]), "clip": float(params["clip"])}


def blocks_of(adata: AnnData, sample_key: str | None) -> Blocks | None:
    """Return expression that is to be read in blocks; None if it is in memory, or if components are there already."""
    if not is_on_disk(adata.X) or not _unsuitable(adata, SPATIAL_COMPONENTS, sample_key) or _source(adata):
        return None
    return Blocks([Part(adata.X)], adata.n_vars)


def given_graph(adata: AnnData, graph_key: str, sample_key: str | None) -> sp.csr_array | None:
    """Return the graph that ``adata`` has; None if it is to be made: there is none, or one that joins samples."""
    if graph_key in adata.obsp:
        return None if _joining(adata, graph_key, sample_key) else check_graph(adata.obsp[graph_key], adata.n_obs)
    if graph_key != WEIGHTS:
        msg = f"{graph_key!r} not in adata.obsp (it has {sorted(adata.obsp)}); run pdvi.gr.knn_graph(adata) first."
        raise ValueError(msg)
    return None


def usual_graph(table: np.ndarray, averages: np.ndarray) -> sp.csr_array:
    """Return the graph that `gr.knn_graph` makes by default from a table of neighbors, with weights from averages."""
    features = np.array(averages[:, :WEIGHED_COMPONENTS])
    features -= features.mean(0)
    return proper_edges(graphs.weights(nearest_edges(table, EDGES), features))


def n_components(adata: AnnData, use_rep: str | None) -> int:
    """Return how many components ``adata`` has or will have, as far as that is known before they are made."""
    made_of = use_rep or next((key for key in (SPATIAL_COMPONENTS, COMPONENTS) if key in adata.obsm), None)
    return adata.obsm[made_of].shape[1] if made_of else min(MADE_COMPONENTS, adata.n_vars)


def separate_samples(coordinates: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return samples side by side, so that the patches of one do not reach into the next."""
    extent = np.ptp(coordinates, axis=0).max() + 1.0
    moved = coordinates - coordinates.min(0)
    moved[:, 0] += 2 * extent * samples
    return moved


def is_users_own(adata: AnnData) -> bool:
    """Return whether averaged neighbourhoods are there that were not made with the defaults: they are to be used."""
    if NEIGHBORHOOD not in adata.obsm:
        return False
    params = _params(adata, NEIGHBORHOOD)
    if params is None or params.get("use_rep") not in (COMPONENTS, SPATIAL_COMPONENTS):
        return True
    usual = inspect.signature(pp.neighborhood).parameters
    return any(params.get(name) != usual[name].default for name in ("n_neighbors", "n_components", "own", "gradient"))


def _unsuitable(adata: AnnData, key: str, sample_key: str | None) -> bool:
    return key not in adata.obsm or _made_otherwise(adata, key, sample_key)


def _made_otherwise(adata: AnnData, key: str, sample_key: str | None) -> bool:
    """Return whether ``obsm[key]`` is known to have been made for other samples than these."""
    params = _params(adata, key)
    return params is not None and params.get("sample_key", "") != (sample_key or "")


def _params(adata: AnnData, key: str) -> Mapping[str, Any] | None:
    """Return how ``obsm[key]`` was made, if that is recorded."""
    entry = adata.uns.get(key)
    params = entry.get("params") if isinstance(entry, Mapping) else None
    return params if isinstance(params, Mapping) else None


def _joining(adata: AnnData, graph_key: str, sample_key: str | None) -> int:
    """Return how many edges of a graph that is there join two samples."""
    if sample_key is None or graph_key not in adata.obsp:
        return 0
    samples, edges = samples_of(adata, sample_key), sp.coo_array(adata.obsp[graph_key])
    return int((samples[edges.row] != samples[edges.col]).sum())
