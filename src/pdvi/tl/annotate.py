"""Labels of another slide from a fitted one: the same genes, components and domains, an offset of its own."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from pdvi._anndata.checks import check_adata, coordinates_of, fit_of, samples_of
from pdvi._anndata.keys import DOMAIN, SPATIAL, SPATIAL_COMPONENTS, WEIGHTS
from pdvi.gr import knn_graph
from pdvi.mixtures.annotate import Kept
from pdvi.mixtures.annotate import annotate as by_mixture
from pdvi.mixtures.checks import check_graph
from pdvi.mixtures.consensus import certainty_of, votes
from pdvi.mixtures.recipe import RECIPE, Recipe
from pdvi.mixtures.samples import about_mean
from pdvi.mixtures.task import Rows, Task
from pdvi.pp.neighborhood import averages
from pdvi.pp.projected import projected
from pdvi.tl.outcome import write_labels

if TYPE_CHECKING:
    from anndata import AnnData


def annotate(
    adata: AnnData,
    fitted: AnnData,
    *,
    key: str = DOMAIN,
    layer: str | None = None,
    sample_key: str | None = None,
    spatial_key: str = SPATIAL,
    key_added: str | None = None,
    recipe: Recipe = RECIPE,
) -> None:
    """Label the spots of ``adata`` with the domains that `tl.domains` found in ``fitted``.

    Its counts are projected on the spatial components of the fitted slide, averaged as each view did, and labelled by
    the mixture that this view left, with an offset of every sample that is learned. Writes ``obs[key_added]`` with the
    names of the fitted domains, ``obs[key_added + "_certainty"]`` (as in `tl.domains`),
    ``obsm[key_added + "_probability"]`` (their average), and ``uns[key_added]``: how much
    ``farther`` spots lie from their domains than the fitted ones did (1: as close), and how much the domains
    ``explained`` of the features beside what they explain there (1: as much). A warning says if the slide does not fit.

    Parameters
    ----------
    fitted
        a slide with domains that were found from counts; `tl.domains` keeps what is needed in ``uns``.
    key
        the name of its domains.
    layer
        where the counts of ``adata`` are; by default X.
    sample_key
        a column of ``adata.obs`` that tells samples apart; each has an offset.
    key_added
        by default ``key``.
    """
    check_adata(adata)
    fit = fit_of(fitted, key)
    made, model = fitted.uns.get(SPATIAL_COMPONENTS), fit.get("model")
    if model is None or not isinstance(made, Mapping) or "genes" not in made:
        msg = (
            f"`fitted` must have domains that were found from counts; uns[{key!r}] has no model of them. Run "
            "pdvi.tl.domains without `use_rep` on a slide without components of other tools."
        )
        raise ValueError(msg)
    name = key if key_added is None else key_added
    coordinates, samples = coordinates_of(adata, spatial_key), samples_of(adata, sample_key)
    components = about_mean(projected(adata, made, layer=layer), samples)
    mixtures = _mixtures(model)
    found = averages(components, coordinates, samples, {one.n_neighbors for one in mixtures})
    work = _graph(adata, components, sample_key, spatial_key)
    n_domains = len(fitted.obs[key].cat.categories)
    task = Task(n_domains, beta=float(fit["params"]["beta"]), recipe=recipe)
    done = []
    for one in mixtures:
        X = about_mean(found[one.n_neighbors][:, : one.means.shape[1]], samples)
        done.append(by_mixture(one, Rows(X, work, coordinates, samples), task))
    probability = votes([each.probabilities.argmax(1) for each in done], n_domains)
    both = list(zip(done, mixtures))
    farther = float(np.median([each.distance / one.distance for each, one in both]))
    explained = float(np.median([max(each.explained, 0.0) / one.explained for each, one in both]))
    categories = list(fitted.obs[key].cat.categories)
    labels = probability.argmax(1)
    certainty = certainty_of(probability, labels, len(done))
    write_labels(adata, name, probability, categories, labels, certainty, np.asarray(fitted.uns[f"{key}_colors"]))
    adata.uns[name] = {"params": {"key": key, "sample_key": sample_key or "", "spatial_key": spatial_key}}
    adata.uns[name] |= {"farther": farther, "explained": explained}
    if farther > recipe.annotate_far or explained < recipe.annotate_explained:
        warnings.warn(
            f"this slide does not fit the domains of `fitted`: spots lie {farther:.1f} times as far from them "
            f"(squared), which explain {explained:.2f} times as much of the features as there. Check that genes and "
            "tissue are the same; the labels may mean nothing.",
            UserWarning,
            stacklevel=2,
        )


def _mixtures(model: Mapping[str, Any]) -> list[Kept]:
    """Return the mixtures that a file or a fit has kept."""
    kept = []
    for i, size in enumerate(np.asarray(model["n_components"])):
        means, scale = np.asarray(model["means"])[i, :, :size], np.asarray(model["scale"])[i, :size, :size]
        numbers = (float(np.asarray(model[name])[i]) for name in ("distance", "explained"))
        kept.append(
            Kept(int(np.asarray(model["n_neighbors"])[i]), means, scale, np.asarray(model["shares"])[i], *numbers)
        )
    return kept


def _graph(adata: AnnData, components: np.ndarray, sample_key: str | None, spatial_key: str) -> sp.csr_array:
    """Return the usual graph, weighted by the usual averages; ``adata`` stays as it is."""
    from anndata import AnnData

    from pdvi.pp import neighborhood

    work = AnnData(obs=adata.obs[[sample_key]] if sample_key else adata.obs[[]])
    work.obsm[SPATIAL], work.obsm[SPATIAL_COMPONENTS] = coordinates_of(adata, spatial_key), components
    neighborhood(work, use_rep=SPATIAL_COMPONENTS, sample_key=sample_key)
    knn_graph(work, sample_key=sample_key)
    return check_graph(sp.csr_array(work.obsp[WEIGHTS], dtype=np.float64), work.n_obs)
