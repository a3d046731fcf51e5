"""A fitted tissue kept as a few mixtures, and another tissue labelled by them.

Every view of averages leaves one mixture: the means and the noise of its features within the domains that all views
agreed on. Another tissue is labelled by each of them with the domains held fixed; its offset is learned.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from pdvi.mixtures.build import coupled, coupled_problem
from pdvi.mixtures.em import whole_fit
from pdvi.mixtures.ground import cut
from pdvi.mixtures.recipe import Recipe
from pdvi.mixtures.start import EmpiricalBayes, means_of, scale_of
from pdvi.mixtures.task import Rows, Task
from pdvi.solvers import CAVI

NARROW = 1e-6  # variance of the means' prior, in units of the noise


class Kept(NamedTuple):
    """Hold one view's mixture: features are averages over so many neighbours, centred."""

    n_neighbors: int
    means: np.ndarray  # (K, d)
    scale: np.ndarray  # (d, d), Cholesky factor of the noise's covariance
    shares: np.ndarray  # (K,)
    distance: float  # mean squared distance of rows from their domain's mean, in units of the noise, per feature
    explained: float  # share of the rows' squares that the domains' means explain


def keep(X: np.ndarray, n_neighbors: int, labels: np.ndarray, n_domains: int, recipe: Recipe) -> Kept:
    """Return the mixture of centred features within given domains."""
    one_hot = np.eye(n_domains, dtype=X.dtype)[labels]
    means = means_of(X, one_hot)
    residuals = X - means[labels]
    scale = scale_of(residuals, recipe)
    white = np.linalg.inv(scale).T.astype(X.dtype)
    within, total = (float(np.square(rows @ white).mean(dtype=float)) for rows in (residuals, X))
    shares = np.maximum(one_hot.mean(0), recipe.floor)
    return Kept(n_neighbors, means, scale, shares / shares.sum(), within, 1 - within / total)


class Annotated(NamedTuple):
    """Hold probabilities, and how rows lie around their domains, as `Kept` has it."""

    probabilities: np.ndarray
    distance: float
    explained: float


def annotate(kept: Kept, rows: Rows, task: Task) -> Annotated:
    """Label rows, centred in each of their samples, by a kept mixture; every sample's offset is learned.

    The kept mixture is the prior of the new one, so narrow that its means stay; the first offsets are 0, as if the
    samples had the domains in the fitted slide's shares, and may then move as far as domains differ.
    """
    recipe, matrix = task.recipe, np.linalg.inv(kept.scale).astype(rows.X.dtype)
    means, X = kept.means @ matrix.T, rows.X @ matrix.T
    between = np.maximum(means.var(0), recipe.floor)
    ones = np.ones_like(between)
    settings = EmpiricalBayes(means, means, NARROW * ones, ones)
    where = cut(rows, task)
    assert rows.graph is not None
    coupling = coupled(rows.graph, where, beta=task.beta, recipe=recipe)
    problem = coupled_problem(X, settings, where, coupling, sample=rows.sample)
    wide = jnp.broadcast_to(jnp.asarray(between), problem.model.offset_variance.shape)
    weights = jnp.asarray(np.log(kept.shares))
    problem = eqx.tree_at(lambda p: (p.model.mixture.log_weights, p.model.offset_variance), problem, (weights, wide))
    result = whole_fit(problem, CAVI(), max_epochs=task.max_epochs, tol=task.tol)
    probabilities = where.unshard(np.asarray(result.local_params))
    offset = np.asarray(result.global_params["offset"])
    residuals = X - means[probabilities.argmax(1)] - offset[rows.sample]
    within, total = float((residuals**2).mean()), float((X**2).mean())
    return Annotated(probabilities, within, 1 - within / total)
