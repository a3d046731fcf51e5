"""A small tissue as one compiled program: every start and view fitted and re-estimated to its end, then the next.

It does what `variational_em` does with the solver `CAVI` on one shard, number for number: with one shard and nothing to
agree on, coordinate ascent is what Algorithm 1 comes to. Between two rounds nothing leaves the program, so that a slide
takes a fraction of the time that its calls would take, and all slides of a bucket share one compilation.
"""

from __future__ import annotations

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
from pdvi.mixtures.em import Fitted
from pdvi.mixtures.recipe import Recipe
from pdvi.mixtures.reestimate import labels_of, reestimate, starting_point
from pdvi.solvers.cavi import CAVI, CAVIServer

OWN = ("x", "square", "domain", "type")  # arrays of a shard that differ between fits; all others are shared
REESTIMATED = "hyper-parameters re-estimated"  # in the trace


class Course(NamedTuple):
    """Hold the way of a fit: a row per log point, of which the first ``length`` are used."""

    epoch: Array
    objective: Array
    gradient: Array
    begins_round: Array
    length: Array


class _Fit(NamedTuple):
    """Hold a fit on its way: the problem's own arrays, the point, the whitening so far, and where it is."""

    arrays: Any
    state: State
    whitening: Array
    rounds: Array
    done: Array
    course: Course


def fit_together(
    problems: list[Problem],
    *,
    noise: str | None,
    weights: bool,
    tol: float,
    recipe: Recipe,
    seed: int,
    from_labels: bool = False,
) -> list[Fitted]:
    """Fit problems of one shape, each of one shard, that differ in their rows, their labels and their models alone.

    ``from_labels``: they begin with labels, and the first round of re-estimation comes before the first epoch.
    """
    limit = jax.device_put(np.float32(tol))
    fits = []
    for problem in problems:
        began = time.perf_counter()
        own, shared = _apart(problem)
        fit: Any = jax.block_until_ready(_fit(own, shared, noise, weights, limit, recipe, from_labels))
        fit = jax.tree.map(np.asarray, fit)
        fits.append(_fitted(eqx.combine(fit.arrays, shared), fit, time.perf_counter() - began, seed))
    return fits


def _apart(problem: Problem) -> tuple[Problem, Problem]:
    """Return what fits have of their own (rows, labels, model), and what all of them share (graph, mask, structure)."""
    arrays = eqx.filter(problem, eqx.is_array)
    nothing = jax.tree.map(lambda _: False, arrays)
    names = {name: name in OWN for name in problem.shards}
    own = eqx.tree_at(lambda p: (p.model, p.shards), nothing, (jax.tree.map(lambda _: True, arrays.model), names))
    return eqx.partition(problem, own)


@eqx.filter_jit
def _fit(
    own: Problem, shared: Problem, noise: str | None, weights: bool, tol: Array, recipe: Recipe, from_labels: bool
) -> _Fit:
    """Fit from one start: a few legs, then rounds of re-estimation."""
    problem = eqx.combine(own, shared)
    if from_labels:
        point = starting_point(problem)
        lam, local = problem.ravel(point.global_params), point.local_params
    else:
        lam, local = problem.init(jax.random.key(0))
    whitening = jnp.eye(problem.shards["x"].shape[-1])
    rest = shared
    longest = 1 + recipe.first_logs + 2 * recipe.rounds
    course = Course(
        jnp.zeros(longest),
        jnp.zeros(longest),
        jnp.zeros((longest, lam.size)),
        jnp.zeros(longest, bool),
        jnp.asarray(0),
    )
    state = State(CAVIServer(lam), local, ())
    fit = _Fit(own, state, whitening, jnp.asarray(0), jnp.asarray(False), course)
    fit = _logged(rest, fit, 0, False)
    leg = recipe.first_epochs // recipe.first_logs

    def first(fit: _Fit) -> _Fit:
        fit = _logged(rest, _swept(rest, fit, leg), leg, False)
        return fit._replace(done=_settled(fit.course, tol))

    if not from_labels:  # which are re-estimated at once
        fit = jax.lax.while_loop(lambda fit: ~fit.done & (fit.course.length <= recipe.first_logs), first, fit)

    def next_round(fit: _Fit) -> _Fit:
        before, labels = _last(fit.course), labels_of(fit.state.local)
        problem = eqx.combine(fit.arrays, rest)
        point = Point(problem.unravel(fit.state.lam), fit.state.local)
        problem, point, matrix = reestimate(problem, point, noise=noise, weights=weights, floor=recipe.floor)
        fit = fit._replace(
            arrays=_apart(problem)[0],
            state=State(CAVIServer(problem.ravel(point.global_params)), point.local_params, ()),
            whitening=matrix @ fit.whitening,
            rounds=fit.rounds + 1,
        )
        fit = _logged(rest, fit, 0, True)
        fit = _logged(rest, _swept(rest, fit, recipe.round_epochs), recipe.round_epochs, False)
        gain, rows = before - _last(fit.course), problem.model.n_rows
        changed = (labels != labels_of(fit.state.local)).sum()
        steady = (gain < recipe.steady_gain * rows) & (changed < recipe.steady_labels * rows)
        return fit._replace(done=(gain < recipe.least_gain * rows) | steady)

    fit = fit._replace(done=jnp.asarray(False))
    return jax.lax.while_loop(lambda fit: ~fit.done & (fit.rounds < recipe.rounds), next_round, fit)


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
