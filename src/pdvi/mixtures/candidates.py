"""Fits with several numbers of components: of a small tissue all of them in one compiled program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from pdvi.mixtures.ground import is_one_program
from pdvi.mixtures.pipeline import fit_rows
from pdvi.mixtures.start import empirical_bayes, means_of, scale_of
from pdvi.mixtures.task import Rows, Task
from pdvi.mixtures.tries import Tries

Told = Callable[[Iterable[tuple[int, int]]], Iterable[tuple[int, int]]]  # goes through fits, and tells how far it is


class Candidate(NamedTuple):
    """Hold one fit: the probabilities of its own components, and its ELBO."""

    probabilities: np.ndarray
    elbo: float

    @property
    def labels(self) -> np.ndarray:
        """The most probable component of every row."""
        return np.asarray(self.probabilities.argmax(1))


def fit_candidates(
    rows: Rows, features: list[np.ndarray], candidates: list[int], task: Task, told: Told = iter
) -> dict[int, list[Candidate]]:
    """Fit every number of components once to each of ``features``, every time from a start of its own."""
    found: dict[int, list[Candidate]] = {k: [] for k in candidates}
    asked = [(k, n) for k in candidates for n in range(len(features))]
    most = replace(task, n_components=max(candidates))
    if rows.graph is None or not is_one_program(rows, most):
        for k, n in told(asked):
            one = fit_rows(rows._replace(X=features[n]), replace(task, n_components=k, random_state=n))
            found[k].append(Candidate(one.probabilities, -float(one.result.objective)))
        return found
    tries = Tries(rows, features, most)
    runs = task.recipe.runs(len(rows.X))
    for k, n in told(asked):
        start = empirical_bayes(tries.features[n], k, seed=n, runs=runs, recipe=task.recipe)
        fitted = tries.fit([(n, start)], seed=n)[0]
        found[k].append(Candidate(tries.probabilities(fitted)[:, :k], -float(fitted.result.objective)))
    return found


def log_density(fitted: np.ndarray, probabilities: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the log density of ``rows`` under the mixture with tied noise that ``probabilities`` of others tell of.

    It is that of rows about whose neighbours nothing is known: components weigh as much as their shares.
    """
    means = means_of(fitted, probabilities)
    whitening = np.linalg.inv(scale_of(fitted - means[probabilities.argmax(1)]))
    white, centres = rows @ whitening.T, means @ whitening.T
    squares = (white**2).sum(1)[:, None] - 2 * white @ centres.T + (centres**2).sum(1)
    constant = np.linalg.slogdet(whitening)[1] - 0.5 * rows.shape[1] * np.log(2 * np.pi)
    return np.asarray(logsumexp(-0.5 * squares, b=probabilities.mean(0), axis=1) + constant)
