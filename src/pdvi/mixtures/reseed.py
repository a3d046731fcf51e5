"""Unused components put to use: each takes over a part of a component that has two clusters.

Rows are judged by their residuals, averaged over their neighbours in the graph if there is one: of two domains that
share a component single rows may show nothing, where averages of a few dozen show it plainly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, Globals
from pdvi.core.problem import Problem
from pdvi.core.result import Result, Status
from pdvi.mixtures.build import point_at
from pdvi.mixtures.em import Fitted, epochs_of, joined, whole_fit
from pdvi.mixtures.recipe import RECIPE, Recipe
from pdvi.mixtures.reestimate import reweighted
from pdvi.models.potts_mixture import neighbour_sum

GAUSSIAN = 2 / np.pi  # the share of a normal variable's variance that its best split explains


# (problem, responsibilities, epochs that are left) -> a fit from there
Attempt = Callable[[Problem, np.ndarray, float], Fitted]


def reseeded(
    fitted: Fitted,
    attempt: Attempt,
    *,
    weights: bool = False,
    exchange: bool = False,
    max_epochs: float = np.inf,
    recipe: Recipe = RECIPE,
) -> Fitted:
    """Split components until none is unused or it helps no more, in at most ``max_epochs``; never ends worse.

    With ``weights``, which are learned, a component's is that of the rows it is given: that of an unused one is so low
    that it would keep all rows away. With ``exchange`` components in use are given up too (their rows go to the
    nearest other one) where a split promises more than they are worth.
    """
    left = max_epochs
    for _ in range(recipe.exchange_trials if exchange else np.shape(fitted.result.local_params)[-1]):
        if left < 1:
            break
        local, taken = moved(fitted.problem, fitted.result, exchange, recipe)
        if not taken:
            break
        trial = attempt(reweighted(fitted.problem, local, recipe.floor) if weights else fitted.problem, local, left)
        if trial.result.objective >= fitted.result.objective:
            break
        left -= epochs_of(trial.result)
        result = joined(fitted.result, trial.result, told(taken))
        fitted = Fitted(trial.problem, result, trial.whitening @ fitted.whitening)
    return fitted


def briefly(solver: Any, status: Status, recipe: Recipe = RECIPE, **settings: Any) -> Attempt:
    """Return an attempt of a few epochs, hyper-parameters as they are; other ``settings`` are those of `fit`.

    It is too short to say whether the run has converged. The run before it could, and has this ``status``.
    """

    def attempt(problem: Problem, local: np.ndarray, left: float) -> Fitted:
        epochs = min(recipe.reseed_epochs, left)
        own = {**settings, "max_epochs": epochs, "log_every": epochs}
        result = whole_fit(problem, solver, start=point_at(problem, local), **own)
        return Fitted(problem, dataclasses.replace(result, status=status), np.eye(problem.shards["x"].shape[-1]))

    return attempt


def told(taken: list[int]) -> str:
    """Return the words of the trace for components that were moved."""
    return f"component{'s' if len(taken) > 1 else ''} {', '.join(map(str, taken))} reseeded"


def moved(
    problem: Problem, result: Result, exchange: bool, recipe: Recipe, most: int | None = None
) -> tuple[np.ndarray, list[int]]:
    """Return responsibilities where cheap components have taken over parts of those that look like two, and which have.

    With ``exchange`` components in use are cheap too, if they are worth less than a split promises; ``most``: so many.
    """
    local = np.array(result.local_params)
    phi = local.reshape(-1, local.shape[-1])
    mean = np.asarray(result.global_params["mean"]) / np.sqrt(np.asarray(problem.model.noise_variance))
    mass = phi.sum(0)
    unused = mass < recipe.unused_share * float(problem.model.n_rows) / len(mass)
    if not (unused.any() or exchange):
        return local, []
    distance = ((mean[:, None] - mean) ** 2).sum(-1)
    distance[:, unused] = np.inf
    np.fill_diagonal(distance, np.inf)
    worth = np.where(unused, 0.0, mass * distance.min(1))
    taken: list[int] = []
    splits = _splits(problem, result, np.flatnonzero(~unused), recipe)
    for free in np.argsort(worth, kind="stable")[: len(mass) if exchange else int(unused.sum())]:
        splits = [split for split in splits if split[1] != free]
        if not splits or splits[0][0] <= worth[free] or (most is not None and len(taken) >= most):
            break
        _, k, rows = splits.pop(0)
        nearest = int(distance[free].argmin())
        phi[:, nearest] += phi[:, free]
        phi[:, free] = 0
        phi[rows, free] = phi[rows, k]
        phi[rows, k] = 0
        distance[:, free] = np.inf  # no longer where it was
        taken.append(int(free))
    return local, taken


def _splits(problem: Problem, result: Result, used: np.ndarray, recipe: Recipe) -> list[tuple[float, int, np.ndarray]]:
    """What a split of each component promises, the component, and the rows to take from it; the best first."""
    phi = np.asarray(result.local_params).reshape(-1, result.local_params.shape[-1])
    labels, taken = phi.argmax(1), phi.sum(1) > 0.5
    globals_ = {name: jnp.asarray(value) for name, value in result.global_params.items()}
    smooth = _residuals(problem, jnp.asarray(result.local_params), globals_, recipe.smoothings)
    residuals = np.asarray(smooth).reshape(len(phi), -1)
    members = ((int(k), np.flatnonzero(taken & (labels == k))) for k in used)
    found = [(*_two(residuals[rows]), k, rows) for k, rows in members if len(rows) >= recipe.least_split_rows]
    return sorted(((gain, k, rows[side]) for gain, side, k, rows in found), key=lambda split: -split[0])


def _two(residuals: np.ndarray) -> tuple[float, np.ndarray]:
    """The best split along the leading direction: what it explains beyond a normal cloud's, and the smaller side."""
    centred = residuals - residuals.mean(0)
    along = centred @ np.linalg.eigh(centred.T @ centred)[1][:, -1]
    order = np.argsort(along)
    n = len(along)
    left = np.arange(1, n)
    explained = np.cumsum(along[order], dtype=float)[:-1] ** 2 * n / (left * (n - left))
    cut = int(explained.argmax()) + 1
    side = order[:cut] if 2 * cut <= n else order[cut:]
    return float(explained[cut - 1] - GAUSSIAN * np.sum(along**2, dtype=float)), side


@eqx.filter_jit
def _residuals(problem: Problem, local: Array, globals_: Globals, smoothings: int) -> Array:
    """Rows minus their expected means, in units of the noise, smoothed within components along the graph."""
    x = problem.shards["x"]
    if "sample" in problem.shards:
        x = x - globals_["offset"][problem.shards["sample"]]
    residuals = (x - local @ globals_["mean"]) / jnp.sqrt(problem.model.noise_variance)
    if "mask" in problem.shards:
        residuals *= problem.shards["mask"][..., None]
    if "table" in problem.shards:
        # the spot itself counts as much as its heaviest neighbour
        own = problem.shards["weight"].max(1)[..., None]
        total = jnp.maximum(problem.shards["weight"].sum(1)[..., None] + own, 1e-12)

        def smoothed(_: Array, residuals: Array) -> Array:
            return (own * residuals + problem.map_shards(neighbour_sum, residuals)) / total

        residuals = jax.lax.fori_loop(0, smoothings, smoothed, residuals)
    return residuals
