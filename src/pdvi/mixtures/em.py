"""Variational EM around a fit: noise covariance and weights re-estimated.

The component means and labels are fitted for fixed hyper-parameters; then these are set to their best values
for the fit, and the fit goes on from where it was (its duals are minus the gradients there). For diagonal noise
and for weights each such step lowers the objective.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pandas as pd

from pdvi.core.problem import Problem
from pdvi.core.result import Point, Result, Status
from pdvi.mixtures.recipe import RECIPE, Recipe
from pdvi.mixtures.reestimate import labels_of, reestimate
from pdvi.run.fit import fit


class Fitted(NamedTuple):
    """Hold the last problem and result, and the matrix by which the rows were multiplied on the way (tied noise)."""

    problem: Problem
    result: Result
    whitening: np.ndarray


def variational_em(
    problem: Problem,
    solver: Any,
    *,
    noise: str | None,
    weights: bool,
    max_epochs: int,
    tol: float = RECIPE.tol,
    first: int | None = None,
    start: Any = None,
    recipe: Recipe = RECIPE,
    **settings: Any,
) -> Fitted:
    """Fit, re-estimate, go on; until a round gains too little, or changes too few labels, to be worth another.

    ``noise``: "diagonal", "tied" (one full covariance, applied by whitening the rows) or None for fixed noise.
    ``first`` is the number of epochs before the first re-estimation; all epochs together are at most ``max_epochs``.
    """
    rounds = recipe.rounds if noise or weights else 0
    logged: dict[str, Any] = {}
    if rounds:  # a small budget has a round too, if it can
        wanted = recipe.first_epochs if first is None else first
        first = max(1, min(wanted, max_epochs - recipe.round_epochs))
        # logging costs as much as an epoch, and what the rounds need to know is where each ends
        logged = {"log_every": first / recipe.first_logs if start is None else first}
    else:
        first = max_epochs
    result = whole_fit(problem, solver, start=start, tol=tol, **{**settings, **logged, "max_epochs": first})
    whitening = np.eye(problem.shards["x"].shape[-1])
    for _ in range(rounds):
        epochs = min(recipe.round_epochs, max_epochs - epochs_of(result))
        if epochs < 1:
            break
        problem, point, step = reestimate(problem, result.point, noise=noise, weights=weights, floor=recipe.floor)
        whitening = np.asarray(step, float) @ whitening
        budget = {"max_epochs": epochs, "log_every": epochs}
        later = whole_fit(problem, solver, start=point, tol=tol, **{**settings, **budget})
        before, result = result, joined(result, later, "hyper-parameters re-estimated")
        if epochs == recipe.round_epochs and little(before, result, float(problem.model.n_rows), recipe):
            result = dataclasses.replace(result, status=Status.CONVERGED)  # of the rounds; each has few epochs
            break
    return Fitted(problem, result, whitening)


def whole_fit(problem: Problem, solver: Any, **settings: Any) -> Result:
    """Fit as `pdvi.fit` does, but leave all that is going on when interrupted: a part of a way is no result."""
    result = fit(problem, solver, **settings)
    if result.status is Status.INTERRUPTED:
        raise KeyboardInterrupt
    return result


def epochs_of(result: Result) -> float:
    """Return the epochs that a run has made."""
    return float(result.trace["epoch"].iloc[-1])


def little(before: Result, after: Result, n_rows: float, recipe: Recipe) -> bool:
    """Return whether a round brought too little to go on."""
    gain = before.objective - after.objective
    changed = (np.asarray(labels_of(before.local_params)) != np.asarray(labels_of(after.local_params))).sum()
    steady = gain < recipe.steady_gain * n_rows and changed < recipe.steady_labels * n_rows
    return bool(gain < recipe.least_gain * n_rows or steady)


def annealed(
    problem: Problem, solver: Any, temperature: float, epochs: int, *, start: Point | None = None, **settings: Any
) -> Result:
    """Fit for an epoch at each of ``epochs`` temperatures, which fall linearly from ``temperature`` to the model's own.

    The model's damping suits its own temperature, and so all higher ones.
    """
    results: list[Result] = []
    for now in np.linspace(temperature, float(problem.model.temperature), epochs + 1)[:-1]:
        heated = eqx.tree_at(lambda p: p.model.temperature, problem, jnp.full_like(problem.model.temperature, now))
        result = whole_fit(heated, solver, start=start, **{**settings, "max_epochs": 1, "tol": 0.0})
        results.append(joined(results[-1], result, f"temperature {now:.3g}") if results else result)
        start = result.point
    return results[-1]


def joined(earlier: Result, later: Result, event: str) -> Result:
    """Return ``later`` with one trace over both."""
    trace = later.trace.copy()
    for column in ("step", "epoch", "seconds"):
        trace[column] += earlier.trace[column].iloc[-1]
    trace.loc[trace.index[0], "event"] = event
    return dataclasses.replace(later, trace=pd.concat([earlier.trace, trace], ignore_index=True))


def measured_in(result: Result, unit: float, n_numbers: int) -> Result:
    """Return the result of rows that were divided by ``unit`` with the objective of the rows themselves."""
    if not np.isfinite(result.objective):
        msg = (
            "`X` has no finite fit in single precision: its values differ too much in size; "
            "remove outliers, or give the features similar units."
        )
        raise ValueError(msg)
    if unit == 1:
        return result
    return dataclasses.replace(
        result, trace=result.trace.assign(objective=result.trace["objective"] + n_numbers * np.log(unit))
    )
