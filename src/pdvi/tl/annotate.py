"""Labels of another slide from a fitted one: the same genes, components and domains, an offset of its own."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pdvi._anndata.checks import check_adata, coordinates_of, fit_of, samples_of
from pdvi._anndata.keys import DOMAIN, SPATIAL, SPATIAL_COMPONENTS
from pdvi._base.checks import instance
from pdvi.mixtures.config import CONFIG, Config
from pdvi.mixtures.init import about_mean
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.pp.neighborhood import averages
from pdvi.pp.spatial_components import projected
from pdvi.pp.tiles import neighbor_table
from pdvi.spatial.consensus import certainty_of, votes
from pdvi.spatial.transfer import label_by_mixture
from pdvi.tl.missing import EDGES, WEIGHED_NEIGHBORS, usual_graph
from pdvi.tl.results import write_labels

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
    config: Config = CONFIG,
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
    instance("config", config, Config, "a pdvi.mixtures.Config")
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
    counts = np.asarray(model["n_neighbors"])
    found = averages(components, coordinates, samples, {*counts.tolist(), WEIGHED_NEIGHBORS})
    weights = usual_graph(neighbor_table(coordinates, samples, EDGES), found[WEIGHED_NEIGHBORS]).astype(np.float64)
    options: dict[str, Any] = {"n_shards": config.patches(adata.n_obs), "beta": float(fit["params"]["beta"])}
    graph = ShardedGraph(adata.n_obs, weights, coordinates, sample=samples, **options)
    done = [
        label_by_mixture(model, number, about_mean(found[count], samples), graph, config)
        for number, count in enumerate(counts.tolist())
    ]
    categories = list(fitted.obs[key].cat.categories)
    probability = votes([each[0].argmax(1) for each in done], len(categories))
    farther, explained = (float(np.median([each[i] for each in done])) for i in (1, 2))
    labels = probability.argmax(1)
    certainty = certainty_of(probability, labels, len(done))
    write_labels(adata, name, probability, categories, labels, certainty, np.asarray(fitted.uns[f"{key}_colors"]))
    adata.uns[name] = {"params": {"key": key, "sample_key": sample_key or "", "spatial_key": spatial_key}}
    adata.uns[name] |= {"farther": farther, "explained": explained}
    if farther > config.max_distance or explained < config.min_explained:
        warnings.warn(
            f"this slide does not fit the domains of `fitted`: spots lie {farther:.1f} times as far from them "
            f"(squared), which explain {explained:.2f} times as much of the features as there. Check that genes and "
            "tissue are the same; the labels may mean nothing.",
            UserWarning,
            stacklevel=2,
        )
