"""A small tissue as one compiled program: every start and view fitted and re-estimated to its end, then the next.

It does what `variational_em` does with the solver `CAVI` on one shard, number for number: with one shard and nothing to
agree on, coordinate ascent is what Algorithm 1 comes to. Between two rounds nothing leaves the program, so that a slide
takes a fraction of the time that its calls would take, and all slides of a bucket share one compilation.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from pdvi._base.compiled import quickly_compiled
from pdvi._base.types import Array
from pdvi.core.executor import report
from pdvi.core.problem import Problem
from pdvi.core.result import Point, Result, Status
from pdvi.core.solver import State, named, settings_of
from pdvi.executors.steps import is_little, step
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
    labels: Array  # before the round that is being made
    rounds: Array
    action: Array  # what comes next
    done: Array
    course: Course


# What a fit does between two looks at its objective. All are one loop with one look: every further place in which
# something stands is compiled, too.
NOTHING, LEG, REESTIMATE, ROUND = range(4)


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
        call = _compiled_fit(is_little(problem))  # by one thread, where several ask at once: JAX lets the others wait
        fit: Any = jax.block_until_ready(call(own, shared, noise, weights, limit, recipe, from_labels))
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


@cache
def _compiled_fit(quick: bool) -> Any:
    return eqx.filter_jit(_fit, **(quickly_compiled() if quick else {}))


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
    longest = 1 + recipe.first_logs + 2 * recipe.rounds
    course = Course(
        jnp.zeros(longest),
        jnp.zeros(longest),
        jnp.zeros((longest, lam.size)),
        jnp.zeros(longest, bool),
        jnp.asarray(0),
    )
    whitening = jnp.eye(problem.shards["x"].shape[-1])
    counts = jnp.asarray(0), jnp.asarray(NOTHING), jnp.asarray(False)
    begun = _Fit(own, State(CAVIServer(lam), local, ()), whitening, labels_of(local), *counts, course)
    epochs = jnp.asarray([0, recipe.first_epochs // recipe.first_logs, 0, recipe.round_epochs])

    def reestimated(fit: _Fit) -> _Fit:
        problem = eqx.combine(fit.arrays, shared)
        point = Point(problem.unravel(fit.state.lam), fit.state.local)
        problem, point, matrix = reestimate(problem, point, noise=noise, weights=weights, floor=recipe.floor)
        return fit._replace(
            arrays=_apart(problem)[0],
            state=State(CAVIServer(problem.ravel(point.global_params)), point.local_params, ()),
            whitening=matrix @ fit.whitening,
            labels=labels_of(fit.state.local),
            rounds=fit.rounds + 1,
        )

    def act(fit: _Fit) -> _Fit:
        """Do what comes next, look at the objective, and decide what comes then."""
        action = fit.action
        fit = jax.lax.cond(action == REESTIMATE, reestimated, lambda fit: fit, fit)
        problem = eqx.combine(fit.arrays, shared)
        fit = _logged(problem, _swept(problem, fit, epochs[action]), epochs[action], action == REESTIMATE)
        legs_over = _settled(fit.course, tol) | (fit.course.length > recipe.first_logs)
        after_leg = jnp.where(legs_over, REESTIMATE, LEG)
        after = jnp.stack([jnp.asarray(REESTIMATE if from_labels else LEG), after_leg, ROUND, REESTIMATE])
        return fit._replace(action=after[action], done=(action == ROUND) & _steady(fit, problem.model.n_rows, recipe))

    def goes_on(fit: _Fit) -> Array:
        return ~fit.done & ((fit.action != REESTIMATE) | (fit.rounds < recipe.rounds))

    return jax.lax.while_loop(goes_on, act, begun)


def _swept(problem: Problem, fit: _Fit, epochs: Array) -> _Fit:
    batch = jnp.arange(problem.n_shards)
    state = jax.lax.fori_loop(0, epochs, lambda _, state: step(problem, CAVI(), state, batch), fit.state)
    return fit._replace(state=state)


def _logged(problem: Problem, fit: _Fit, epochs: Array, begins_round: Array) -> _Fit:
    course, at = fit.course, fit.course.length
    losses, gradient = problem.evaluate(fit.state.lam, fit.state.local)
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


def _steady(fit: _Fit, rows: Array, recipe: Recipe) -> Array:
    """Whether a round, which is two looks, has gained too little to make another."""
    course = fit.course
    gain = course.objective[course.length - 3] - course.objective[course.length - 1]
    changed = (fit.labels != labels_of(fit.state.local)).sum()
    steady = (gain < recipe.steady_gain * rows) & (changed < recipe.steady_labels * rows)
    return (gain < recipe.least_gain * rows) | steady


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
