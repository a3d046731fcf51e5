"""The best noise, prior and weights for a point: of a mixture, of a two-level one, of rows with offsets."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, PyTree, Shard
from pdvi.core.model import Augmentation
from pdvi.core.problem import Problem
from pdvi.core.result import Point
from pdvi.mixtures.recipe import RECIPE
from pdvi.models import SampleOffsets, TwoLevelMixtureModel
from pdvi.models.gaussian_mixture import ABSENT
from pdvi.models.sample_offsets import OFFSET, shifted
from pdvi.solvers.conjugate import add, best_globals

ROUNDING = 1e-6  # of a sum of squares: what single precision leaves of a difference of such sums
NOTHING = 1e-20  # a variance far below that of any rows, which are given in a unit that suits them: they are constant

Reestimated = tuple[Problem, Point, Array]


@eqx.filter_jit
def reestimate(
    problem: Problem, point: Point, *, noise: str | None, weights: bool, floor: float = RECIPE.floor
) -> Reestimated:
    """Return the problem with the best hyper-parameters for a point, the point in its rows, and what whitened them.

    ``noise``: "diagonal", "tied" (one full covariance, applied by whitening the rows) or None for fixed noise.
    """
    point = Point(dict(point.global_params), jax.tree.map(jnp.asarray, point.local_params))
    rows = partial(_of_rows, noise=noise, weights=weights, floor=floor)
    if isinstance(problem.model, SampleOffsets):
        return _of_samples(problem, point, partial(_of_mixture, rows=rows, weights=weights, floor=floor))
    return _of_mixture(problem, point, rows=rows, weights=weights, floor=floor)


def reweighted(problem: Problem, local: np.ndarray, floor: float = RECIPE.floor) -> Problem:
    """Return a mixture with the weights that responsibilities (0 in padding) have, and all else as it was."""
    model = problem.model
    mixture: Any = model.mixture if isinstance(model, SampleOffsets) else model
    mass = jnp.asarray(local.reshape(-1, local.shape[-1]).sum(0))
    mixture = dataclasses.replace(mixture, log_weights=_log_shares(mass, mixture.n_rows, floor, mixture.present))
    model = dataclasses.replace(model, mixture=mixture) if isinstance(model, SampleOffsets) else mixture
    return eqx.tree_at(lambda p: p.model, problem, model)


@eqx.filter_jit
def starting_point(problem: Problem, *, seed: int = 0) -> Point:
    """Return the starting labels with the globals that are best for them."""
    local = problem.init(jax.random.key(seed))[1]
    found = best_globals(problem, add(problem.map_shards(problem.model.statistics, local)))
    return Point(problem.unravel(found), local)


def labels_of(local: PyTree) -> Array:
    """Return the most probable label of every row: of a two-level mixture its domain."""
    return (local["domain"] if isinstance(local, dict) else local).argmax(-1)


def _of_mixture(problem: Problem, point: Point, *, rows: Any, weights: bool, floor: float) -> Reestimated:
    if not isinstance(problem.model, TwoLevelMixtureModel):
        return rows(problem, point)
    model, local = problem.model, point.local_params
    # the lower level is a Gaussian mixture, and its noise that of one; the types' weights are the compositions
    lower = eqx.tree_at(lambda p: p.model, problem, model.types)
    lower_point = Point({name: point.global_params[name] for name in ("mean", "log_var")}, local["type"])
    lower, lower_point, step = rows(lower, lower_point, weights=False)
    fields = ("prior_mean", "prior_variance", "noise_variance", "log_scale")
    model = dataclasses.replace(model, **{name: getattr(lower.model, name) for name in fields})
    if weights:
        mass = add(problem.map_shards(model.statistics, local)).counts.sum(1)
        model = dataclasses.replace(model, log_share=_log_shares(mass, model.n_rows, floor, mass >= 0))
    problem = eqx.tree_at(lambda p: (p.model, p.shards), problem, (model, lower.shards))
    return problem, Point({**point.global_params, **lower_point.global_params}, local), step


def _of_samples(problem: Problem, point: Point, mixture: Any) -> Reestimated:
    """Re-estimate the mixture of the shifted rows; the offsets' prior stays as wide as that of the means."""
    globals_, model = dict(point.global_params), problem.model
    offset, log_var = (globals_.pop(name) for name in OFFSET)
    offsets = {"offset": offset, "offset_log_var": log_var}
    lower_shards = jax.vmap(lambda shard: shifted(offsets, shard))(problem.shards)
    lower = eqx.tree_at(lambda p: (p.model, p.shards), problem, (model.mixture, lower_shards))
    lower, lower_point, step = mixture(lower, Point(globals_, point.local_params))
    x = problem.shards["x"] @ step.T
    variance = jnp.broadcast_to(lower.model.prior_variance, offset.shape)
    shards = {**problem.shards, "x": x, "square": _squares(problem.shards, x)}
    problem = eqx.tree_at(lambda p: (p.model, p.shards), problem, (SampleOffsets(lower.model, variance), shards))
    moved = {"offset": offset @ step.T, "offset_log_var": jnp.log(jnp.exp(log_var) @ (step**2).T)}
    return problem, Point({**lower_point.global_params, **moved}, lower_point.local_params), step


def _of_rows(problem: Problem, point: Point, *, noise: str | None, weights: bool, floor: float) -> Reestimated:
    """Re-estimate a Gaussian or Potts mixture."""
    model, shards, local = problem.model, problem.shards, point.local_params
    mean, variance = jnp.asarray(point.global_params["mean"]), jnp.exp(jnp.asarray(point.global_params["log_var"]))
    mass, total, _ = add(problem.map_shards(model.statistics, local))
    step = jnp.eye(mean.shape[1])
    if weights:
        model = dataclasses.replace(model, log_weights=_log_shares(mass, model.n_rows, floor, model.present))
    if noise == "diagonal":
        square = shards["square"].sum(0) - 2 * (total * mean).sum(0) + mass @ (mean**2 + variance)
        estimate = jnp.maximum(square, ROUNDING * shards["square"].sum(0)) / model.n_rows
        least = jnp.maximum(floor * estimate.mean(), NOTHING)
        model = dataclasses.replace(model, noise_variance=jnp.maximum(estimate, least))
    if noise == "tied":
        cross = total.T @ mean
        about = _scatter(problem)
        scatter = about - cross - cross.T + mean.T @ (mass[:, None] * mean) + jnp.diag(mass @ variance)
        step = _whitening(scatter / model.n_rows, about / model.n_rows, floor)
        mean, variance, x = mean @ step.T, variance @ (step**2).T, shards["x"] @ step.T
        prior_mean = step @ model.prior_mean
        spread = (mean - prior_mean) ** 2 + variance
        prior_variance = jnp.mean(spread, axis=0, where=model.present[:, None])
        model = dataclasses.replace(
            model,
            noise_variance=jnp.ones_like(model.noise_variance),
            prior_mean=prior_mean,
            prior_variance=jnp.maximum(prior_variance, floor * prior_variance.mean()),
            log_scale=model.log_scale + jnp.log(jnp.diagonal(step)).sum(),
        )
        shards = {**shards, "x": x, "square": _squares(shards, x)}
    problem = eqx.tree_at(lambda p: (p.model, p.shards), problem, (model, shards))
    # a variance far below its best value has next to no curvature, and with it P2D-VI next to no penalty
    nothing = {"mean": jnp.zeros_like(mean), "log_var": jnp.zeros_like(mean)}
    best = model.global_step(add(problem.map_shards(model.statistics, local)), Augmentation(nothing, nothing, nothing))
    return problem, Point({"mean": mean, "log_var": best["log_var"]}, local), step


def _whitening(scatter: Array, about: Array, floor: float) -> Array:
    """Return the matrix that makes residuals white; ``about`` is the rows' own scatter, of which they are what is left.

    Along a direction in which residuals are next to nothing the difference is rounding, of either sign: there, and only
    there, the rows' own scatter says what can be resolved. Features that are 0 in every row stay as they are.
    """
    own, eye = jnp.diagonal(about), jnp.eye(len(scatter))
    unused = own <= 0
    scatter = jnp.where(unused | unused[:, None], 0.0, scatter)
    lost = jnp.diagonal(scatter) < 1e-4 * own
    scatter += jnp.diag(jnp.where(lost, ROUNDING * own - jnp.minimum(jnp.diagonal(scatter), 0), 0.0))
    ridge = floor * jnp.trace(scatter) / jnp.maximum((~unused).sum(), 1)
    ridge = jnp.where(ridge > 0, ridge, 1.0)  # 1: nothing varies
    rest = jnp.diag(jnp.where(unused, 1.0, 0.0))
    factor = jnp.linalg.cholesky(scatter + jnp.where(unused, 1.0, ridge) * eye)
    coarse = jnp.linalg.cholesky(scatter + jnp.maximum(ridge, 10 * ROUNDING * jnp.trace(about)) * eye + rest)
    factor = jnp.where(jnp.isfinite(factor).all(), factor, coarse)
    alone = jnp.diag(jnp.sqrt(jnp.maximum(jnp.diagonal(scatter), ridge)))
    factor = jnp.where(jnp.isfinite(factor).all(), factor, alone)
    return jax.scipy.linalg.solve_triangular(factor, eye, lower=True)


@eqx.filter_jit
def _log_shares(mass: Array, n_rows: Array, floor: float, present: Array) -> Array:
    share = jnp.where(present, jnp.maximum(mass, floor * n_rows / present.sum()), 0.0)
    return jnp.where(present, jnp.log(share / share.sum()), ABSENT)


def _squares(shards: Shard, x: Array) -> Array:
    mask = shards["mask"][..., None] if "mask" in shards else 1.0
    return jnp.sum(mask * x**2, axis=1)


def _scatter(problem: Problem) -> Array:
    """Return the sum of x x'; what the squares have beyond it (offsets' variances) counts on the diagonal."""

    def one(local: PyTree, shard: Shard) -> Array:
        x = shard["x"] * shard["mask"][:, None] if "mask" in shard else shard["x"]
        return x.T @ x

    products = problem.map_shards(one, jnp.zeros((problem.n_shards, problem.shards["x"].shape[1]))).sum(0)
    beyond = problem.shards["square"].sum(0) - jnp.diagonal(products)
    return products + jnp.diag(jnp.maximum(beyond, 0.0))
