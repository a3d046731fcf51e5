"""How the rows of a tissue are cut into shards, and how these are coupled."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils import check_random_state

from pdvi.core.problem import Problem
from pdvi.mixtures.build import Coupling, coupled, coupled_problem, gaussian_mixture_problem, replaced
from pdvi.mixtures.damping import damping_of_patches
from pdvi.mixtures.start import EmpiricalBayes
from pdvi.mixtures.task import Rows, Task
from pdvi.shards.partition import Layout, along_curve, consecutive, layout, median_cuts


class Ground:
    """How rows are cut and coupled: found once for all fits of a tissue, whatever features they are of."""

    def __init__(self, rows: Rows, task: Task, known: np.ndarray | None = None):
        self.where = cut(rows, task, known)
        self.coupling: Coupling | None = None
        if rows.graph is not None:
            damping = 0.0 if is_one_program(rows, task, known) else None  # None: measured
            settings: dict[str, Any] = {"halo": task.halo, "temperature": task.temperature, "damping": damping}
            self.coupling = coupled(rows.graph, self.where, beta=task.beta, **settings, recipe=task.recipe)
        self._first: Problem | None = None  # whose graph, mask and samples all others of its shape share
        self._coordinates, self._recipe = rows.coordinates, task.recipe

    def damping(self) -> float:
        """Return how much sweeps are damped so that the objective never rises: from now on they are.

        One program damps its sweeps only where they turn out to need it.
        """
        assert self.coupling is not None
        graph, where, recipe = self.coupling.graph, self.where, self._recipe
        if not self.coupling.damping:
            if graph.shape[0] > recipe.damping_rows and self._coordinates is not None:  # measured patch by patch
                where = layout(median_cuts(self._coordinates, recipe.patches(graph.shape[0])))
            temperature, beta = self.coupling.temperature, self.coupling.beta
            found = damping_of_patches(graph, where, temperature, beta=beta, recipe=recipe)
            self.coupling, self._first = self.coupling._replace(damping=found), None
        return self.coupling.damping

    def problem(self, X: np.ndarray, settings: EmpiricalBayes, log_scale: float, sample: np.ndarray | None) -> Problem:
        """Return the problem of a mixture of these rows."""
        if self.coupling is None:
            return gaussian_mixture_problem(X, settings, self.where, log_scale=log_scale)
        first = self._first
        if first is not None and first.shards["x"].shape[2:] == X.shape[1:]:
            return replaced(first, X, settings, self.where, log_scale)
        problem = coupled_problem(X, settings, self.where, self.coupling, log_scale=log_scale, sample=sample)
        self._first = problem
        return problem


def cut(rows: Rows, task: Task, known: np.ndarray | None = None) -> Layout:
    """Cut rows into shards: a tissue into patches, rows without places as they come, without a graph at random."""
    n_rows, recipe = len(rows.X), task.recipe
    if rows.graph is None:
        order = check_random_state(task.random_state).permutation(n_rows)
        return layout(consecutive(n_rows, recipe.shards(n_rows))[np.argsort(order)], order)
    n_patches = recipe.patches(n_rows) if task.n_patches is None else task.n_patches
    n_patches = 1 if is_one_shard(rows, task, known) else n_patches
    if rows.coordinates is None:
        where = layout(consecutive(n_rows, n_patches))
    else:
        where = layout(median_cuts(rows.coordinates, n_patches), along_curve(rows.coordinates))
    return where.in_buckets()


def is_one_shard(rows: Rows, task: Task, known: np.ndarray | None = None) -> bool:
    """Return whether a tissue is small enough to be one shard, where nobody says how to cut or to solve it.

    From ``known`` probabilities a larger one is: there is nothing to explore, which is what patches are good for.
    """
    recipe = task.recipe
    most = recipe.one_program_rows if known is None or not _is_usual(task) else recipe.known_program_rows
    return rows.graph is not None and len(rows.X) <= most and task.solver is None and task.n_patches is None


def is_one_program(rows: Rows, task: Task, known: np.ndarray | None = None) -> bool:
    """Return whether all starts are fitted as one compiled program: nothing but the usual is asked for."""
    return _is_usual(task) and is_one_shard(rows, task, known)


def _is_usual(task: Task) -> bool:
    epochs = task.recipe.first_epochs + task.recipe.rounds * task.recipe.round_epochs
    return task.reestimates and task.anneal_from is None and task.max_epochs >= epochs
