"""A fitted tissue kept as a few mixtures, and another tissue labeled by them.

Every view of averages leaves one mixture: the means and the noise of its features within the domains that all views
agreed on. Another tissue is labeled by each of them with the domains held fixed; its offset is estimated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import softmax

from pdvi._base.device import on_device
from pdvi.mixtures.build import EmpiricalBayes, potts_model
from pdvi.mixtures.config import CONFIG, Config
from pdvi.mixtures.fit_mixture import FitOptions, run_fit
from pdvi.mixtures.init import MIN_VARIANCE, about_mean, means_of, one_hot, scale_of
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.solvers import P2DVI
from pdvi.spatial.views import Tissue, View, ViewSettings

NARROW = 1e-6  # variance of the means' prior, in units of the noise: they stay where they are
KEPT_ROWS = 75_000  # that the mixtures are estimated from

Mixtures = dict[str, np.ndarray]  # as a file holds them: one entry per number, the first axis counts mixtures


def keep_mixtures(
    tissue: Tissue, labels: np.ndarray, views: tuple[View, ...], settings: ViewSettings
) -> Mixtures | None:
    """Return the mixture of every view of averages within given domains; None if there is no such view."""
    every = slice(None, None, max(1, len(labels) // KEPT_ROWS))
    sample = None if tissue.sample is None else tissue.sample[every]
    rows = []
    for view in views:
        if view.kind != "averages":
            continue
        size = settings.n_features(tissue.components.shape[1])
        X = about_mean(tissue.averages[view.n_neighbors][every, :size], sample)
        rows.append({"n_neighbors": view.n_neighbors, "n_components": size, **_mixture(X, labels[every], settings)})
    return {name: np.array([row[name] for row in rows]) for name in rows[0]} if rows else None


def _mixture(X: np.ndarray, labels: np.ndarray, settings: ViewSettings) -> dict[str, Any]:
    """Means, Cholesky factor of the noise and fractions; how far rows lie from means, and what these explain."""
    probabilities = one_hot(labels, settings.n_domains, X.dtype)
    means = means_of(X, probabilities)
    residuals = X - means[labels].astype(X.dtype)
    scale = scale_of(residuals)
    white = np.linalg.inv(scale).T.astype(X.dtype)
    within, total = (float(np.square(rows @ white).mean(dtype=float)) for rows in (residuals, X))
    fractions = np.maximum(probabilities.mean(0), MIN_VARIANCE)
    return {
        "means": means,
        "scale": scale,
        "shares": fractions / fractions.sum(),
        "distance": within,
        "explained": 1 - within / total,
    }


def label_by_mixture(
    mixtures: Mapping[str, Any], number: int, X: np.ndarray, graph: ShardedGraph, config: Config = CONFIG
) -> tuple[np.ndarray, float, float]:
    """Label rows, centered in each of their samples, by one of the kept mixtures.

    The kept mixture is the prior of the new one, so narrow that its means stay; offsets begin at 0, as if the samples
    had the domains in the fitted slide's fractions, and may then move as far as domains differ.

    Returns
    -------
    probabilities of the domains, and the mean squared distance of rows from them and the fraction of squares that they
    explain, each divided by what it was on the fitted slide.
    """
    size = int(np.asarray(mixtures["n_components"])[number])
    scale = np.asarray(mixtures["scale"])[number][:size, :size]
    whitening = np.linalg.inv(scale).astype(X.dtype)
    means, X = np.asarray(mixtures["means"])[number][:, :size] @ whitening.T, X[:, :size] @ whitening.T
    log_weight = np.log(np.asarray(mixtures["shares"])[number])
    between = max(float(means.var(0).mean()), MIN_VARIANCE)
    settings = EmpiricalBayes(means, means, np.full(size, NARROW), np.ones(size))
    model = potts_model(settings, len(X), damping=graph.safe_damping())
    offset_variance = np.full(graph.n_samples, between)
    model = dataclasses.replace(model, log_weight=on_device(log_weight), offset_variance=on_device(offset_variance))
    start = softmax(X @ means.T - 0.5 * (means**2).sum(1) + log_weight, axis=1)
    result = run_fit(graph.problem(model, X), graph.shard(start), FitOptions(solver=P2DVI(), config=config))
    probabilities = graph.unshard(result.local_params)
    assert graph.sample is not None
    residuals = X - means[probabilities.argmax(1)] - np.asarray(result.global_params["offset"])[graph.sample]
    within, total = float((residuals**2).mean()), float((X**2).mean())
    distance, explained = (float(np.asarray(mixtures[name])[number]) for name in ("distance", "explained"))
    return probabilities, within / distance, max(1 - within / total, 0.0) / explained
