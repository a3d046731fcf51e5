"""Spatial domains of an AnnData: prepare inputs, fit views, take what they agree on, write."""

from __future__ import annotations

import os
from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from pdvi._anndata.checks import check_adata, check_names, coordinates_of, features_of, samples_of, say
from pdvi._anndata.keys import DOMAIN, NEIGHBORHOOD, SPATIAL, SPATIAL_COMPONENTS, WEIGHTS
from pdvi._base.checks import instance, one_of, whole
from pdvi._base.checks import seed as checked_seed
from pdvi._base.telling import tell, told
from pdvi.mixtures.checks import check_coupling, check_graph
from pdvi.mixtures.config import CONFIG, Config
from pdvi.mixtures.fit_mixture import FitOptions
from pdvi.pp.neighborhood import averages
from pdvi.pp.tiles import nearest_edges, neighbor_table
from pdvi.run.settings import solver_for
from pdvi.shards.nearest import asked_once
from pdvi.spatial.compile_ahead import compile_ahead
from pdvi.spatial.transfer import keep_mixtures
from pdvi.spatial.views import FEATURES, VIEWS, Tissue, View, ViewSettings, find_domains
from pdvi.tl.large import tissue_in_files
from pdvi.tl.missing import EDGES, blocks_of, given_graph, is_users_own, make_missing, n_components, separate_samples
from pdvi.tl.results import write_domains

if TYPE_CHECKING:
    from anndata import AnnData

SINGLE_STARTS = 6  # of a single view


def domains(
    adata: AnnData,
    n_domains: int,
    *,
    views: int | None = None,
    beta: float = 1.0,
    covariance: str = "tied",
    n_init: int | None = None,
    use_rep: str | None = None,
    graph_key: str = WEIGHTS,
    sample_key: str | None = None,
    spatial_key: str = SPATIAL,
    key_added: str = DOMAIN,
    n_patches: int | None = None,
    solver: Any = None,
    seed: int = 0,
    config: Config = CONFIG,
    memory_limit: str | float | None = None,
    executor: Any = None,
    stages: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    copy: bool = False,
) -> AnnData | None:
    """Find spatial domains: several views of the tissue, each a mixture on its graph, and their consensus.

    Writes ``obs[key]`` (categorical, "1" is the largest), ``obs[key_certainty]`` (the share of views that
    give the spot its label, two undecided views added), ``obsm[key_probability]`` (the average of the
    matched views), ``obsm[key_posterior]`` (that of the one mixture that agrees most with all views),
    ``obs[key_entropy]`` of the probabilities (0: certain, 1: all domains equally likely), ``uns[key]`` (with the
    ``views``, how they agree, the ``seconds`` spent on what was ``missing`` and on the ``fit``) and
    ``uns[key_colors]``. What is missing (spatial components, averaged neighborhoods, the graph) is made with the
    defaults, and said once.

    Expression on disk (``anndata.read_h5ad(path, backed="r")``, ``anndata.experimental.read_lazy``) is read block by
    block and never held; what is made of it on the way lies in files.
    docs/how-domains-decides.md tells what happens in which order, and why.

    Parameters
    ----------
    n_domains
        how many; `choose_n_domains` helps.
    views
        how many views (`pdvi.spatial.views.VIEWS`) are fitted; by default all five up to 24,000 spots, fewer above.
        1 is the plain single fit: the certainty is then that mixture's own, which is far too sure of itself.
    beta
        strength of the coupling between neighbours.
    covariance
        of the noise: "tied" (one full covariance) or "diagonal"; it is estimated with everything else.
    n_init
        k-means starts of a view, of which the best fit is kept; by default 1, of a single view 6, fewer where there are
        more than 20,000 spots.
    use_rep
        features in obsm that are fitted as they are, in a single view. By default the views average "X_spatial", which
        is made if need be (from "X_pca", where there are such components). Averages in "X_neighborhood" that were not
        made with the defaults are taken as they are, too.
    graph_key
        symmetric edge weights in obsp; squidpy's "spatial_connectivities" will do.
    sample_key
        a column of obs that tells samples apart: no edges between samples, domains shared by all, and for every sample
        an offset of its features, which is learned with them.
    spatial_key
        coordinates in obsm.
    n_patches, solver
        of the fit; see `PottsMixture`.
    seed
        the same seed gives the same labels.
    config
        the numbers behind every decision (`pdvi.mixtures.Config`); those used are in ``uns[key]["params"]["config"]``.
    memory_limit
        resident memory of the process where expression is read in blocks: "8GB", or a number of bytes; by default most
        of what is free. Rows that would not fit are fitted from a store by `Disk`.
    executor
        `Disk` or `Dask`: where expression is read in blocks, all large tissues are fitted from a store by it.
    stages
        a folder for what is made of blocks on the way: the same call goes on with what it finds there. By default one
        that is removed at the end.
    progress
        write a line to stderr about every stage that takes longer than two seconds; by default on a terminal only.
    copy
        leave ``adata`` as it is, and return a copy with the domains.
    """
    check_adata(adata)
    whole("n_domains", n_domains, least=2, most=adata.n_obs, of="the number of spots")
    names = {"use_rep": use_rep, "graph_key": graph_key, "sample_key": sample_key, "spatial_key": spatial_key}
    check_names(**names, key_added=key_added)
    instance("config", config, Config, "a pdvi.mixtures.Config")
    given = use_rep or (NEIGHBORHOOD if is_users_own(adata) else None)
    chosen = _views(views, given, adata.n_obs, config)
    starts = SINGLE_STARTS if len(chosen) == 1 else 1
    n_init = max(1, min(starts, config.budget // adata.n_obs)) if n_init is None else n_init
    whole("n_init", n_init, least=1, most=10_000)
    settings = ViewSettings(
        int(n_domains),
        beta=check_coupling(beta),
        n_patches=None if n_patches is None else whole("n_patches", n_patches, least=1, most=adata.n_obs),
        n_init=int(n_init),
        options=FitOptions(
            covariance=one_of("covariance", covariance, ("diagonal", "tied")),
            solver=None if solver is None else solver_for(solver),
            seed=checked_seed("seed", seed),
            config=config,
        ),
    )
    blocks = None if given else blocks_of(adata, sample_key)
    if blocks is None and (memory_limit, executor, stages) != (None, None, None):
        say("expression is in memory, or not needed: `memory_limit`, `executor` and `stages` have no effect.")
    adata = adata.copy() if copy else adata
    where: dict[str, Any] = {"graph_key": graph_key, "sample_key": sample_key, "spatial_key": spatial_key}
    began = perf_counter()
    with ExitStack() as stack:
        stack.enter_context(told(progress))
        stack.enter_context(asked_once(1 + max(view.n_neighbors for view in VIEWS)))
        if blocks is None:
            tissue = _tissue(adata, chosen, given, settings, stack, **where)
        else:
            limits: dict[str, Any] = {"memory_limit": memory_limit, "executor": executor, "stages": stages}
            tissue, settings = stack.enter_context(tissue_in_files(adata, blocks, chosen, settings, **where, **limits))
        made = perf_counter()
        found = find_domains(tissue, chosen, settings)
        mixtures = keep_mixtures(tissue, found.labels, chosen, settings)
    seconds = {"missing": made - began, "fit": perf_counter() - made}
    params = {
        "n_domains": int(n_domains),
        "views": len(chosen),
        "beta": float(beta),
        "covariance": covariance,
        "n_init": int(n_init),
        "use_rep": given or SPATIAL_COMPONENTS,
        "graph_key": graph_key,
        "sample_key": sample_key or "",
        "spatial_key": spatial_key,
        "seed": int(seed),
        "config": config.as_params(),
    }
    write_domains(adata, key_added, found, chosen, params, mixtures)
    adata.uns[key_added] |= {"seconds": seconds, "fit_seconds": seconds["fit"]}
    return adata if copy else None


def _views(views: int | None, given: str | None, n_rows: int, config: Config) -> tuple[View, ...]:
    """Return the views to fit: of features that are given only one."""
    if views is not None:
        whole("views", views, least=1, most=len(VIEWS), of="the number of views there are")
    if given is None:
        count = config.n_views(n_rows) if views is None else int(views)
        # in a large tissue types of groups mean little: views of averages come first
        first = sorted(VIEWS, key=lambda view: view.kind != "averages") if n_rows > config.group_above else VIEWS
        return tuple(first[:count])
    if views is not None and views > 1:
        msg = f"`views` must be 1 for features that are fitted as they are (obsm[{given!r}]), got {views!r}."
        raise ValueError(msg)
    return (FEATURES,)


def _tissue(
    adata: AnnData,
    views: tuple[View, ...],
    given: str | None,
    settings: ViewSettings,
    stack: ExitStack,
    *,
    graph_key: str,
    sample_key: str | None,
    spatial_key: str,
) -> Tissue:
    """Return what the views see, from arrays in memory; components and graph are made where they are missing."""
    coordinates, samples = coordinates_of(adata, spatial_key), samples_of(adata, sample_key)
    graph = given_graph(adata, graph_key, sample_key)
    edges = nearest_edges(neighbor_table(coordinates, samples, EDGES), EDGES) if graph is None else graph
    separate, several = separate_samples(coordinates, samples), samples if samples.any() else None
    size = n_components(adata, given)
    stack.enter_context(compile_ahead(edges, separate, several, views, size, settings))
    make_missing(adata, use_rep=given, graph_key=graph_key, sample_key=sample_key, spatial_key=spatial_key)
    graph = check_graph(adata.obsp[graph_key], adata.n_obs) if graph is None else graph
    places = (graph.astype(np.float64), separate, several)
    if given is not None:
        features = features_of(adata, given, "pdvi.pp.neighborhood(adata)")
        return Tissue(features, {FEATURES.n_neighbors: features}, *places)
    tell("averages of neighbors")
    components = features_of(adata, SPATIAL_COMPONENTS, "pdvi.pp.spatial_components(adata)")
    counts = {view.n_neighbors for view in views if view.kind == "averages"}
    return Tissue(components, averages(components, coordinates, samples, counts), *places)
