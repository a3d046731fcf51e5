"""Mixtures whose components have covariances of their own, or whose rows have weights: fitted from known probabilities.

What k-means and the shared covariance found is where this begins; then rounds of `fit` and re-estimation, as in `em`.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, Shard
from pdvi.core.problem import Problem
from pdvi.core.result import Point, Result, Status
from pdvi.mixtures.em import epochs_of, joined, little, whole_fit
from pdvi.mixtures.start import centred, means_of
from pdvi.mixtures.task import Task
from pdvi.models import FreeMixtureModel
from pdvi.shards.partition import Layout
from pdvi.solvers import P2DVI
from pdvi.solvers.conjugate import add, best_globals

STRUCTURES = ("full", "tied", "diag", "spherical", "diagonal")  # "diagonal": one variance per feature, shared by all


class FreeFound(NamedTuple):
    """Hold a fit in the units of the rows that were given; covariances are matrices, one per component."""

    result: Result
    means: np.ndarray
    mean_variances: np.ndarray
    covariances: np.ndarray
    log_weights: np.ndarray
    probabilities: np.ndarray
    epochs: float
    seconds: float


def fit_free(
    rows: np.ndarray,
    weight: np.ndarray | None,
    probabilities: np.ndarray,
    where: Layout,
    task: Task,
    *,
    structure: str,
    reg_covar: float,
    max_epochs: float,
) -> FreeFound:
    """Fit covariances of this ``structure`` from known probabilities; ``reg_covar`` is added to their diagonals."""
    began = time.perf_counter()
    weight = np.ones(len(rows)) if weight is None else weight
    X, offset, unit = centred(rows)
    X = np.asarray(X, float)
    spread = np.ones(X.shape[1])
    if structure != "spherical":  # which has no meaning in units of its own for each feature
        spread = X.std(0)
        spread[spread <= 1e-6 * spread.max()] = spread.max() or 1.0
    X = X / spread
    scale = spread * unit
    problem = _problem(X, weight, probabilities, where)
    local = where.shard(probabilities * weight[:, None]) * (where.mask[..., None])
    ridge = jnp.asarray(reg_covar / scale**2, jnp.result_type(float))
    solver = task.solver or P2DVI()
    batch: dict[str, Any] = (
        {} if solver.full_batch else {"batch_size": max(1, len(where.rows) // task.recipe.shards_per_batch)}
    )
    point = _at(problem, jnp.asarray(local, jnp.result_type(float)))
    result: Result | None = None
    total, left = float(weight.sum()), max_epochs
    for number in range(task.recipe.rounds):
        epochs = min(task.recipe.round_epochs, left)
        if epochs < 1 and result is not None:
            break
        noise = task.estimate_noise or number == 0
        problem, point = _reestimated(problem, point, structure, noise, task.learn_weights, task.recipe.floor, ridge)
        budget: dict[str, Any] = {"max_epochs": max(1, epochs), "log_every": max(1, epochs)}
        later = whole_fit(problem, solver, start=point, tol=task.tol, **budget, **batch)
        left -= epochs
        before, result = result, later if result is None else joined(result, later, "hyper-parameters re-estimated")
        point = result.point
        if before is not None and little(before, result, total, task.recipe):
            result = dataclasses.replace(result, status=Status.CONVERGED)
            break
        if number and not task.reestimates:
            break
    assert result is not None
    model = problem.model
    covariances = _inverted(np.asarray(model.precision, float)) * scale[:, None] * scale
    shift = total * float(np.log(scale).sum())
    result = dataclasses.replace(result, trace=result.trace.assign(objective=result.trace["objective"] + shift))
    found = np.asarray(where.unshard(result.local_params), float) / np.maximum(weight, 1e-300)[:, None]
    return FreeFound(
        result,
        np.asarray(result.global_params["mean"], float) * scale + offset,
        np.exp(np.asarray(result.global_params["log_var"], float)) * scale**2,
        covariances,
        np.asarray(model.log_weights, float),
        np.where(weight[:, None] > 0, found, 1 / found.shape[1]),
        epochs_of(result),
        time.perf_counter() - began,
    )


def _inverted(precisions: np.ndarray) -> np.ndarray:
    """Covariances in double precision, positive definite though precisions in single precision may miss it."""
    values, vectors = np.linalg.eigh(0.5 * (precisions + precisions.transpose(0, 2, 1)))
    values = np.maximum(values, 1e-9 * values.max(1, keepdims=True))
    return (vectors / values[:, None]) @ vectors.transpose(0, 2, 1)


def _problem(X: np.ndarray, weight: np.ndarray, probabilities: np.ndarray, where: Layout) -> Problem:
    mask = where.shard(weight) * where.mask
    means = means_of(X, probabilities * weight[:, None])
    n_components, n_features = means.shape
    dtype = jnp.result_type(float)
    model = FreeMixtureModel(
        start=jnp.asarray(means, dtype),
        prior_mean=jnp.zeros(n_features, dtype),
        prior_variance=jnp.ones(n_features, dtype),
        precision=jnp.broadcast_to(jnp.eye(n_features, dtype=dtype), (n_components, n_features, n_features)),
        log_weights=jnp.full(n_components, -np.log(n_components), dtype),
        n_rows=jnp.asarray(weight.sum(), dtype),
    )
    return Problem(model, {"x": where.shard(X), "mask": mask, "fraction": mask.sum(1) / mask.sum()})


def _at(problem: Problem, local: Array) -> Point:
    found = best_globals(problem, add(problem.map_shards(problem.model.statistics, local)))
    return Point(problem.unravel(found), local)


@eqx.filter_jit
def _reestimated(
    problem: Problem, point: Point, structure: str, noise: bool, weights: bool, floor: float, ridge: Array
) -> tuple[Problem, Point]:
    """Return the problem with the best hyper-parameters for a point, and the point with the globals best for these."""
    model = problem.model
    mean, variance = jnp.asarray(point.global_params["mean"]), jnp.exp(jnp.asarray(point.global_params["log_var"]))
    local = jnp.asarray(point.local_params)

    def scatter(phi: Array, shard: Shard) -> Array:
        def one(share: Array, centre: Array) -> Array:
            residual = shard["x"] - centre
            return (share[:, None] * residual).T @ residual

        return jax.vmap(one, in_axes=(1, 0))(phi, mean)

    mass = add(problem.map_shards(model.statistics, local)).mass
    total = problem.map_shards(scatter, local).sum(0) + jax.vmap(jnp.diag)(mass[:, None] * variance)
    covariance = structured(total, mass, structure, floor) + jnp.diag(ridge)
    if weights:
        share = jnp.maximum(mass, floor * model.n_rows / len(mass))
        model = dataclasses.replace(model, log_weights=jnp.log(share / share.sum()))
    prior = jnp.mean((mean - model.prior_mean) ** 2 + variance, axis=0)
    prior = jnp.maximum(prior, floor * jnp.maximum(prior.mean(), 1.0))
    precision = jnp.linalg.inv(covariance) if noise else model.precision
    model = dataclasses.replace(model, precision=precision, prior_variance=prior)
    problem = eqx.tree_at(lambda p: p.model, problem, model)
    found = problem.unravel(best_globals(problem, add(problem.map_shards(model.statistics, local))))
    return problem, Point(found, local)


def structured(total: Array, mass: Array, structure: str, floor: float) -> Array:
    """Return a covariance matrix per component from their scatter, ``total``; none is singular."""
    n_features = total.shape[1]
    eye = jnp.eye(n_features)
    pooled = total.sum(0) / mass.sum()
    if structure in ("full", "tied"):  # in single precision smaller eigenvalues are rounding, of either sign
        floor = max(floor, 1e-6 * n_features)
    least = jnp.maximum(floor * jnp.trace(pooled) / n_features, 1e-12)
    own = total / jnp.maximum(mass, 1e-6 * mass.sum())[:, None, None]
    if structure == "tied":
        own = jnp.broadcast_to(pooled, own.shape)
    elif structure == "diagonal":
        own = jnp.broadcast_to(pooled * eye, own.shape)
    elif structure == "diag":
        own = own * eye
    elif structure == "spherical":
        own = jnp.trace(own, axis1=1, axis2=2)[:, None, None] / n_features * eye
    return 0.5 * (own + own.transpose(0, 2, 1)) + least * eye


def in_shape(covariances: np.ndarray, structure: str) -> np.ndarray:
    """Return covariance (or precision) matrices in the shape that scikit-learn gives them."""
    if structure == "full":
        return covariances
    if structure in ("tied", "diagonal"):
        return covariances[0] if structure == "tied" else np.diagonal(covariances[0]).copy()
    diagonals = np.diagonal(covariances, axis1=1, axis2=2)
    return diagonals.copy() if structure == "diag" else diagonals.mean(1)
