"""A small tissue as one compiled program: every start fitted and re-estimated to its end, then the next.

It does what `variational_em` does with the solver `CAVI` on one shard, number for number: with one shard and nothing to
agree on, coordinate ascent is what Algorithm 1 comes to. Between two rounds nothing leaves the program, so that a slide
takes a fraction of the time that its calls would take, and all slides of a bucket share one compilation.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from pdvi._base.types import Array
from pdvi.core.executor import report
from pdvi.core.problem import Problem
from pdvi.core.result import Point, Result, Status
from pdvi.core.solver import State, named, settings_of
from pdvi.executors.steps import step
from pdvi.mixtures.em import Fitted, reestimate
from pdvi.mixtures.recipe import Recipe
from pdvi.mixtures.start import EmpiricalBayes
from pdvi.solvers.cavi import CAVI, CAVIServer

REESTIMATED = "hyper-parameters re-estimated"  # in the trace


class Starts(NamedTuple):
    """Hold several starts, stacked: the settings for whitened rows, and what whitens them."""

    settings: EmpiricalBayes
    whitening: Any
    log_scale: Any


class Course(NamedTuple):
    """Hold the way of a fit: a row per log point, of which the first ``length`` are used."""

    epoch: Array
    objective: Array
    gradient: Array
    begins_round: Array
    length: Array


class _Fit(NamedTuple):
    """Hold a fit on its way: the problem's arrays, the point, the whitening so far, and where it is."""

    arrays: Any
    state: State
    whitening: Array
    rounds: Array
    done: Array
    course: Course


def fit_starts(
    problem: Problem,
    starts: list[tuple[EmpiricalBayes, np.ndarray]],
    *,
    noise: str | None,
    weights: bool,
    tol: float,
    recipe: Recipe,
    seed: int,
) -> list[Fitted]:
    """Fit the rows of ``problem`` (one shard, not whitened) from every start: settings for white rows, what whitens."""
    began = time.perf_counter()
    stacked = Starts(
        EmpiricalBayes(*(np.stack(parts) for parts in zip(*(settings for settings, _ in starts)))),
        np.stack([whitening for _, whitening in starts]),
        np.array([np.linalg.slogdet(whitening)[1] for _, whitening in starts]),
    )
    stacked = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf, jnp.result_type(float))), stacked)
    fits: Any = jax.block_until_ready(
        _fit_starts(problem, stacked, noise, weights, jax.device_put(np.float32(tol)), recipe)
    )
    seconds = time.perf_counter() - began
    epochs = np.asarray(fits.course.epoch)[np.arange(len(starts)), np.asarray(fits.course.length) - 1]
    fits = jax.tree.map(np.asarray, fits)
    _, rest = eqx.partition(problem, eqx.is_array)
    shares = seconds * epochs / epochs.sum()
    return [
        _fitted(eqx.combine(_one(fits.arrays, i), rest), _one(fits, i), shares[i], seed) for i in range(len(starts))
    ]


def _one(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[i], tree)


@eqx.filter_jit
def _fit_starts(problem: Problem, starts: Starts, noise: str | None, weights: bool, tol: Array, recipe: Recipe) -> _Fit:
    return jax.lax.map(lambda start: _fit(problem, start, noise, weights, tol, recipe), starts)


def _fit(problem: Problem, start: Starts, noise: str | None, weights: bool, tol: Array, recipe: Recipe) -> _Fit:
    """Fit from one start: a few legs, then rounds of re-estimation."""
    problem = _whitened(problem, start)
    lam, local = problem.init(jax.random.key(0))
    arrays, rest = eqx.partition(problem, eqx.is_array)
    longest = 1 + recipe.first_logs + 2 * recipe.rounds
    course = Course(
        jnp.zeros(longest),
        jnp.zeros(longest),
        jnp.zeros((longest, lam.size)),
        jnp.zeros(longest, bool),
        jnp.asarray(0),
    )
    state = State(CAVIServer(lam), local, ())
    fit = _Fit(arrays, state, jnp.eye(start.whitening.shape[-1]), jnp.asarray(0), jnp.asarray(False), course)
    fit = _logged(rest, fit, 0, False)
    leg = recipe.first_epochs // recipe.first_logs

    def first(fit: _Fit) -> _Fit:
        fit = _logged(rest, _swept(rest, fit, leg), leg, False)
        return fit._replace(done=_settled(fit.course, tol))

    fit = jax.lax.while_loop(lambda fit: ~fit.done & (fit.course.length <= recipe.first_logs), first, fit)

    def next_round(fit: _Fit) -> _Fit:
        before, labels = _last(fit.course), fit.state.local.argmax(-1)
        problem = eqx.combine(fit.arrays, rest)
        point = Point(problem.unravel(fit.state.lam), fit.state.local)
        problem, point, matrix = reestimate(problem, point, noise=noise, weights=weights, floor=recipe.floor)
        fit = fit._replace(
            arrays=eqx.partition(problem, eqx.is_array)[0],
            state=State(CAVIServer(problem.ravel(point.global_params)), point.local_params, ()),
            whitening=matrix @ fit.whitening,
            rounds=fit.rounds + 1,
        )
        fit = _logged(rest, fit, 0, True)
        fit = _logged(rest, _swept(rest, fit, recipe.round_epochs), recipe.round_epochs, False)
        gain, rows = before - _last(fit.course), problem.model.n_rows
        changed = (labels != fit.state.local.argmax(-1)).sum()
        steady = (gain < recipe.steady_gain * rows) & (changed < recipe.steady_labels * rows)
        return fit._replace(done=(gain < recipe.least_gain * rows) | steady)

    fit = fit._replace(done=jnp.asarray(False))
    return jax.lax.while_loop(lambda fit: ~fit.done & (fit.rounds < recipe.rounds), next_round, fit)


def _whitened(problem: Problem, start: Starts) -> Problem:
    x = problem.shards["x"] @ start.whitening.T
    square = jnp.sum(problem.shards["mask"][..., None] * x**2, axis=1)
    means, prior_mean, prior_variance, noise_variance = start.settings
    model = dataclasses.replace(
        problem.model,
        start=means,
        prior_mean=prior_mean,
        prior_variance=prior_variance,
        noise_variance=noise_variance,
        log_scale=start.log_scale,
    )
    return eqx.tree_at(lambda p: (p.model, p.shards), problem, (model, {**problem.shards, "x": x, "square": square}))


# compiled functions of their own, since they stand in several places: traced once
_step = eqx.filter_jit(step)


@eqx.filter_jit
def _evaluate(problem: Problem, state: State) -> tuple[Array, Array]:
    return problem.evaluate(state.lam, state.local)


def _swept(rest: Problem, fit: _Fit, epochs: int) -> _Fit:
    problem = eqx.combine(fit.arrays, rest)
    batch = jnp.arange(problem.n_shards)
    state = jax.lax.fori_loop(0, epochs, lambda _, state: _step(problem, CAVI(), state, batch), fit.state)
    return fit._replace(state=state)


def _logged(rest: Problem, fit: _Fit, epochs: int, begins_round: bool) -> _Fit:
    problem, course = eqx.combine(fit.arrays, rest), fit.course
    losses, gradient = _evaluate(problem, fit.state)
    at = course.length
    epoch = jnp.where(at > 0, course.epoch[at - 1], 0.0) + epochs
    return fit._replace(
        course=Course(
            course.epoch.at[at].set(epoch),
            course.objective.at[at].set(losses.sum()),
            course.gradient.at[at].set(gradient),
            course.begins_round.at[at].set(begins_round),
            at + 1,
        )
    )


def _last(course: Course) -> Array:
    return course.objective[course.length - 1]


def _settled(course: Course, tol: Array) -> Array:
    """Two changes in a row below ``tol``, relative, as `pdvi.run.stopping.settled` has it."""
    newest, middle, oldest = (course.objective[course.length - back] for back in (1, 2, 3))
    small = (jnp.abs(newest - middle) < tol * jnp.abs(middle)) & (jnp.abs(middle - oldest) < tol * jnp.abs(oldest))
    return (course.length >= 3) & small


def _fitted(problem: Problem, fit: _Fit, seconds: float, seed: int) -> Fitted:
    """Return a fit as the step-by-step path would; its seconds are spread over the epochs."""
    course, count = fit.course, int(fit.course.length)
    rows = []
    for i in range(count):
        measured = report(problem, (course.objective[i], course.gradient[i]), {})
        epoch = float(course.epoch[i])
        at = {"step": round(epoch), "epoch": epoch, "seconds": seconds * epoch / float(course.epoch[count - 1])}
        rows.append({**at, **measured, "event": REESTIMATED if course.begins_round[i] else ""})
    result = Result(
        global_params=jax.tree.map(np.asarray, problem.unravel(fit.state.lam)),
        local_params=fit.state.local,
        trace=pd.DataFrame(rows),
        status=Status.CONVERGED if bool(fit.done) else Status.MAX_EPOCHS,
        n_steps=round(float(course.epoch[count - 1])),
        seed=seed,
        batch_size=problem.n_shards,
        solver=settings_of(CAVI()),
        state=named(fit.state.server, "server"),
        data="",
    )
    return Fitted(problem, result, np.asarray(fit.whitening, float))
