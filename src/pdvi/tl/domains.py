"""Spatial domains: one call from an AnnData to labels, probabilities and their certainty."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from pdvi import graphs
from pdvi._anndata.checks import check_adata, check_names, coordinates_of, features_of, samples_of, say
from pdvi._anndata.keys import COMPONENTS, NEIGHBORHOOD, SPATIAL, SPATIAL_COMPONENTS, WEIGHTS
from pdvi._base.checks import instance, whole
from pdvi._base.checks import seed as checked_seed
from pdvi._base.stopwatch import Stopwatch
from pdvi._base.telling import tell, told
from pdvi.mixtures.checks import check_graph
from pdvi.mixtures.pipeline import find_domains
from pdvi.mixtures.pipeline import refine as refine_spots
from pdvi.mixtures.recipe import RECIPE, Recipe
from pdvi.mixtures.task import Found, Rows, Start, Task
from pdvi.mixtures.views import VIEWS, Tissue, View, first_views, see
from pdvi.pp.neighborhood import averages
from pdvi.shards.nearest import asked_once
from pdvi.tl.large import LargeTissue
from pdvi.tl.missing import blocks_of, is_users_own, make_missing, own_graph
from pdvi.tl.outcome import Outcome, kept_model, of_one, of_views, write

if TYPE_CHECKING:
    from anndata import AnnData


def domains(
    adata: AnnData,
    n_domains: int,
    *,
    views: int | None = None,
    beta: float = 1.0,
    covariance: str = "tied",
    n_init: int | None = None,
    refine: bool | None = None,
    use_rep: str | None = None,
    graph_key: str = WEIGHTS,
    sample_key: str | None = None,
    spatial_key: str = SPATIAL,
    key_added: str = "domain",
    n_patches: int | None = None,
    solver: Any = None,
    seed: int = 0,
    recipe: Recipe = RECIPE,
    memory_limit: str | float | None = None,
    executor: Any = None,
    stages: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    copy: bool = False,
) -> AnnData | None:
    """Find spatial domains: several views of the tissue, each a mixture on its graph, and their consensus.

    Writes ``obs[key]`` (categorical, "1" is the largest), ``obs[key_certainty]`` (the share of views that by
    themselves give the spot its label, two undecided views added), ``obsm[key_probability]`` (the average of the
    matched views), ``obsm[key_posterior]`` (that of the one mixture that agrees most with all views),
    ``obs[key_entropy]`` of the probabilities (0: certain, 1: all domains equally likely), ``uns[key]`` (with the
    ``views``, how they agree, the ``seconds`` spent on what was ``missing`` and on the ``fit``: set-up, all starts, all
    rounds, evaluation) and ``uns[key_colors]``. What is missing (spatial components, averaged neighbourhoods, the
    graph) is made with the defaults, and said once.

    Expression on disk (``anndata.read_h5ad(path, backed="r")``, ``anndata.experimental.read_lazy``) is read block by
    block and never held; what is made of it on the way lies in files.
    docs/how-domains-decides.md tells what happens in which order, and why.

    Parameters
    ----------
    n_domains
        how many; `choose_n_domains` helps.
    views
        how many views (`pdvi.mixtures.VIEWS`) are fitted; by default all eight up to 15,000 spots, fewer above. 1 is
        the plain single fit: the certainty is then that mixture's own, which is far too sure of itself.
    beta
        strength of the coupling between neighbours.
    covariance
        of the noise: "tied" (one full covariance, re-estimated) or "diagonal".
    n_init
        k-means starts of a view, of which the best fit is kept; by default 1, of a single view 6, fewer where there are
        more than 20,000 spots.
    refine
        whether labels are refined on single spots' components. By default the data decides: yes if the spots of a
        domain are one normal cloud there (borders get sharper), no if they are not, as when a domain has several cell
        types (it would be torn into them). ``uns[key]["refined"]`` tells.
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
    recipe
        the numbers behind every decision (`pdvi.mixtures.Recipe`); those used are in ``uns[key]["params"]["recipe"]``.
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
    checked_seed("seed", seed)
    names = {"use_rep": use_rep, "graph_key": graph_key, "sample_key": sample_key, "spatial_key": spatial_key}
    check_names(**names, key_added=key_added)
    instance("recipe", recipe, Recipe, "a pdvi.mixtures.Recipe")
    watch = Stopwatch()
    given = use_rep or (NEIGHBORHOOD if is_users_own(adata) else None)
    blocks = None if given else blocks_of(adata, sample_key)
    if blocks is None and (memory_limit, executor, stages) != (None, None, None):
        say("expression is in memory, or not needed: `memory_limit`, `executor` and `stages` have no effect.")
    adata = adata.copy() if copy else adata
    coordinates, samples = coordinates_of(adata, spatial_key), samples_of(adata, sample_key)
    n_views = _number_of_views(views, given, adata.n_obs, recipe)
    task = Task(
        int(n_domains),
        beta=beta,
        covariance=covariance,
        learn_weights=True,  # domains differ in size
        n_init=recipe.starts(adata.n_obs, n_views) if n_init is None else n_init,
        n_patches=n_patches,
        max_epochs=recipe.max_epochs,
        tol=recipe.tol,
        solver=solver,
        random_state=seed,
        recipe=recipe,
    ).checked(adata.n_obs)
    places, sample = _apart(coordinates, samples), samples if samples.any() else None
    weak_graph = partial(_weak_graph, coordinates, samples, recipe.refine_neighbors)
    with ExitStack() as stack:
        stack.enter_context(told(progress))
        stack.enter_context(asked_once(1 + max(view.n_neighbors for view in VIEWS)))
        if blocks is None:
            make_missing(adata, use_rep=given, graph_key=graph_key, sample_key=sample_key, spatial_key=spatial_key)
            graph = check_graph(adata.obsp[graph_key], adata.n_obs).astype(np.float64)
            watch.lap("missing")
        if given is not None:
            features = features_of(adata, given, "pdvi.pp.neighborhood(adata)")
            spots = None
            if refine or (refine is None and use_rep is None and COMPONENTS in adata.obsm):
                spots = features_of(adata, COMPONENTS, "pdvi.pp.prepare(adata)")
            single = find_domains(Rows(features, graph, places, sample), task, spots, weak_graph, force=bool(refine))
            outcome = of_one(single, task)
        else:
            chosen = first_views(n_views, adata.n_obs, recipe)
            of_averages = [view for view in chosen if view.kind == "averages"]
            counts = {view.n_neighbors for view in of_averages}
            if blocks is None:
                tell("averages of neighbours")
                components = features_of(adata, SPATIAL_COMPONENTS, "pdvi.pp.spatial_components(adata)")
                tissue = Tissue(components, averages(components, coordinates, samples, counts), graph, places, sample)
            else:
                limits: dict[str, Any] = {"memory_limit": memory_limit, "executor": executor, "stages": stages}
                large = LargeTissue(blocks, coordinates, samples, adata.var_names.to_numpy(), counts, seed)
                prepared, task = stack.enter_context(large.prepared(task, **limits))
                graph = own_graph(adata, graph_key, sample_key, prepared.graph)
                tissue = Tissue(prepared.components, prepared.averages, graph, places, sample)
                watch.lap("missing")
            outcome = _looked_at(tissue, chosen, task, refine, weak_graph)
            sizes = {
                view: view.components(task.n_components, tissue.components.shape[1], recipe) for view in of_averages
            }
            outcome = outcome._replace(model=kept_model(tissue, outcome, sizes, recipe))
            if blocks is not None:
                made = {
                    "params": prepared.made.pop("params") | {"sample_key": sample_key or "", "spatial_key": spatial_key}
                }
                adata.obsm[SPATIAL_COMPONENTS] = np.array(prepared.components)
                adata.uns[SPATIAL_COMPONENTS] = made | prepared.made
    watch.lap("fit")
    params = {
        "n_domains": int(n_domains),
        "views": n_views,
        "beta": float(beta),
        "covariance": covariance,
        "n_init": int(task.n_init),
        "use_rep": given or SPATIAL_COMPONENTS,
        "graph_key": graph_key,
        "sample_key": sample_key or "",
        "spatial_key": spatial_key,
        "seed": int(seed),
        "recipe": recipe.as_params(),
    }
    write(adata, key_added, outcome, params)
    adata.uns[key_added] |= {"seconds": watch.laps, "fit_seconds": watch.laps["fit"]}
    return adata if copy else None


def _number_of_views(views: int | None, given: str | None, n_rows: int, recipe: Recipe) -> int:
    """Return how many views there are: one of features that are given."""
    if views is not None:
        whole("views", views, least=1, most=len(VIEWS), of="the number of views there are")
    if given is None:
        return min(len(VIEWS), recipe.views(n_rows)) if views is None else int(views)
    if views is not None and views > 1:
        msg = f"`views` must be 1 for features that are fitted as they are (obsm[{given!r}]), got {views!r}."
        raise ValueError(msg)
    return 1


def _looked_at(tissue: Tissue, views: tuple[View, ...], task: Task, refine: bool | None, weak_graph: Any) -> Outcome:
    """Return what one or several views of a tissue found, refined on its single spots if that is wanted."""
    spots = tissue.components if refine or refine is None else None
    if len(views) == 1:
        size = views[0].components(task.n_components, tissue.components.shape[1], task.recipe)
        rows = tissue.rows(views[0], size)
        return of_one(find_domains(rows, task, spots, weak_graph, force=bool(refine)), task)

    def refined(start: Start) -> Found | None:
        rows = Rows(tissue.components, tissue.graph, tissue.coordinates, tissue.sample)
        return refine_spots(rows, task, start, weak_graph, force=bool(refine))

    return of_views(see(tissue, views, task, None if spots is None else refined))


def _apart(coordinates: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Samples side by side, so that the patches of one do not reach into the next."""
    extent = np.ptp(coordinates, axis=0).max() + 1.0
    moved = coordinates - coordinates.min(0)
    moved[:, 0] += 2 * extent * samples
    return moved


def _weak_graph(coordinates: np.ndarray, samples: np.ndarray, n_neighbors: int) -> sp.csr_array:
    """Many edges of weight 1, none between samples; mutual, since tables have room for the row with most of them."""

    def edges(rows: np.ndarray) -> sp.csr_array:
        k = min(n_neighbors, len(rows) - 1)
        return graphs.nearest(coordinates[rows], k) if k >= 1 else sp.csr_array((1, 1))

    return graphs.by_sample(samples, edges)
