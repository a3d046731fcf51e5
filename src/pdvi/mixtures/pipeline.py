"""The way of a mixture from rows to probabilities: start, coarse, fit, re-estimate, reseed, refine.

From the whole to its parts: `find_domains` (averages, then single spots), `find` (groups of rows first, where there are
many), `fit_rows` (every start, the best of them, reseeded), `_fit_from` (one start). Every number is in `Recipe`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from sklearn.utils import check_random_state

from pdvi._base.telling import tell
from pdvi.core.problem import Problem
from pdvi.core.result import Result
from pdvi.mixtures.build import point_at
from pdvi.mixtures.coarse import coarsened
from pdvi.mixtures.em import Fitted, annealed, epochs_of, measured_in, variational_em
from pdvi.mixtures.exchange import exchanged
from pdvi.mixtures.ground import Ground, is_one_program, is_one_shard
from pdvi.mixtures.program import fit_together
from pdvi.mixtures.refine import are_normal_clouds, are_torn
from pdvi.mixtures.reseed import Attempt, briefly, reseeded
from pdvi.mixtures.restarts import best_of
from pdvi.mixtures.start import (
    EmpiricalBayes,
    centred,
    empirical_bayes,
    from_labels,
    means_of,
    padded,
    whitened,
    whitening_of,
    widened,
)
from pdvi.mixtures.stored import fit_stored
from pdvi.mixtures.task import Found, Rows, Start, Task
from pdvi.solvers import CAVI, P2DVI


class Domains(NamedTuple):
    """Hold the domains of a tissue, and whether they were refined spot by spot."""

    found: Found
    refined: bool


def find_domains(
    rows: Rows, task: Task, spots: np.ndarray | None, weak_graph: Callable[[], sp.csr_array], *, force: bool = False
) -> Domains:
    """Find domains on averages (``rows``), and refine them on single ``spots`` where these allow it (see `refine`)."""
    groups = find_on_groups(rows, task)  # of a large tissue; enough to see whether refinement makes sense
    found = groups or fit_rows(rows, task)
    if spots is not None:
        start = Start(np.asarray(found.probabilities, np.float32), found.seconds)
        better = refine(rows._replace(X=spots), task, start, weak_graph, force=force)
        if better is not None:
            return Domains(better, refined=True)
    return Domains(fit_rows(rows, task, groups) if isinstance(found, Start) else found, refined=False)


def refine(
    spots: Rows, task: Task, start: Start, weak_graph: Callable[[], sp.csr_array], *, force: bool = False
) -> Found | None:
    """Refine domains on single ``spots``; None where these tell that it makes no sense.

    ``weak_graph`` makes the many edges that single spots need (``force``: refine whatever the checks say).
    """
    before = start.probabilities / start.probabilities.sum(1, keepdims=True)
    every = max(1, len(spots.X) // task.recipe.cloud_rows)
    sample = None if spots.sample is None else np.unique(spots.sample[::every], return_inverse=True)[1]
    some = centred(spots.X[::every], sample).X
    if not (force or are_normal_clouds(some, before[::every], task.recipe)):
        return None
    tell("single spots, from what their averages tell")
    X = some if every == 1 else centred(spots.X, spots.sample).X
    graph = weak_graph()
    weak = replace(task, beta=task.beta * task.recipe.refine_coupling, learn_weights=False)
    single = spots._replace(graph=graph.astype(np.float64))
    better = fit_rows(single, weak, start._replace(probabilities=before))
    torn = not force and are_torn(X, better.probabilities, before, graph, task.recipe)
    return None if torn else better


def find(rows: Rows, task: Task, *, start: Start | None = None, exchange: bool = False) -> Found:
    """Fit a mixture: to groups of rows first where there are many, then to the rows from what the groups found."""
    groups = find_on_groups(rows, task, start=start, exchange=exchange)
    if groups is not None:
        return fit_rows(rows, task, groups)  # what there was to exchange the groups have exchanged
    return fit_rows(rows, task, start, exchange=exchange)


def find_on_groups(rows: Rows, task: Task, *, start: Start | None = None, exchange: bool = False) -> Start | None:
    """Fit groups of rows next to each other; None for few rows, rows without places, or noise that is that of rows."""
    if rows.graph is None or rows.coordinates is None:
        return None
    if not task.estimate_noise or len(rows.X) <= task.recipe.group_above:
        return None
    coarse = coarsened(rows.X, rows.graph, rows.coordinates, task.recipe.group_size)
    known = None if start is None else start._replace(probabilities=coarse.mean(start.probabilities))
    sample = None if rows.sample is None else coarse.first(rows.sample)
    smaller = Rows(coarse.X, coarse.graph, coarse.coordinates, sample)
    began = time.perf_counter()
    probabilities = task.kept(
        f"found-{len(coarse.X)}",
        lambda: find(smaller, task, start=known, exchange=exchange).probabilities.astype(rows.X.dtype),
    )
    return Start(probabilities[coarse.group], time.perf_counter() - began)


def fit_rows(
    rows: Rows,
    task: Task,
    start: Start | None = None,
    *,
    exchange: bool = False,
    width: int | None = None,
    ground: Ground | None = None,
) -> Found:
    """Fit from k-means starts or from known probabilities, keep the best, put unused components to use.

    Rows are padded with columns of 0 up to ``width``: fits of fewer and of more features are then one program. Fits
    of several features of the same tissue may share a ``ground``.
    """
    if start is not None and task.place is not None and len(rows.X) > task.place.most_rows:
        return fit_stored(rows, task, start)
    began = time.perf_counter()
    recipe, known = task.recipe, None if start is None else start.probabilities
    ground = Ground(rows, task, known) if ground is None else ground
    where = ground.where
    X, offset, unit = centred(rows.X, rows.sample)
    seeds = check_random_state(task.random_state).randint(2**31, size=1 + (task.n_init if known is None else 1))
    if known is None:
        starts = [empirical_bayes(X, task.n_components, seed=int(seed), recipe=recipe) for seed in seeds[1:]]
    else:
        starts = [from_labels(X, known.argmax(1), means_of(X, known), recipe)]
    # with its own noise every start must be fitted to its end: which is best does not show before
    tries = starts if task.reestimates else starts[:1]
    fits: Iterable[_Fit]
    one_program = is_one_program(rows, task, known)
    if one_program:
        fits = _fit_together(tries, X, rows.sample, ground, task, known, seed=int(seeds[0]))
    else:
        fits = [
            # other draws for every start: exploration forgets where it began
            _fit_from(settings, rows, X, ground, task, int(seeds[0]) + number, known, others=starts, width=width)
            for number, settings in enumerate(tries)
        ]
    best = min(fits, key=lambda fit: fit.result.objective)
    solver = _solver(task, rows, known)
    batch_size = _batch_size(task, solver, len(where.rows))
    if task.exchange and rows.graph is None:
        best = _exchanged(best, solver, task, seed=int(seeds[0]), batch_size=batch_size)
    if task.reseed:
        common = {"seed": int(seeds[0]), "batch_size": batch_size}
        attempt = briefly(solver, best.result.status, recipe, tol=task.tol, **common)
        if task.reestimates:
            at_hand = ground if one_program and known is not None else None
            attempt = _at_length(attempt, at_hand, task, solver, **common)
        left = task.max_epochs - best.warm_up - epochs_of(best.result)
        fitted = Fitted(best.problem, best.result, best.whitening)
        how = {"weights": task.learn_weights, "exchange": exchange}
        better = reseeded(fitted, attempt, **how, max_epochs=left, recipe=recipe)
        best = _Fit(*better, best.warm_up)
    result = best.result
    probabilities = np.asarray(where.unshard(result.local_params), float)
    seconds = time.perf_counter() - began + (0.0 if start is None else start.seconds)
    epochs = best.warm_up + epochs_of(result)
    result = measured_in(result, unit, X.size)
    return Found(result, best.problem.model, offset, best.whitening / unit, probabilities, epochs, seconds)


class _Fit(NamedTuple):
    """One start's fit, with the matrix that whitened the rows and the epochs before its trace begins."""

    problem: Problem
    result: Result
    whitening: np.ndarray
    warm_up: int


def _fit_together(
    starts: list[EmpiricalBayes],
    X: np.ndarray,
    sample: np.ndarray | None,
    ground: Ground,
    task: Task,
    known: np.ndarray | None,
    *,
    seed: int,
) -> list[_Fit]:
    """Fit all starts in one compiled program."""
    whitenings: list[np.ndarray] = []
    problems: list[Problem] = []
    for settings in starts:
        white, own, whitening = in_white_noise(X, settings, task, known)
        log_scale = float(np.linalg.slogdet(whitening)[1])
        problems.append(ground.problem(white, own, log_scale, sample))
        whitenings.append(whitening)
    local = None if known is None else ground.where.shard(known).astype(problems[0].shards["x"].dtype)
    fitted = fit_together(problems, known=local, seed=seed, damping=ground.damping, **task.how)
    return [_Fit(fit.problem, fit.result, fit.whitening @ matrix, 0) for fit, matrix in zip(fitted, whitenings)]


def _at_length(
    brief: Attempt, ground: Ground | None, task: Task, solver: Any, *, seed: int, batch_size: int
) -> Attempt:
    """Return an attempt with noise and weights re-estimated, as long as there are epochs for it, else a ``brief`` one.

    On a ``ground`` it is the program that is at hand there, if there are epochs for all its rounds.
    """
    recipe = task.recipe

    def attempt(problem: Problem, local: np.ndarray, left: float) -> Fitted:
        if left < recipe.known_epochs + recipe.round_epochs:
            return brief(problem, local, left)
        if ground is not None and left >= recipe.known_epochs + recipe.rounds * recipe.round_epochs:
            return fit_together([problem], known=local, seed=seed, damping=ground.damping, **task.how)[0]
        common: dict[str, Any] = {"start": point_at(problem, local), "seed": seed, "batch_size": batch_size}
        return variational_em(problem, solver, max_epochs=int(left), first=recipe.known_epochs, **common, **task.how)

    return attempt


def in_white_noise(
    X: np.ndarray, settings: EmpiricalBayes, task: Task, known: np.ndarray | None = None
) -> tuple[np.ndarray, EmpiricalBayes, np.ndarray]:
    """Return rows, settings and the matrix that whitened the noise; with diagonal noise all is as it was."""
    if task.covariance != "tied":
        return X, settings, np.eye(X.shape[1])
    whitening = whitening_of(X, settings, None if known is None else known.argmax(1), task.recipe)
    return X @ whitening.T.astype(X.dtype), whitened(settings, whitening, task.recipe), whitening


def in_one_shape(
    white: np.ndarray, settings: EmpiricalBayes, whitening: np.ndarray, log_scale: float, task: Task, width: int
) -> tuple[np.ndarray, EmpiricalBayes, np.ndarray, float]:
    """Return rows with columns of 0 up to a width, and absent components up to as many as the task has."""
    more = width - white.shape[1]
    if task.covariance == "tied":  # a column of 0 with noise of 1 has this density in every row
        log_scale += 0.5 * np.log(2 * np.pi) * more
    matrix = np.pad(whitening, ((0, more), (0, 0)))
    return widened(white, width), padded(settings, task.n_components, width), matrix, log_scale


def _fit_from(
    settings: EmpiricalBayes,
    rows: Rows,
    X: np.ndarray,
    ground: Ground,
    task: Task,
    seed: int,
    known: np.ndarray | None,
    *,
    others: list[EmpiricalBayes],
    width: int | None = None,
) -> _Fit:
    """Whiten, warm up, fit and re-estimate from one start."""
    recipe, solver = task.recipe, _solver(task, rows, known)
    white, settings, whitening = in_white_noise(X, settings, task, known)
    log_scale = float(np.linalg.slogdet(whitening)[1])
    if width is not None:
        white, settings, whitening, log_scale = in_one_shape(white, settings, whitening, log_scale, task, width)
    problem, where = ground.problem(white, settings, log_scale, rows.sample), ground.where
    common = {"seed": seed, "batch_size": _batch_size(task, solver, len(where.rows))}
    start: Any = None if known is None else point_at(problem, where.shard(known))
    left = task.max_epochs
    warm_up = min(recipe.warm_up_epochs, left // 2)
    if len(others) > 1 and not task.reestimates and warm_up:  # one problem for all of them
        points = [{**problem.model.init_global(None), "mean": other.means @ whitening.T} for other in others]
        start, left = best_of(problem, solver, points, epochs=warm_up, **common).best, left - warm_up
    annealing = min(recipe.anneal_epochs, left // 2)
    if task.anneal_from is not None and annealing:
        start = annealed(problem, solver, task.anneal_from, annealing, start=start, **common).point
        left -= annealing
    fitted = variational_em(
        problem,
        solver,
        noise=task.noise,
        weights=task.learn_weights,
        max_epochs=left,
        tol=task.tol,
        first=recipe.first_epochs if known is None else recipe.known_epochs,
        start=start,
        recipe=recipe,
        **common,
    )
    return _Fit(fitted.problem, fitted.result, fitted.whitening @ whitening, task.max_epochs - left)


def _exchanged(fit: _Fit, solver: Any, task: Task, **settings: Any) -> _Fit:
    """Exchange components of a plain mixture while that helps."""
    fitted = exchanged(
        Fitted(fit.problem, fit.result, fit.whitening),
        solver,
        noise=task.noise,
        weights=task.learn_weights,
        max_epochs=task.max_epochs - fit.warm_up - epochs_of(fit.result),
        tol=task.tol,
        recipe=task.recipe,
        **settings,
    )
    return _Fit(*fitted, fit.warm_up)


def _solver(task: Task, rows: Rows, known: np.ndarray | None) -> Any:
    """One shard has nobody to agree with: there Algorithm 1 comes to coordinate ascent."""
    if task.solver is not None:
        return task.solver
    return CAVI() if is_one_shard(rows, task, known) else P2DVI()


def _batch_size(task: Task, solver: Any, n_shards: int) -> int:
    return n_shards if solver.full_batch else max(1, n_shards // task.recipe.shards_per_batch)
