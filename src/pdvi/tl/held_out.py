"""How well a fit to one half of the spots describes the other half."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from pdvi import gr, pp
from pdvi._anndata.checks import coordinates_of, features_of, samples_of
from pdvi._anndata.keys import COMPONENTS, NEIGHBORHOOD, SPATIAL, SPATIAL_COMPONENTS, WEIGHTS
from pdvi.mixtures.candidates import Told, fit_candidates, log_density
from pdvi.mixtures.checks import check_graph
from pdvi.mixtures.recipe import RECIPE, Recipe
from pdvi.mixtures.task import Rows, Task

if TYPE_CHECKING:
    from anndata import AnnData


class Scores(NamedTuple):
    """Hold the mean log density of a held-out spot for every candidate, and whether there are domains enough."""

    mean: np.ndarray
    enough: np.ndarray


class Halves:
    """Two halves of the spots, drawn at random within each sample, each with averages and edges of its own.

    Averages over all spots would give each half away to the other, since neighbours share most of theirs. Left-out
    blocks share less, but the tissue changes from place to place, and a domain may lie in a left-out block. Halves that
    are averaged apart share no spot, and each covers the whole tissue; the price is noisier averages.
    """

    def __init__(
        self,
        adata: AnnData,
        *,
        sample_key: str | None = None,
        spatial_key: str = SPATIAL,
        seed: int = 0,
        recipe: Recipe = RECIPE,
    ):
        samples = samples_of(adata, sample_key)
        order = np.random.default_rng(seed).permutation(adata.n_obs)
        order = order[np.argsort(samples[order], kind="stable")]  # sample by sample, so that both halves get of each
        self.rows = np.sort(order[::2]), np.sort(order[1::2])
        self.fitted, self.held_out = (_part(adata, rows, samples, spatial_key, recipe) for rows in self.rows)

    def scores(self, candidates: list[int], task: Task, *, n_starts: int = 1, told: Told = iter) -> Scores:
        """Score every candidate by the best of ``n_starts`` fits to one half.

        A candidate has domains enough if it has gained most of what the best one gains over the smallest.
        """
        X, held_out = self.fitted.obsm[NEIGHBORHOOD], self.held_out.obsm[NEIGHBORHOOD]
        graph = check_graph(self.fitted.obsp[WEIGHTS], len(X)).astype(np.float64)
        rows = Rows(X, graph, self.fitted.obsm[SPATIAL])
        fits = fit_candidates(rows, [X] * n_starts, candidates, task, told)
        best = [max(fits[k], key=lambda fit: fit.elbo) for k in candidates]
        mean = np.array([log_density(X, fit.probabilities, held_out).mean() for fit in best])
        return Scores(mean, mean >= mean[0] + task.recipe.held_out_gain * (mean.max() - mean[0]))


def components_of(adata: AnnData) -> str | None:
    """Return the name of the components of single spots, principal ones first; None if there are none."""
    return next((key for key in (COMPONENTS, SPATIAL_COMPONENTS) if key in adata.obsm), None)


def _part(adata: AnnData, rows: np.ndarray, samples: np.ndarray, spatial_key: str, recipe: Recipe) -> AnnData:
    """Some of the spots as a slide of their own."""
    from anndata import AnnData

    part = AnnData(obs=pd.DataFrame({"sample": samples[rows]}, index=rows.astype(str)))
    part.obsm[COMPONENTS] = features_of(adata, components_of(adata) or COMPONENTS, "pdvi.pp.prepare(adata)")[rows]
    part.obsm[SPATIAL] = coordinates_of(adata, spatial_key)[rows]
    pp.neighborhood(part, n_neighbors=recipe.held_out_neighbors, sample_key="sample")
    gr.knn_graph(part, sample_key="sample")
    return part
