"""How well a fit to one half of the spots describes the other half."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from pdvi import gr, pp
from pdvi._anndata.checks import coordinates_of, features_of, samples_of
from pdvi._anndata.keys import COMPONENTS, NEIGHBORHOOD, SPATIAL, SPATIAL_COMPONENTS, WEIGHTS
from pdvi.mixtures.checks import check_graph
from pdvi.mixtures.config import CONFIG, Config
from pdvi.mixtures.fit_mixture import FitOptions
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.spatial.n_domains import Track, fit_candidates, held_out_log_density

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
        config: Config = CONFIG,
    ):
        samples = samples_of(adata, sample_key)
        order = np.random.default_rng(seed).permutation(adata.n_obs)
        order = order[np.argsort(samples[order], kind="stable")]  # sample by sample, so that both halves get of each
        self.rows = np.sort(order[::2]), np.sort(order[1::2])
        self.fitted, self.held_out = (_part(adata, rows, samples, spatial_key, config) for rows in self.rows)

    def scores(
        self, candidates: list[int], options: FitOptions, *, beta: float = 1.0, n_starts: int = 1, track: Track = iter
    ) -> tuple[np.ndarray, np.ndarray]:
        """Score every candidate by the best of ``n_starts`` fits to one half.

        Returns
        -------
        the mean log density of a held-out spot for every candidate, and whether it has domains enough: whether it has
        gained most of what the best one gains over the smallest.
        """
        X, held_out = self.fitted.obsm[NEIGHBORHOOD], self.held_out.obsm[NEIGHBORHOOD]
        graph = check_graph(self.fitted.obsp[WEIGHTS], len(X)).astype(np.float64)
        n_shards = options.config.patches(len(X))
        sharded = ShardedGraph(len(X), graph, self.fitted.obsm[SPATIAL], n_shards=n_shards, beta=beta)
        fits = fit_candidates([X] * n_starts, sharded, candidates, options, track)
        best = [min(fits[k], key=lambda fit: fit.objective) for k in candidates]
        mean = np.array([held_out_log_density(X, fit.probabilities, held_out).mean() for fit in best])
        return mean, mean >= mean[0] + options.config.held_out_gain * (mean.max() - mean[0])


def components_of(adata: AnnData) -> str | None:
    """Return the name of the components of single spots, principal ones first; None if there are none."""
    return next((key for key in (COMPONENTS, SPATIAL_COMPONENTS) if key in adata.obsm), None)


def _part(adata: AnnData, rows: np.ndarray, samples: np.ndarray, spatial_key: str, config: Config) -> AnnData:
    """Some of the spots as a slide of their own."""
    from anndata import AnnData

    part = AnnData(obs=pd.DataFrame({"sample": samples[rows]}, index=rows.astype(str)))
    part.obsm[COMPONENTS] = features_of(adata, components_of(adata) or COMPONENTS, "pdvi.pp.prepare(adata)")[rows]
    part.obsm[SPATIAL] = coordinates_of(adata, spatial_key)[rows]
    pp.neighborhood(part, n_neighbors=config.held_out_neighbors, sample_key="sample")
    gr.knn_graph(part, sample_key="sample")
    return part
