"""How well a fit to one half of the spots describes the other half."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from pdvi import gr, pp
from pdvi._anndata.checks import coordinates_of, features_of, samples_of
from pdvi._anndata.keys import COMPONENTS, SPATIAL, SPATIAL_COMPONENTS, WEIGHTS
from pdvi.mixtures.estimators import PottsMixture
from pdvi.mixtures.recipe import RECIPE, Recipe

if TYPE_CHECKING:
    from anndata import AnnData


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
        self.recipe = recipe

    def score(self, n_domains: int, *, beta: float = 1.0, n_init: int = 1, seed: int = 0) -> float:
        """Return the mean log density of a held-out spot under the mixture fitted to the other half.

        It is that of a spot about whose neighbours nothing is known: domains weigh as much as their shares.
        """
        mixture = PottsMixture(
            n_domains, beta=beta, learn_weights=True, n_init=n_init, random_state=seed, recipe=self.recipe
        )
        fit = mixture.fit(
            self.fitted.obsm["X_neighborhood"],
            graph=self.fitted.obsp[WEIGHTS],
            coordinates=self.fitted.obsm[SPATIAL][:, :2],
        )
        X = self.held_out.obsm["X_neighborhood"]
        noise = multivariate_normal(cov=fit.covariances_, allow_singular=True)
        densities = np.stack([noise.logpdf(X - mean) for mean in fit.means_], axis=1)
        return float(logsumexp(densities, b=fit.probabilities_.mean(0), axis=1).mean())


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
