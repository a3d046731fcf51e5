"""How many domains: fits of every candidate, their agreement between seeds, the ELBO and a held-out score."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from pdvi import metrics
from pdvi._anndata.checks import check_adata, coordinates_of, features_of
from pdvi._anndata.keys import NEIGHBORHOOD, SPATIAL, WEIGHTS
from pdvi._base.checks import instance, whole
from pdvi.mixtures.estimators import PottsMixture
from pdvi.mixtures.recipe import RECIPE, Recipe
from pdvi.tl.held_out import Halves, components_of
from pdvi.tl.missing import is_users_own, make_missing

if TYPE_CHECKING:
    from anndata import AnnData


def choose_n_domains(
    adata: AnnData,
    candidates: Sequence[int],
    *,
    n_seeds: int = 3,
    beta: float = 1.0,
    sample_key: str | None = None,
    spatial_key: str = SPATIAL,
    key_added: str = "n_domains",
    recipe: Recipe = RECIPE,
) -> int:
    """Fit every candidate from several seeds, and to half of the spots; recommend what describes the other half best.

    Writes a table to ``uns[key_added]`` (`pl.n_domains` draws it), which has for each candidate ``stability``, the mean
    adjusted Rand index between seeds; ``elbo``, the best of the seeds; and ``held_out``, the mean log density of one
    half of the spots under a fit to the other, each half averaged over its own spots so that none tells of the other.
    Returns the recommended number: the candidate with the highest held-out score. Without components in ``obsm``
    ("X_pca" or "X_spatial") there is nothing to average anew: then the largest whose stability is within 0.02 of the
    highest.
    """
    check_adata(adata)
    candidates = _checked(candidates, adata.n_obs // 2)  # one half of the spots is fitted alone
    instance("recipe", recipe, Recipe, "a pdvi.mixtures.Recipe")
    whole("n_seeds", n_seeds, least=2)  # to compare
    given = NEIGHBORHOOD if is_users_own(adata) else None
    make_missing(adata, use_rep=given, sample_key=sample_key, spatial_key=spatial_key, components=False)
    features = features_of(adata, "X_neighborhood", "pdvi.pp.neighborhood(adata)")
    graph, coordinates = adata.obsp[WEIGHTS], coordinates_of(adata, spatial_key)[:, :2]
    halves = None
    if components_of(adata) is not None:
        halves = Halves(adata, sample_key=sample_key, spatial_key=spatial_key, recipe=recipe)
    rows = []
    for k in candidates:
        fits = [
            PottsMixture(k, beta=beta, learn_weights=True, random_state=seed, recipe=recipe).fit(
                features, graph=graph, coordinates=coordinates
            )
            for seed in range(n_seeds)
        ]
        agreement = [metrics.ari(a.labels_, b.labels_) for a, b in combinations(fits, 2)]
        row = {"n_domains": k, "stability": float(np.mean(agreement)), "elbo": max(fit.elbo_ for fit in fits)}
        if halves is not None:
            row["held_out"] = halves.score(k, beta=beta, n_init=n_seeds)
        rows.append(row)
    table = pd.DataFrame(rows)
    if halves is not None:
        recommended = candidates[int(table["held_out"].to_numpy().argmax())]
    else:
        stable = table["stability"] >= table["stability"].max() - recipe.stability_slack
        recommended = int(table["n_domains"][stable].max())
    adata.uns[key_added] = {"recommended": recommended, **{name: table[name].to_numpy() for name in table}}
    return recommended


def _checked(candidates: Any, most: int) -> list[int]:
    """Return the candidates in order, each once."""
    instance("candidates", candidates, Iterable, "a list of numbers of domains")
    given = list(candidates)
    if not all(isinstance(k, int | np.integer) for k in given):
        msg = f"`candidates` must be whole numbers of domains, got {candidates!r}."
        raise ValueError(msg)
    listed = sorted({int(k) for k in given})
    if not listed or listed[0] < 2 or listed[-1] > most:
        msg = f"`candidates` must be numbers between 2 and half the number of spots ({most}), got {listed}."
        raise ValueError(msg)
    return listed
