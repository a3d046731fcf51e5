"""How many domains: fits of every candidate, their agreement between seeds, the ELBO and a held-out score."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from pdvi import metrics
from pdvi._anndata.checks import check_adata, coordinates_of, features_of, samples_of, say
from pdvi._anndata.keys import NEIGHBORHOOD, SPATIAL, WEIGHTS
from pdvi._base.checks import instance, whole
from pdvi._base.telling import wanted
from pdvi.mixtures.checks import check_coupling, check_graph
from pdvi.mixtures.config import CONFIG, Config
from pdvi.mixtures.fit_mixture import FitOptions
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.pp.neighborhood import averages
from pdvi.spatial.n_domains import Track, fit_candidates
from pdvi.spatial.views import VIEWS
from pdvi.tl.held_out import Halves, components_of
from pdvi.tl.missing import is_users_own, make_missing

if TYPE_CHECKING:
    from anndata import AnnData

SAME_STABILITY = 0.02  # agreement between seeds that counts as equal


def choose_n_domains(
    adata: AnnData,
    candidates: Sequence[int],
    *,
    n_seeds: int = 3,
    beta: float = 1.0,
    sample_key: str | None = None,
    spatial_key: str = SPATIAL,
    key_added: str = "n_domains",
    progress: bool | None = None,
    config: Config = CONFIG,
) -> int:
    """Fit every candidate several times, and to half of the spots; recommend what the other half and all fits support.

    Writes a table to ``uns[key_added]`` (`pl.n_domains` draws it), which has for each candidate ``stability``, the mean
    adjusted Rand index between fits that differ in their seed and in how many neighbours they average; ``elbo``, that
    of the first of them; and ``held_out``, the mean log density of one half of the spots under a fit to the other, each
    half averaged over its own spots so that none tells of the other. Returns the recommended number: the most stable of
    the candidates that have gained most of what the held-out score can gain over the fewest domains. Real tissue
    changes gradually within domains too, so that score alone goes on rising where domains are split at will, and fits
    no longer agree on where. Without components in ``obsm``
    ("X_pca" or "X_spatial") there is nothing to average anew: then the largest whose stability is within 0.02 of the
    highest. It is said if the recommendation is the first or the last candidate.

    Parameters
    ----------
    n_seeds
        how many fits of a candidate are compared.
    beta
        strength of the coupling between neighbours.
    sample_key, spatial_key
        as in `domains`.
    progress
        show a bar; by default on a terminal.
    """
    check_adata(adata)
    candidates = _checked(candidates, adata.n_obs // 2)  # one half of the spots is fitted alone
    instance("config", config, Config, "a pdvi.mixtures.Config")
    whole("n_seeds", n_seeds, least=2)  # to compare
    given = NEIGHBORHOOD if is_users_own(adata) else None
    make_missing(adata, use_rep=given, sample_key=sample_key, spatial_key=spatial_key, components=False)
    coordinates, samples = coordinates_of(adata, spatial_key), samples_of(adata, sample_key)
    options = FitOptions(config=config)
    features = _features(adata, given, coordinates, samples, n_seeds)
    graph = check_graph(adata.obsp[WEIGHTS], adata.n_obs).astype(np.float64)
    how: dict[str, Any] = {"n_shards": config.patches(adata.n_obs), "beta": check_coupling(beta)}
    sharded = ShardedGraph(adata.n_obs, graph, coordinates, sample=samples if samples.any() else None, **how)
    fits = fit_candidates(features, sharded, candidates, options, _bar(progress, "fits of all spots"))
    table = pd.DataFrame({"n_domains": candidates})
    pairs = {k: combinations([fit.labels for fit in fits[k]], 2) for k in candidates}
    table["stability"] = [float(np.mean([metrics.ari(a, b) for a, b in pairs[k]])) for k in candidates]
    table["elbo"] = [-fits[k][0].objective for k in candidates]
    stability = table["stability"].to_numpy()
    if components_of(adata) is None:
        recommended = int(table["n_domains"][stability >= stability.max() - SAME_STABILITY].max())
    else:
        halves = Halves(adata, sample_key=sample_key, spatial_key=spatial_key, config=config)
        track = _bar(progress, "fits of one half")
        mean, enough = halves.scores(candidates, options, beta=float(beta), n_starts=n_seeds, track=track)
        table["held_out"] = mean
        recommended = candidates[int(np.where(enough, stability, -np.inf).argmax())]
    if len(candidates) > 2 and recommended in (candidates[0], candidates[-1]):
        end = "smallest" if recommended == candidates[0] else "largest"
        say(f"the recommended number, {recommended}, is the {end} candidate; others beyond it may be better still.")
    adata.uns[key_added] = {"recommended": recommended, **{name: table[name].to_numpy() for name in table}}
    return recommended


def _features(
    adata: AnnData, given: str | None, coordinates: np.ndarray, samples: np.ndarray, count: int
) -> list[np.ndarray]:
    """Return what each fit of a candidate sees: averages over as many neighbours as the views have, in turn."""
    usual = features_of(adata, NEIGHBORHOOD, "pdvi.pp.neighborhood(adata)")
    key = components_of(adata)
    if given is not None or key is None:
        return [usual] * count
    numbers = sorted({view.n_neighbors for view in VIEWS if view.kind == "averages"}, reverse=True)
    components = features_of(adata, key, "pdvi.pp.prepare(adata)")[:, : usual.shape[1]]
    seen = averages(components, coordinates, samples, numbers)
    return [seen[numbers[n % len(numbers)]] for n in range(count)]


def _bar(progress: bool | None, what: str) -> Track:
    """Return what goes through fits with a bar."""
    return partial(tqdm, desc=what, unit="fit", disable=not wanted(progress), leave=False)


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
