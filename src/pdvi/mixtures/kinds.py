"""The two kinds of views of a tissue, each fitted from a start of its own or, once that is done, from given labels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdvi.core.problem import Problem
from pdvi.core.result import Result
from pdvi.mixtures.em import Fitted
from pdvi.mixtures.start import centred, empirical_bayes, from_labels, means_of, padded, widened
from pdvi.mixtures.tries import Tries
from pdvi.mixtures.two_level import coupled_two_level, fit_two_level, two_level_start


class Fit(NamedTuple):
    """Hold what a fit found; of types also the types, and what domains are made of."""

    probabilities: np.ndarray
    result: Result
    composition: np.ndarray | None = None  # of types in domains, (K, T)
    types: np.ndarray | None = None  # the type of every row

    @property
    def labels(self) -> np.ndarray:
        """The most probable domain of every row."""
        return np.asarray(self.probabilities.argmax(1))


class OfAverages:
    """A Potts mixture of averages: a domain has one mean."""

    def __init__(self, tries: Tries, number: int, seed: int):
        self.tries, self.number, self.seed = tries, number, seed

    def begin(self) -> Fit:
        """Fit from k-means starts, and return the best."""
        X, task = self.tries.features[self.number], self.tries.task
        recipe = task.recipe
        runs, rows = recipe.runs(len(X)), recipe.kmeans_rows
        if runs == recipe.kmeans_runs:  # with fewer each counts, and looks at all
            rows = min(rows, recipe.kmeans_view_rows * task.n_components)
        effort = {"runs": runs, "subsample": rows}
        seeds = range(self.seed, self.seed + task.n_init)
        starts = [empirical_bayes(X, task.n_components, seed=one, recipe=recipe, **effort) for one in seeds]
        fits = self.tries.fit([(self.number, start) for start in starts], seed=self.seed)
        return self._fit(min(fits, key=lambda fitted: fitted.result.objective))

    def again(self, labels: np.ndarray) -> Fit:
        """Fit from labels."""
        X, task = self.tries.features[self.number], self.tries.task
        means = means_of(X, np.eye(task.n_components, dtype=np.float32)[labels])
        start = from_labels(X, labels, means, task.recipe)
        return self._fit(self.tries.fit([(self.number, start)], seed=self.seed)[0])

    def _fit(self, fitted: Fitted) -> Fit:
        return Fit(self.tries.probabilities(fitted), fitted.result)


class OfTypes:
    """A two-level mixture of single spots: a domain is a composition of types. ``width``: of the widest such view."""

    def __init__(self, tries: Tries, X: np.ndarray, coordinates: np.ndarray, n_neighbors: int, width: int, seed: int):
        self.tries, self.seed, task = tries, seed, tries.task
        X = centred(X, tries.sample).X
        self.X, n_types = widened(X, width), min(task.recipe.view_types, len(X))
        start = two_level_start(X, coordinates, task.n_components, n_types, n_neighbors=n_neighbors, seed=seed)
        self.start = start._replace(types=padded(start.types, n_types, width))

    def begin(self) -> Fit:
        """Fit from types of single spots, and domains found on the types around each."""
        return self.again(self.start.domain)

    def again(self, labels: np.ndarray) -> Fit:
        """Fit from the same types and given domains."""
        damping = self.tries.ground.damping
        fitted = fit_two_level(
            self._problem(labels), self.tries.task, one_program=True, damping=damping, seed=self.seed
        )
        return self._fit(fitted)

    def begin_large(self) -> Fit:
        """Do what `begin` does for a tissue of many shards."""
        problem = self._problem(self.start.domain)
        return self._fit(fit_two_level(problem, self.tries.task, one_program=False, seed=self.seed))

    def _problem(self, labels: np.ndarray) -> Problem:
        start, ground = self.start._replace(domain=labels), self.tries.ground
        assert ground.coupling is not None
        return coupled_two_level(self.X, start, ground.where, ground.coupling, sample=self.tries.sample)

    def _fit(self, fitted: Fitted) -> Fit:
        where = self.tries.ground.where
        local = {name: where.unshard(np.asarray(part)) for name, part in fitted.result.local_params.items()}
        concentration = np.exp(np.asarray(fitted.result.global_params["log_concentration"], float))
        composition = concentration / concentration.sum(1, keepdims=True)
        return Fit(local["domain"], fitted.result, composition, local["type"].argmax(1))
