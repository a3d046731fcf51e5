"""A small tissue as one compiled program: every start and view fitted and re-estimated to its end, then the next.

It does what `variational_em` does with the solver `CAVI` on one shard, number for number: with one shard and nothing to
agree on, coordinate ascent is what Algorithm 1 comes to. Between two rounds nothing leaves the program, so that a slide
takes a fraction of the time that its calls would take, and all slides of a bucket share one compilation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from pdvi._base import programs
from pdvi._base.compiled import quickly_compiled
from pdvi._base.types import Array
from pdvi.core.executor import report
from pdvi.core.problem import Problem
from pdvi.core.result import Point, Result, Status
from pdvi.core.solver import State, named, settings_of
from pdvi.executors.steps import is_little, step
from pdvi.mixtures.build import point_at
from pdvi.mixtures.em import Fitted
from pdvi.mixtures.recipe import Recipe
from pdvi.mixtures.reestimate import labels_of, reestimate, starting_point
from pdvi.models import SampleOffsets
from pdvi.solvers.cavi import CAVI, CAVIServer

OWN = ("x", "square", "domain", "type")  # arrays of a shard that differ between fits; all others are shared
LITTLE = 2_000_000  # numbers of a problem: XLA's older way took 30 ms longer for a fit, and 0.6 s less to compile it
REESTIMATED = "hyper-parameters re-estimated"  # in the trace


class Course(NamedTuple):
    """Hold the way of a fit: a row per log point, of which the first ``length`` are used."""

    epoch: Array
    objective: Array
    gradient: Array
    is_round: Array
    length: Array


class How(NamedTuple):
    """Hold what a program is made for."""

    noise: str | None
    weights: bool
    recipe: Recipe
    from_labels: bool


class End(NamedTuple):
    """Hold a fit that has ended, in NumPy's arrays."""

    problem: Problem  # with the hyper-parameters, and the rows, of the last re-estimation
    lam: Any
    local: Any
    whitening: np.ndarray
    labels: np.ndarray  # before the last round
    done: np.ndarray
    course: Course


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


# What a fit does between two looks at its objective; a round begins with a re-estimation. All are one loop with one
# look: every further place in which something stands is compiled, too.
NOTHING, LEG, ROUND = range(3)


def fit_together(
    problems: list[Problem],
    *,
    noise: str | None,
    weights: bool,
    tol: float,
    recipe: Recipe,
    seed: int,
    from_labels: bool = False,
    known: np.ndarray | None = None,
    damping: Callable[[], float] | None = None,
) -> list[Fitted]:
    """Fit problems of one shape, each of one shard, that differ in their rows, their labels and their models alone.

    ``from_labels``: they begin with labels, and the first round of re-estimation comes before the first epoch.
    ``known``: they begin with these probabilities, (1, slots, K). ``damping`` tells how much rules out that sweeps go
    astray; a fit whose sweeps did is made again with it.
    """
    how = How(noise, weights, recipe, from_labels)
    fits = []
    for problem in problems:
        began = time.perf_counter()
        fit = _fitted_once(problem, known, tol, how)
        if damping is not None and _astray(fit, recipe) and damping() > float(_damping(problem)):
            damped = eqx.tree_at(_damping, problem, jax.device_put(np.asarray(damping(), _damping(problem).dtype)))
            fit = _fitted_once(damped, known, tol, how)
        fits.append(_fitted(fit, time.perf_counter() - began, seed))
    return fits


def _fitted_once(problem: Problem, known: np.ndarray | None, tol: float, how: How) -> End:
    own, shared = _apart(problem)
    options = quickly_compiled(little=is_little(problem, LITTLE))
    found = programs.run(_fit, how, (own, shared, known, np.float32(tol)), options)
    arrays, *rest = jax.tree.map(np.asarray, found)
    own = jax.tree.unflatten(jax.tree.structure(own), arrays)
    end = End(eqx.combine(own, shared), *rest)
    return end._replace(course=Course(*end.course))


def _astray(fit: End, recipe: Recipe) -> bool:
    """Return whether sweeps let the objective rise, or ended going to and fro.

    All spots are updated at once from their neighbours' old values, which can overshoot. The damping that rules it out
    makes sweeps two to three times as short, and mostly the evidence alone rules it out. A round has an odd number of
    sweeps: what goes to and fro between two states is in the other one at its end, at the same objective.
    """
    course, count, rows = fit.course, int(fit.course.length), float(fit.problem.model.n_rows)
    rise = np.diff(course.objective[:count]).max(initial=0.0)
    changed = int((fit.labels != labels_of(fit.local)).sum())
    return bool(rise > recipe.least_gain * rows) or (bool(fit.done) and changed >= recipe.steady_labels * rows)


def _damping(problem: Problem) -> Array:
    model = problem.model
    return (model.mixture if isinstance(model, SampleOffsets) else model).damping


def _apart(problem: Problem) -> tuple[Problem, Problem]:
    """Return what fits have of their own (rows, labels, model), and what all of them share (graph, mask, structure)."""
    arrays = eqx.filter(problem, eqx.is_array)
    nothing = jax.tree.map(lambda _: False, arrays)
    names = {name: name in OWN for name in problem.shards}
    own = eqx.tree_at(lambda p: (p.model, p.shards), nothing, (jax.tree.map(lambda _: True, arrays.model), names))
    return eqx.partition(problem, own)


def _fit(how: How, arguments: tuple[Problem, Problem, Array | None, Array]) -> tuple[Any, ...]:
    """Fit from one start: a few legs, then rounds of re-estimation. Returns the fields of an `End`, in plain tuples."""
    own, shared, known, tol = arguments
    noise, weights, recipe, from_labels = how
    problem = eqx.combine(own, shared)
    legs, leg_epochs = recipe.first_logs, recipe.first_epochs // recipe.first_logs
    if known is not None:
        lam, local = _raveled(problem, point_at(problem, known))
        legs, leg_epochs = 1, recipe.known_epochs
    elif from_labels:
        lam, local = _raveled(problem, starting_point(problem))
    else:
        lam, local = problem.init(jax.random.key(0))
    longest = 1 + legs + recipe.rounds
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
    epochs = jnp.asarray([0, leg_epochs, recipe.round_epochs])

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
        fit = jax.lax.cond(action == ROUND, reestimated, lambda fit: fit, fit)
        problem = eqx.combine(fit.arrays, shared)
        fit = _logged(problem, _swept(problem, fit, epochs[action]), epochs[action], action == ROUND)
        legs_over = from_labels | _settled(fit.course, tol) | (fit.course.length > legs)
        done = (action == ROUND) & _steady(fit, problem.model.n_rows, recipe)
        return fit._replace(action=jnp.where(legs_over, ROUND, LEG), done=done)

    def goes_on(fit: _Fit) -> Array:
        return ~fit.done & (fit.rounds < recipe.rounds)

    end = jax.lax.while_loop(goes_on, act, begun)
    state = end.state.lam, end.state.local
    return tuple(jax.tree.leaves(end.arrays)), *state, end.whitening, end.labels, end.done, tuple(end.course)


def _raveled(problem: Problem, point: Point) -> tuple[Array, Any]:
    return problem.ravel(point.global_params), point.local_params


def _swept(problem: Problem, fit: _Fit, epochs: Array) -> _Fit:
    batch = jnp.arange(problem.n_shards)
    state = jax.lax.fori_loop(0, epochs, lambda _, state: step(problem, CAVI(), state, batch), fit.state)
    return fit._replace(state=state)


def _logged(problem: Problem, fit: _Fit, epochs: Array, is_round: Array) -> _Fit:
    course, at = fit.course, fit.course.length
    losses, gradient = problem.evaluate(fit.state.lam, fit.state.local)
    epoch = jnp.where(at > 0, course.epoch[at - 1], 0.0) + epochs
    row = epoch, losses.sum(), gradient, is_round
    rows = [jax.lax.dynamic_update_index_in_dim(whole, one, at, 0) for whole, one in zip(course[:-1], row)]
    return fit._replace(course=Course(*rows, at + 1))  # type: ignore[call-arg]


def _steady(fit: _Fit, rows: Array, recipe: Recipe) -> Array:
    """Whether a round has gained too little to make another."""
    course = fit.course
    gain = course.objective[course.length - 2] - course.objective[course.length - 1]
    changed = (fit.labels != labels_of(fit.state.local)).sum()
    steady = (gain < recipe.steady_gain * rows) & (changed < recipe.steady_labels * rows)
    return (gain < recipe.least_gain * rows) | steady


def _settled(course: Course, tol: Array) -> Array:
    """Two changes in a row below ``tol``, relative, as `pdvi.run.stopping.settled` has it."""
    newest, middle, oldest = (course.objective[course.length - back] for back in (1, 2, 3))
    small = (jnp.abs(newest - middle) < tol * jnp.abs(middle)) & (jnp.abs(middle - oldest) < tol * jnp.abs(oldest))
    return (course.length >= 3) & small


def _fitted(fit: End, seconds: float, seed: int) -> Fitted:
    """Return a fit as the step-by-step path would; its seconds are spread over the epochs."""
    problem, course, count = fit.problem, fit.course, int(fit.course.length)
    rows = []
    for i in range(count):
        measured = report(problem, (course.objective[i], course.gradient[i]), {})
        epoch = float(course.epoch[i])
        at = {"step": round(epoch), "epoch": epoch, "seconds": seconds * epoch / float(course.epoch[count - 1])}
        rows.append({**at, **measured, "event": REESTIMATED if course.is_round[i] else ""})
    result = Result(
        global_params=jax.tree.map(np.asarray, problem.unravel(fit.lam)),
        local_params=fit.local,
        trace=pd.DataFrame(rows),
        status=Status.CONVERGED if bool(fit.done) else Status.MAX_EPOCHS,
        n_steps=round(float(course.epoch[count - 1])),
        seed=seed,
        batch_size=problem.n_shards,
        solver=settings_of(CAVI()),
        state=named(CAVIServer(fit.lam), "server"),
        data="",
    )
    return Fitted(problem, result, np.asarray(fit.whitening, float))
