"""Spatial domains: one call from an AnnData to labels, probabilities and their certainty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from pdvi import graphs
from pdvi._anndata.checks import check_adata, coordinates_of, features_of, samples_of
from pdvi._anndata.keys import SPATIAL, WEIGHTS
from pdvi._base.checks import whole
from pdvi._base.stopwatch import Stopwatch
from pdvi.mixtures.checks import check_graph
from pdvi.mixtures.pipeline import find_domains
from pdvi.mixtures.recipe import RECIPE, Recipe
from pdvi.mixtures.task import Found, Rows, Task
from pdvi.pl.colors import kept_colors
from pdvi.tl.missing import make_missing

if TYPE_CHECKING:
    from anndata import AnnData


def domains(
    adata: AnnData,
    n_domains: int,
    *,
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
    copy: bool = False,
) -> AnnData | None:
    """Find spatial domains with a Potts mixture on a neighbourhood graph.

    Writes ``obs[key]`` (categorical, "1" is the largest), ``obsm[key_probability]``, ``obs[key_entropy]`` (0: certain,
    1: all domains equally likely), ``uns[key]`` (with the ``seconds`` spent on what was ``missing`` and on the ``fit``:
    set-up, all starts, all rounds, evaluation) and ``uns[key_colors]``. What is missing (principal components,
    averaged neighbourhoods, the graph) is made with the defaults, and said once. docs/how-domains-decides.md tells what
    happens in which order, and why.

    Parameters
    ----------
    n_domains
        how many; `choose_n_domains` helps.
    beta
        strength of the coupling between neighbours.
    covariance
        of the noise: "tied" (one full covariance, re-estimated) or "diagonal".
    n_init
        k-means starts, of which the best fit is kept; by default 6, fewer from 20,000 spots on, 1 from 60,000.
    refine
        whether labels found on averaged neighbourhoods are refined on "X_pca", spot by spot. By default the data
        decides: yes if the spots of a domain are one normal cloud there (borders get sharper), no if they are not,
        as when a domain has several cell types (it would be torn into them). ``uns[key]["refined"]`` tells.
    use_rep
        features in obsm; by default "X_neighborhood", made from "X_pca" if need be.
    graph_key
        symmetric edge weights in obsp; squidpy's "spatial_connectivities" will do.
    sample_key
        a column of obs that tells samples apart: no edges between samples, domains shared by all.
    spatial_key
        coordinates in obsm.
    n_patches, solver
        of the fit; see `PottsMixture`.
    seed
        the same seed gives the same labels.
    recipe
        the numbers behind every decision (`pdvi.mixtures.Recipe`); those used are in ``uns[key]["params"]["recipe"]``.
    copy
        leave ``adata`` as it is, and return a copy with the domains.
    """
    check_adata(adata)
    whole("n_domains", n_domains, least=2, most=adata.n_obs, of="the number of spots")
    watch = Stopwatch()
    adata = adata.copy() if copy else adata
    coordinates, samples = coordinates_of(adata, spatial_key)[:, :2], samples_of(adata, sample_key)
    task = Task(
        int(n_domains),
        beta=beta,
        covariance=covariance,
        learn_weights=True,  # domains differ in size
        n_init=recipe.starts(adata.n_obs) if n_init is None else n_init,
        n_patches=n_patches,
        max_epochs=recipe.max_epochs,
        tol=recipe.tol,
        solver=solver,
        random_state=seed,
        recipe=recipe,
    ).checked(adata.n_obs)
    make_missing(adata, use_rep=use_rep, graph_key=graph_key, sample_key=sample_key, spatial_key=spatial_key)
    watch.lap("missing")
    features = features_of(adata, use_rep or "X_neighborhood", "pdvi.pp.neighborhood(adata)")
    graph = check_graph(sp.csr_array(adata.obsp[graph_key], dtype=np.float64), adata.n_obs)
    wanted = refine or (refine is None and use_rep is None and "X_pca" in adata.obsm)
    found, refined = find_domains(
        Rows(features, graph, _apart(coordinates, samples)),
        task,
        features_of(adata, "X_pca", "pdvi.pp.prepare(adata)") if wanted else None,
        lambda: _weak_graph(_apart(coordinates, samples), samples, recipe.refine_neighbors),
        force=bool(refine),
    )
    watch.lap("fit")
    found.warn_unless_converged("tl.domains", task)
    params = {
        "n_domains": int(n_domains),
        "beta": float(beta),
        "covariance": covariance,
        "n_init": int(task.n_init),
        "use_rep": use_rep or "X_neighborhood",
        "graph_key": graph_key,
        "sample_key": sample_key or "",
        "spatial_key": spatial_key,
        "seed": int(seed),
        "recipe": recipe.as_params(),
    }
    _write(adata, key_added, found, params, refined)
    adata.uns[key_added] |= {"seconds": watch.laps, "fit_seconds": watch.laps["fit"]}
    return adata if copy else None


def _apart(coordinates: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Samples side by side, so that the patches of one do not reach into the next."""
    extent = np.ptp(coordinates, axis=0).max() + 1.0
    return coordinates - coordinates.min(0) + np.column_stack([2 * extent * samples, np.zeros(len(samples))])


def _weak_graph(coordinates: np.ndarray, samples: np.ndarray, n_neighbors: int) -> sp.csr_array:
    """Many edges of weight 1, none between samples."""
    edges = sp.coo_array(graphs.nearest(coordinates, min(n_neighbors, len(coordinates) - 1), mutual=False))
    same = samples[edges.row] == samples[edges.col]
    return sp.csr_array((edges.data[same], (edges.row[same], edges.col[same])), shape=edges.shape)


def _write(adata: AnnData, key: str, found: Found, params: dict[str, Any], refined: bool) -> None:
    """The largest domain is "1"."""
    n_domains = params["n_domains"]
    order = np.argsort(-np.bincount(found.probabilities.argmax(1), minlength=n_domains), kind="stable")
    probability = np.ascontiguousarray(found.probabilities[:, order], np.float32)
    names = [str(k + 1) for k in range(n_domains)]
    labels = pd.Series(pd.Categorical(np.array(names)[probability.argmax(1)], categories=names), adata.obs_names)
    adata.uns[f"{key}_colors"] = kept_colors(adata, key, labels)
    adata.obs[key] = labels
    adata.obsm[f"{key}_probability"] = probability
    adata.obs[f"{key}_entropy"] = _entropy(probability)
    adata.uns[key] = {
        "params": params,
        "refined": refined,
        "status": str(found.result.status),
        "elbo": -float(found.result.objective),
        "trace": {name: column.to_numpy() for name, column in found.result.trace.items()},
    }


def _entropy(probability: np.ndarray) -> np.ndarray:
    """Between 0 and 1."""
    safe = np.maximum(probability.astype(float), 1e-300)
    return np.clip(-(probability * np.log(safe)).sum(1) / np.log(probability.shape[1]), 0, 1)
