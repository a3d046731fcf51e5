"""What is asked of a fit, what it is given, and what it gives back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from pdvi._base.checks import at_least, factor, instance, one_of, seed, whole
from pdvi._base.work_dir import WorkDir
from pdvi.core.result import Result, Status
from pdvi.mixtures.checks import check_coupling
from pdvi.mixtures.recipe import RECIPE, Recipe
from pdvi.models import GaussianMixtureModel
from pdvi.run.named import solver_for

COVARIANCES = ("diagonal", "tied")
MOST_STARTS = 10_000  # each is a whole fit


class Place(NamedTuple):
    """Where rows are fitted that are more than ``most_rows``: by an executor, from a store in a folder."""

    executor: Any
    folder: WorkDir
    most_rows: int


class Rows(NamedTuple):
    """Hold what is fitted: rows; a checked graph (None: a plain mixture); places and samples, if rows have any."""

    X: np.ndarray
    graph: sp.csr_array | None = None
    coordinates: np.ndarray | None = None
    sample: np.ndarray | None = None  # whole numbers from 0; only with a graph


@dataclass(frozen=True)
class Task:
    """Say what is asked of a fit; the estimators document every field."""

    n_components: int
    covariance: str = "tied"
    estimate_noise: bool = True
    learn_weights: bool = False
    n_init: int = 1
    reseed: bool = True
    exchange: bool = False
    max_epochs: int = RECIPE.max_epochs
    tol: float = RECIPE.tol
    solver: Any = None
    random_state: Any = None
    beta: float = 1.0
    n_patches: int | None = None
    halo: bool = True
    temperature: float = 1.0
    anneal_from: float | None = None
    recipe: Recipe = RECIPE
    place: Place | None = None  # for rows that do not fit into memory
    keep: Callable[[str, Callable[[], np.ndarray]], np.ndarray] | None = None  # what was found, for a later process

    def kept(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return what ``make`` finds, or what it has found under this name before."""
        return make() if self.keep is None else self.keep(name, make)

    def checked(self, n_rows: int) -> Task:
        """Return the task if it makes sense for so many rows."""
        whole("n_components", self.n_components, least=1, most=n_rows, of="the number of rows")
        one_of("covariance", self.covariance, COVARIANCES)
        whole("n_init", self.n_init, least=1, most=MOST_STARTS)
        whole("max_epochs", self.max_epochs, least=1)
        at_least("tol", self.tol)
        instance("recipe", self.recipe, Recipe, "a pdvi.mixtures.Recipe")
        if self.n_patches is not None:
            whole("n_patches", self.n_patches, least=1, most=n_rows, of="the number of rows")
        _check_random_state(self.random_state)
        check_coupling(self.beta, self.temperature)
        hottest = None if self.anneal_from is None else factor("anneal_from", self.anneal_from)
        if hottest is not None and not hottest > self.temperature:
            msg = f"`anneal_from` must be above `temperature` ({self.temperature!r}), got {self.anneal_from!r}."
            raise ValueError(msg)
        return self if self.solver is None else replace(self, solver=solver_for(self.solver))

    @property
    def noise(self) -> str | None:
        """The kind of noise that is re-estimated; None if it is fixed."""
        return self.covariance if self.estimate_noise else None

    @property
    def how(self) -> dict[str, Any]:
        """How one program fits, see `fit_together`."""
        return {"noise": self.noise, "weights": self.learn_weights, "tol": self.tol, "recipe": self.recipe}

    @property
    def reestimates(self) -> bool:
        """Whether starts differ in more than their means."""
        return self.estimate_noise or self.learn_weights


def _check_random_state(value: Any) -> None:
    """Refuse what scikit-learn would not take, by name."""
    if value is None or isinstance(value, np.random.RandomState) or value is np.random:
        return
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        seed("random_state", value)
        return
    msg = f"`random_state` must be a whole number, a numpy.random.RandomState or None, got {value!r}."
    raise ValueError(msg)


class Start(NamedTuple):
    """Hold probabilities to begin with, and the seconds their fit took."""

    probabilities: np.ndarray
    seconds: float = 0.0


class Found(NamedTuple):
    """Hold a fit: the result for the rows minus ``offset`` times ``whitening``, and every row's probabilities.

    With samples ``offset`` has a row for each.
    """

    result: Result
    model: GaussianMixtureModel
    offset: np.ndarray
    whitening: np.ndarray
    probabilities: np.ndarray
    epochs: float
    seconds: float

    def warn_unless_converged(self, who: str, task: Task) -> None:
        """Warn as scikit-learn does if the fit ended too early."""
        warn_unless_converged(self.result, self.epochs, who, task)


def warn_unless_converged(result: Result, epochs: float, who: str, task: Task) -> None:
    """Warn as scikit-learn does if a fit of so many epochs ended too early."""
    from sklearn.exceptions import ConvergenceWarning

    if result.converged:
        return
    reason = str(result.status)
    if result.status is Status.MAX_EPOCHS and epochs < task.max_epochs:
        reason = "all rounds of re-estimation were made; increase `rounds` of the recipe"
    warnings.warn(f"{who} did not converge in {epochs:.0f} epochs: {reason}.", ConvergenceWarning, stacklevel=4)
