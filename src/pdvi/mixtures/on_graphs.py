"""Estimators of rows on a graph: thin facades over the Potts mixture and the two-level mixture."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.special import digamma, softmax
from sklearn.base import ClusterMixin
from sklearn.neighbors import kneighbors_graph
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from pdvi._base.checks import positive, whole
from pdvi.mixtures.build import coupled
from pdvi.mixtures.checks import check_coordinates, check_graph, check_probabilities
from pdvi.mixtures.em import epochs_of, measured_in
from pdvi.mixtures.estimators import Mixture
from pdvi.mixtures.fixed import settled
from pdvi.mixtures.ground import Ground, cut, is_one_program
from pdvi.mixtures.pipeline import find, find_on_groups, fit_rows
from pdvi.mixtures.recipe import RECIPE, Recipe
from pdvi.mixtures.start import centred
from pdvi.mixtures.task import Found, Rows, Start, Task
from pdvi.mixtures.two_level import coupled_two_level, fit_two_level, two_level_start

NEIGHBORS = 8  # of a graph that nobody gave


class _OnGraph(ClusterMixin, Mixture, ABC):
    """What mixtures on a graph share."""

    def predict_proba(self, X: Any, *, graph: Any = None, coordinates: Any = None) -> np.ndarray:
        """Return the probabilities of other rows on a graph of their own, with what was fitted held fixed.

        Without a graph rows are joined as `fit` would join them. A row's probabilities depend on its neighbours, so a
        part of the rows may get other ones than it has in the whole.
        """
        check_is_fitted(self)
        rows, task = self._given(X, graph, coordinates, reset=False)
        assert rows.graph is not None
        evidence = self._evidence(np.asarray(self._whitened(rows.X), float))
        where = cut(rows, replace(task, n_patches=None))  # which was for the rows of the fit
        coupling = coupled(rows.graph, where, beta=task.beta, temperature=task.temperature, recipe=task.recipe)
        return settled(evidence, coupling, (len(rows.X), task.n_components))

    def predict(self, X: Any, *, graph: Any = None, coordinates: Any = None) -> np.ndarray:
        """Return the most probable label of other rows; see `predict_proba`."""
        return self.predict_proba(X, graph=graph, coordinates=coordinates).argmax(1)

    @abstractmethod
    def _evidence(self, x: np.ndarray) -> Any:
        """Return a function of the labels' probabilities that gives what rows themselves tell of each label."""

    def _given(self, X: Any, graph: Any, coordinates: Any, *, reset: bool = True) -> tuple[Rows, Task]:
        X = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2 if reset else 1, reset=reset)
        task = self._task(len(X) if reset else max(len(X), len(self.labels_)))
        places = None if coordinates is None else check_coordinates(coordinates, len(X))
        if graph is None:
            graph = _nearest(X if places is None else places)
        return Rows(X, check_graph(graph, len(X)).astype(np.float64), places), task


def _nearest(places: np.ndarray) -> sp.csr_array:
    count = min(NEIGHBORS, len(places) - 1)
    if count == 0:  # a single row
        return sp.csr_array((1, 1))
    near = sp.csr_array(kneighbors_graph(places, count))
    return near.maximum(near.T)


class PottsMixture(_OnGraph):
    """A Gaussian mixture whose labels follow a graph: neighbours like to share a component.

    Parameters are those of `GaussianMixture`, and

    beta
        strength of the coupling: edge weights are multiplied by it.
    n_patches
        pieces the rows are cut into; by default 32, but 1 up to 20,000 rows, and up to 400,000 from known probabilities
        (``fit(start=...)``, or what groups have found). The default solver of one piece is `CAVI`.
    halo
        keep the edges between patches (default); False drops them, as the paper does.
    temperature
        divides the logits; small values harden the labels.
    anneal_from
        a higher temperature to begin with; it falls linearly to ``temperature`` over the first ten epochs.

    ``labels_`` and ``probabilities_`` are of the rows given to `fit`; `predict` labels others, on a graph of their own.

    With more than 80,000 rows, their coordinates, and noise to be estimated, a fit begins with groups of eight rows
    (and these with groups of eight, if they are as many); ``result_`` is then of the rows, from what the groups found.
    """

    def __init__(
        self,
        n_components: int = 2,
        *,
        beta: float = 1.0,
        covariance: str = "tied",
        estimate_noise: bool = True,
        learn_weights: bool = False,
        n_init: int = 1,
        reseed: bool = True,
        n_patches: int | None = None,
        halo: bool = True,
        temperature: float = 1.0,
        anneal_from: float | None = None,
        max_epochs: int = RECIPE.max_epochs,
        tol: float = RECIPE.tol,
        solver: Any = None,
        random_state: Any = None,
        recipe: Recipe | None = None,
    ):
        self.n_components = n_components
        self.beta = beta
        self.anneal_from = anneal_from
        self.covariance = covariance
        self.estimate_noise = estimate_noise
        self.learn_weights = learn_weights
        self.n_init = n_init
        self.reseed = reseed
        self.n_patches = n_patches
        self.halo = halo
        self.temperature = temperature
        self.max_epochs = max_epochs
        self.tol = tol
        self.solver = solver
        self.random_state = random_state
        self.recipe = recipe

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        graph: Any = None,
        coordinates: Any = None,
        start: Any = None,
        exchange: bool = False,
    ) -> PottsMixture:
        """Fit to rows ``X`` on a ``graph`` of edge weights; ``coordinates`` cut the rows into compact patches.

        Without a graph rows are joined to the eight nearest others, by their coordinates if there are any.
        ``start`` has the rows' probabilities from an earlier fit (of other features, say), instead of k-means; or is
        what `of_groups` found. With ``exchange`` components in use are given up where another, split in two, promises
        more.
        """
        rows, task = self._given(X, graph, coordinates)
        if isinstance(start, Start):
            found = fit_rows(rows, task, start, exchange=exchange)
        else:
            if start is not None:
                start = Start(check_probabilities(start, (len(rows.X), self.n_components)))
            found = find(rows, task, start=start, exchange=exchange)
        self._keep(found, task)
        self.probabilities_ = found.probabilities
        self.labels_ = self.probabilities_.argmax(1)
        return self

    def of_groups(self, X: Any, *, graph: Any, coordinates: Any) -> Start | None:
        """Return what `fit` begins with, the fit to groups of rows; None for a tissue that is not so large."""
        return find_on_groups(*self._given(X, graph, coordinates))

    def _evidence(self, x: np.ndarray) -> Any:
        logits = self._row_logits(x)
        return lambda probabilities: logits


class TwoLevelMixture(_OnGraph):
    """Domains that are compositions of types: cells are normal around their type, and neighbours share a domain.

    Parameters are those of `PottsMixture` as far as they are here, and

    n_components
        number of domains.
    n_types
        number of types; by default 20, or as many as there are rows.
    concentration
        of the Dirichlet prior of every domain's composition, for each type.
    n_neighbors
        around a row, in whose types the start looks for domains.

    Attributes
    ----------
    labels_, probabilities_
        domains of the rows given to `fit`.
    types_, type_probabilities_
        their types.
    compositions_
        expected share of every type in every domain, (n_components, n_types).
    means_, covariances_, weights_
        of the types: their means, the covariance around them, which all share, and their shares of the rows.
    elbo_, n_iter_ (epochs), converged_, result_, fit_seconds_
    """

    def __init__(
        self,
        n_components: int = 2,
        *,
        n_types: int | None = None,
        beta: float = 1.0,
        concentration: float = 1.0,
        n_neighbors: int = 30,
        n_patches: int | None = None,
        halo: bool = True,
        temperature: float = 1.0,
        max_epochs: int = RECIPE.max_epochs,
        tol: float = RECIPE.tol,
        solver: Any = None,
        random_state: Any = None,
        recipe: Recipe | None = None,
    ):
        self.n_components = n_components
        self.n_types = n_types
        self.beta = beta
        self.concentration = concentration
        self.n_neighbors = n_neighbors
        self.n_patches = n_patches
        self.halo = halo
        self.temperature = temperature
        self.max_epochs = max_epochs
        self.tol = tol
        self.solver = solver
        self.random_state = random_state
        self.recipe = recipe

    def fit(self, X: Any, y: Any = None, *, graph: Any = None, coordinates: Any = None) -> TwoLevelMixture:
        """Fit to rows ``X`` on a ``graph`` of edge weights; what is around a row say its ``coordinates``.

        Without a graph rows are joined to the eight nearest others. Without coordinates features take their place.
        """
        began = time.perf_counter()
        rows, task = self._given(X, graph, coordinates)
        assert rows.graph is not None
        n_types = min(task.recipe.view_types, len(rows.X)) if self.n_types is None else self.n_types
        whole("n_types", n_types, least=1, most=len(rows.X), of="the number of rows")
        whole("n_neighbors", self.n_neighbors, least=1)
        positive("concentration", self.concentration)
        seed = int(check_random_state(task.random_state).randint(2**31))
        x, offset, unit = centred(rows.X)
        places = rows.X if rows.coordinates is None else rows.coordinates
        start = two_level_start(x, places, task.n_components, n_types, n_neighbors=self.n_neighbors, seed=seed)
        ground = Ground(rows, task)
        where, coupling = ground.where, ground.coupling
        assert coupling is not None
        problem = coupled_two_level(x, start, where, coupling, concentration=self.concentration)
        one_program = is_one_program(rows, task)
        fitted = fit_two_level(problem, task, one_program=one_program, damping=ground.damping, seed=seed)
        result = measured_in(fitted.result, unit, rows.X.size)
        local = {name: where.unshard(np.asarray(part)) for name, part in result.local_params.items()}
        seconds = time.perf_counter() - began
        model = fitted.problem.model
        self._keep(
            Found(result, model.types, offset, fitted.whitening / unit, local["domain"], epochs_of(result), seconds),
            task,
        )
        concentration = np.exp(np.asarray(result.global_params["log_concentration"], float))
        total = concentration.sum(1, keepdims=True)
        self._log_theta, self._log_share = digamma(concentration) - digamma(total), np.asarray(model.log_share, float)
        self.compositions_ = concentration / total
        self.probabilities_, self.type_probabilities_ = local["domain"], local["type"]
        self.labels_, self.types_ = self.probabilities_.argmax(1), self.type_probabilities_.argmax(1)
        self.weights_ = self.type_probabilities_.mean(0)
        return self

    def _evidence(self, x: np.ndarray) -> Any:
        logits = self._row_logits(x)

        def of_types(probabilities: np.ndarray) -> np.ndarray:
            types = softmax((logits + probabilities @ self._log_theta) / self.temperature, axis=1)
            return types @ self._log_theta.T + self._log_share

        return of_types
