"""Variational EM around a fit: noise covariance and weights re-estimated.

The component means and labels are fitted for fixed hyper-parameters; then these are set to their best values
for the fit, and the fit goes on from where it was (its duals are minus the gradients there). For diagonal noise
and for weights each such step lowers the objective.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from pdvi.core.problem import Problem
from pdvi.core.result import Point, Result, Status
from pdvi.run.fit import fit
from pdvi.solvers.conjugate import add, best_globals

Array = jax.Array

FIRST = 15  # epochs before the first re-estimation: enough to explore, and to settle for noise that is a guess
GAIN = 1e-4  # of the ELBO per row: with less in a round the rounds end
STEADY = 5e-3  # or with less of it and this share of the labels changed


class Fitted(NamedTuple):
    """The last problem and result, and the matrix by which the rows were multiplied on the way (tied noise)."""

    problem: Problem
    result: Result
    whitening: np.ndarray


def variational_em(
    problem: Problem,
    solver: Any,
    *,
    noise: str | None,
    weights: bool,
    first: int = FIRST,
    rounds: int = 20,
    epochs: int = 4,
    tol: float = 1e-5,
    start: Any = None,
    **settings: Any,
) -> Fitted:
    """Fit, re-estimate, go on; until a round gains too little, or changes too few labels, to be worth another.

    ``noise``: "diagonal", "tied" (one full covariance, applied by whitening the rows) or None for fixed noise.
    """
    if not (noise or weights):
        rounds = 0
    first = min(settings["max_epochs"], first) if rounds else settings["max_epochs"]
    # logging costs as much as an epoch, and what the rounds need to know is where each ends
    logged = {"log_every": first / 3 if start is None else first} if rounds else {}
    result = fit(problem, solver, start=start, tol=tol, **{**settings, **logged, "max_epochs": first})
    settings = {**settings, "max_epochs": epochs, "log_every": epochs}
    whitening = np.eye(problem.shards["x"].shape[-1])
    for _ in range(rounds):
        problem, point, step = reestimate(problem, result.point, noise=noise, weights=weights)
        whitening = np.asarray(step, float) @ whitening
        before = result
        result = joined(result, fit(problem, solver, start=point, tol=tol, **settings), "hyper-parameters re-estimated")
        if _little(before, result, float(problem.model.n_rows)):
            result = dataclasses.replace(result, status=Status.CONVERGED)  # of the rounds; each has few epochs
            break
    return Fitted(problem, result, whitening)


def _little(before: Result, after: Result, n_rows: float) -> bool:
    """Whether a round brought too little to go on."""
    gain = before.objective - after.objective
    changed = (np.asarray(before.local_params).argmax(-1) != np.asarray(after.local_params).argmax(-1)).sum()
    return bool(gain < GAIN * n_rows or (gain < STEADY * n_rows and changed < STEADY * n_rows))


def annealed(
    problem: Problem, solver: Any, temperature: float, epochs: int, *, start: Point | None = None, **settings: Any
) -> Result:
    """An epoch at each of ``epochs`` temperatures, falling linearly from ``temperature`` towards the model's own.

    The model's damping suits its own temperature, and so all higher ones.
    """
    results: list[Result] = []
    for now in np.linspace(temperature, float(problem.model.temperature), epochs + 1)[:-1]:
        heated = eqx.tree_at(lambda p: p.model.temperature, problem, jnp.full_like(problem.model.temperature, now))
        result = fit(heated, solver, start=start, **{**settings, "max_epochs": 1, "tol": 0.0})
        results.append(joined(results[-1], result, f"temperature {now:.3g}") if results else result)
        start = result.point
    return results[-1]


@eqx.filter_jit
def reestimate(problem: Problem, point: Point, *, noise: str | None, weights: bool) -> tuple[Problem, Point, Array]:
    """The best hyper-parameters for a point, and the point in the new coordinates of whitened rows."""
    model, shards = problem.model, problem.shards
    mean, variance = jnp.asarray(point.global_params["mean"]), jnp.exp(jnp.asarray(point.global_params["log_var"]))
    local = jax.tree.map(jnp.asarray, point.local_params)
    mass, total, _ = add(problem.map_shards(model.statistics, local))
    step = jnp.eye(mean.shape[1])
    if weights:
        share = jnp.maximum(mass, 1e-6 * model.n_rows / len(mass))
        model = dataclasses.replace(model, log_weights=jnp.log(share / share.sum()))
    if noise == "diagonal":
        square = shards["square"].sum(0) - 2 * (total * mean).sum(0) + mass @ (mean**2 + variance)
        estimate = square / model.n_rows
        model = dataclasses.replace(model, noise_variance=jnp.maximum(estimate, 1e-6 * estimate.mean()))
    if noise == "tied":
        cross = total.T @ mean
        scatter = _scatter(problem) - cross - cross.T + mean.T @ (mass[:, None] * mean) + jnp.diag(mass @ variance)
        scatter = scatter / model.n_rows
        ridge = 1e-6 * jnp.trace(scatter) / len(scatter)
        step = jnp.linalg.inv(jnp.linalg.cholesky(scatter + ridge * jnp.eye(len(scatter))))
        mean, variance, x = mean @ step.T, variance @ (step**2).T, shards["x"] @ step.T
        prior_mean = step @ model.prior_mean
        prior_variance = jnp.mean((mean - prior_mean) ** 2 + variance, axis=0)
        model = dataclasses.replace(
            model,
            noise_variance=jnp.ones_like(model.noise_variance),
            prior_mean=prior_mean,
            prior_variance=jnp.maximum(prior_variance, 1e-6 * prior_variance.mean()),
            log_scale=model.log_scale + jnp.log(jnp.diagonal(step)).sum(),
        )
        mask = shards["mask"][..., None] if "mask" in shards else 1.0
        shards = {**shards, "x": x, "square": jnp.sum(mask * x**2, axis=1)}
    problem = eqx.tree_at(lambda p: (p.model, p.shards), problem, (model, shards))
    # a variance far below its best value has next to no curvature, and with it P2D-VI next to no penalty
    best = problem.unravel(best_globals(problem, add(problem.map_shards(model.statistics, local))))
    return problem, Point({"mean": mean, "log_var": best["log_var"]}, local), step


def _scatter(problem: Problem) -> Array:
    def one(local: Any, shard: Any) -> Array:
        x = shard["x"] * shard["mask"][:, None] if "mask" in shard else shard["x"]
        return x.T @ x

    return problem.map_shards(one, jnp.zeros((problem.n_shards, problem.shards["x"].shape[1]))).sum(0)


def joined(earlier: Result, later: Result, event: str) -> Result:
    """``later`` with one trace over both."""
    trace = later.trace.copy()
    for column in ("step", "epoch", "seconds"):
        trace[column] += earlier.trace[column].iloc[-1]
    trace.loc[trace.index[0], "event"] = event
    return dataclasses.replace(later, trace=pd.concat([earlier.trace, trace], ignore_index=True))
