"""Fits with several numbers of components, all of them by one compiled program; and a held-out score."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
from scipy.special import logsumexp

from pdvi.mixtures.density import MixtureFit
from pdvi.mixtures.fit_mixture import FitOptions, fit_mixture
from pdvi.mixtures.init import center, kmeans_labels, means_of, one_hot, scale_of
from pdvi.mixtures.sharded_graph import ShardedGraph

Track = Callable[[Iterable[tuple[int, int]]], Iterable[tuple[int, int]]]  # goes through fits, and shows how far it is


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
