"""How many domains: fits of every candidate, their agreement between seeds, the ELBO and a held-out score."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.special import logsumexp
from tqdm import tqdm

from pdvi import metrics
from pdvi._anndata.checks import check_adata, coordinates_of, features_of, samples_of, say
from pdvi._anndata.keys import COMPONENTS, NEIGHBORHOOD, SPATIAL, SPATIAL_COMPONENTS, WEIGHTS
from pdvi._base.checks import instance, whole
from pdvi._base.telling import wanted
from pdvi.mixtures.checks import check_coupling, check_graph
from pdvi.mixtures.config import CONFIG, Config
from pdvi.mixtures.density import MixtureFit
from pdvi.mixtures.fit_mixture import FitOptions, fit_mixture
from pdvi.mixtures.init import center, kmeans_labels, means_of, one_hot, scale_of
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.pp.neighborhood import averages
from pdvi.pp.tiles import neighbor_table
from pdvi.spatial.views import VIEWS
from pdvi.tl.missing import EDGES, WEIGHED_COMPONENTS, is_users_own, make_missing, usual_graph

if TYPE_CHECKING:
    from anndata import AnnData

Track = Callable[[Iterable[tuple[int, int]]], Iterable[tuple[int, int]]]  # goes through fits, and shows how far it is

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
    made_of = next((key for key in (COMPONENTS, SPATIAL_COMPONENTS) if key in adata.obsm), None)  # principal ones first
    components = None if made_of is None else features_of(adata, made_of, "pdvi.pp.prepare(adata)")
    coordinates, samples = coordinates_of(adata, spatial_key), samples_of(adata, sample_key)
    options = FitOptions(config=config)
    usual = features_of(adata, NEIGHBORHOOD, "pdvi.pp.neighborhood(adata)")
    features = [usual] * n_seeds
    if given is None and components is not None:  # averages over as many neighbors as the views have, in turn
        counts = sorted({view.n_neighbors for view in VIEWS if view.kind == "averages"}, reverse=True)
        seen = averages(components[:, : usual.shape[1]], coordinates, samples, counts)
        features = [seen[counts[number % len(counts)]] for number in range(n_seeds)]
    graph = check_graph(adata.obsp[WEIGHTS], adata.n_obs).astype(np.float64)
    how: dict[str, Any] = {"n_shards": config.patches(adata.n_obs), "beta": check_coupling(beta)}
    sharded = ShardedGraph(adata.n_obs, graph, coordinates, sample=samples if samples.any() else None, **how)
    fits = fit_candidates(features, sharded, candidates, options, _bar(progress, "fits of all spots"))
    table = pd.DataFrame({"n_domains": candidates})
    pairs = {k: combinations([fit.labels for fit in fits[k]], 2) for k in candidates}
    table["stability"] = [float(np.mean([metrics.ari(a, b) for a, b in pairs[k]])) for k in candidates]
    table["elbo"] = [-fits[k][0].objective for k in candidates]
    stability = table["stability"].to_numpy()
    if components is None:
        recommended = int(table["n_domains"][stability >= stability.max() - SAME_STABILITY].max())
    else:
        places, track = (coordinates, samples), _bar(progress, "fits of one half")
        mean = held_out_scores(
            components, *places, candidates, options, beta=float(beta), n_starts=n_seeds, track=track
        )
        enough = mean >= mean[0] + config.held_out_gain * (mean.max() - mean[0])
        table["held_out"] = mean
        recommended = candidates[int(np.where(enough, stability, -np.inf).argmax())]
    if len(candidates) > 2 and recommended in (candidates[0], candidates[-1]):
        end = "smallest" if recommended == candidates[0] else "largest"
        say(f"the recommended number, {recommended}, is the {end} candidate; others beyond it may be better still.")
    adata.uns[key_added] = {"recommended": recommended, **{name: table[name].to_numpy() for name in table}}
    return recommended


def fit_candidates(
    features: list[np.ndarray], graph: ShardedGraph, candidates: list[int], options: FitOptions, track: Track = iter
) -> dict[int, list[MixtureFit]]:
    """Fit every number of components once to each of ``features``, every time from a start of its own.

    Mixtures with fewer components than the largest candidate are padded with absent ones, which get no row.
    """
    found: dict[int, list[MixtureFit]] = {k: [] for k in candidates}
    most = max(candidates)
    for k, number in track([(k, n) for k in candidates for n in range(len(features))]):
        X = features[number]
        labels = kmeans_labels(center(X, graph.sample), k, seed=number, runs=options.config.runs(len(X)))
        start = one_hot(labels, most)
        own = dataclasses.replace(options, seed=number, n_present=k)
        fitted = fit_mixture(X, graph, start, own)
        found[k].append(fitted._replace(probabilities=fitted.probabilities[:, :k]))
    return found


def held_out_log_density(fitted: np.ndarray, probabilities: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the log density of ``rows`` under the tied mixture that ``probabilities`` of fitted rows tell of.

    It is that of rows about whose neighbors nothing is known: components weigh as much as their fractions.
    """
    means = means_of(fitted, probabilities)
    whitening = np.linalg.inv(scale_of(fitted - means[probabilities.argmax(1)]))
    white, centers = rows @ whitening.T, means @ whitening.T
    squares = (white**2).sum(1)[:, None] - 2 * white @ centers.T + (centers**2).sum(1)
    constant = np.linalg.slogdet(whitening)[1] - 0.5 * rows.shape[1] * np.log(2 * np.pi)
    return np.asarray(logsumexp(-0.5 * squares, b=probabilities.mean(0), axis=1) + constant)


def held_out_scores(
    components: np.ndarray,
    coordinates: np.ndarray,
    samples: np.ndarray,
    candidates: list[int],
    options: FitOptions,
    *,
    beta: float = 1.0,
    n_starts: int = 1,
    track: Track = iter,
) -> np.ndarray:
    """Return the mean log density of a held-out spot for every candidate, under the best of ``n_starts`` fits.

    One half of the spots is fitted, the other held out; they are drawn at random within each sample. Each half is
    averaged over its own spots, since averages over all would give each half away to the other. Left-out blocks would
    share less, but the tissue changes from place to place, and a domain may lie in a left-out block.
    """
    fitted, held_out = halves(samples)
    count = options.config.held_out_neighbors
    X, other = (
        averages(components[rows, :WEIGHED_COMPONENTS], coordinates[rows], samples[rows], [count])[count]
        for rows in (fitted, held_out)
    )
    graph = usual_graph(neighbor_table(coordinates[fitted], samples[fitted], EDGES), X).astype(np.float64)
    n_shards = options.config.patches(len(X))
    sharded = ShardedGraph(len(X), graph, coordinates[fitted], n_shards=n_shards, beta=beta)
    fits = fit_candidates([X] * n_starts, sharded, candidates, options, track)
    best = [min(fits[k], key=lambda fit: fit.objective) for k in candidates]
    return np.array([held_out_log_density(X, fit.probabilities, other).mean() for fit in best])


def halves(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of two halves, drawn at random within each sample."""
    order = np.random.default_rng(0).permutation(len(samples))
    order = order[np.argsort(samples[order], kind="stable")]  # sample by sample, so that both halves get of each
    return np.sort(order[::2]), np.sort(order[1::2])


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
