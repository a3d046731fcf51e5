"""Estimators of rows on a graph: thin facades over the Potts mixture and the hierarchical mixture."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.special import digamma, log_softmax, softmax
from sklearn.base import ClusterMixin
from sklearn.neighbors import kneighbors_graph
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from pdvi._base.checks import one_of, positive, whole
from pdvi.mixtures.checks import check_coordinates, check_graph, check_probabilities, check_random
from pdvi.mixtures.coarsen import coarsen
from pdvi.mixtures.config import Config
from pdvi.mixtures.density import MixtureFit
from pdvi.mixtures.estimators import SHARED, Mixture
from pdvi.mixtures.fit_mixture import FitOptions, fit_hierarchical, fit_mixture
from pdvi.mixtures.init import center, domains_of_types, kmeans_labels, one_hot
from pdvi.mixtures.sharded_graph import ShardedGraph, safe_damping
from pdvi.mixtures.split_merge import split_and_merge

NEIGHBORS = 8  # of a graph that nobody gave
MAX_SWEEPS = 500  # in which labels of other rows are found
SWEEP_TOL = 1e-5  # of a probability in a sweep


@dataclass(eq=False, repr=False)
class _OnGraph(ClusterMixin, Mixture, ABC):
    """What mixtures on a graph share."""

    n_components: int = 2
    _: KW_ONLY
    beta: float = 1.0
    n_patches: int | None = None
    halo: bool = True
    temperature: float = 1.0

    def predict_proba(self, X: Any, *, graph: Any = None, coordinates: Any = None) -> np.ndarray:
        """Return the probabilities of other rows on a graph of their own, with what was fitted held fixed.

        Without a graph rows are joined as `fit` would join them. A row's probabilities depend on its neighbors, so a
        part of the rows may get other ones than it has in the whole.
        """
        check_is_fitted(self)
        rows, checked, _ = self._given(X, graph, coordinates, reset=False)
        evidence = self._evidence(np.asarray(rows, float))
        shape = (len(rows), self.n_components)
        return propagate_labels(evidence, checked, shape, beta=self.beta, temperature=self.temperature)

    def predict(self, X: Any, *, graph: Any = None, coordinates: Any = None) -> np.ndarray:
        """Return the most probable label of other rows; see `predict_proba`."""
        return self.predict_proba(X, graph=graph, coordinates=coordinates).argmax(1)

    @abstractmethod
    def _evidence(self, X: np.ndarray) -> Any:
        """Return a function of the labels' probabilities that gives what rows themselves tell of each label."""

    def _given(
        self, X: Any, graph: Any, coordinates: Any, *, reset: bool = True
    ) -> tuple[np.ndarray, sp.csr_array, np.ndarray | None]:
        X = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2 if reset else 1, reset=reset)
        places = None if coordinates is None else check_coordinates(coordinates, len(X))
        if graph is None:
            graph = _nearest(X if places is None else places)
        return X, check_graph(graph, len(X)).astype(np.float64), places

    def _sharded(self, X: np.ndarray, graph: sp.csr_array, places: np.ndarray | None, config: Config) -> ShardedGraph:
        n_shards = config.patches(len(X)) if self.n_patches is None else self.n_patches
        return ShardedGraph(len(X), graph, places, n_shards=n_shards, beta=float(self.beta), halo=self.halo)


def _nearest(places: np.ndarray) -> sp.csr_array:
    count = min(NEIGHBORS, len(places) - 1)
    if count == 0:  # a single row
        return sp.csr_array((1, 1))
    near = sp.csr_array(kneighbors_graph(places, count))
    return near.maximum(near.T)


@dataclass(eq=False, repr=False, kw_only=True)
class PottsMixture(_OnGraph):
    """A Gaussian mixture whose labels follow a graph: neighbors like to share a component.

    Parameters are those of `GaussianMixture`, and

    beta
        Strength of the coupling: edge weights are multiplied by it.
    n_patches
        Pieces the rows are cut into; by default 8, fewer where a piece would have less than 32 rows.
    halo
        Keep the edges between patches (default); False drops them, as the paper does.
    temperature
        Divides the logits; small values harden the labels.

    ``labels_`` and ``probabilities_`` are of the rows given to `fit`; `predict` labels others, on a graph of their own.

    With more than 80,000 rows and their coordinates a fit begins with groups of eight rows (and these with groups of
    eight, if they are as many); ``result_`` is then of the rows, from what the groups found.
    """

    covariance: str = "tied"
    estimate_noise: bool = True
    learn_weights: bool = False
    n_init: int = 1
    reseed: bool = True

    def fit(
        self, X: Any, y: Any = None, *, graph: Any = None, coordinates: Any = None, start: Any = None
    ) -> PottsMixture:
        """Fit to rows ``X`` on a ``graph`` of edge weights; ``coordinates`` cut the rows into compact patches.

        Without a graph rows are joined to the eight nearest others, by their coordinates if there are any. ``start``
        has the rows' probabilities from an earlier fit (of other features, say), instead of k-means.
        """
        began = time.perf_counter()
        rows, checked, places = self._given(X, graph, coordinates)
        one_of("covariance", self.covariance, SHARED)
        check_random(self.random_state)
        options = self._options(len(rows), covariance=self.covariance)
        if start is not None:
            start = check_probabilities(start, (len(rows), self.n_components))
        fitted = self._find(rows, checked, places, start, options)
        self._keep(fitted, time.perf_counter() - began)
        self.probabilities_, self.labels_ = fitted.probabilities, fitted.labels
        return self

    def _find(
        self, X: np.ndarray, graph: sp.csr_array, places: np.ndarray | None, start: Any, options: FitOptions
    ) -> MixtureFit:
        """Fit groups of rows first where there are many, then the rows from what the groups found."""
        if start is None and places is not None and len(X) > options.config.group_above:
            means, between, centers, group = coarsen(X, graph, places, options.config.group_size)
            start = self._find(means, between, centers, None, options).probabilities[group]
        sharded = self._sharded(X, graph, places, options.config)
        seeds = check_random_state(self.random_state).randint(2**31, size=self.n_init)
        options = dataclasses.replace(options, seed=int(seeds[0]))
        starts = [start]
        if start is None:
            x = center(X)
            starts = [one_hot(kmeans_labels(x, self.n_components, seed=int(seed)), self.n_components) for seed in seeds]

        def refit(probabilities: np.ndarray) -> MixtureFit:
            return fit_mixture(X, sharded, probabilities, options)

        best = min(map(refit, starts), key=lambda fitted: fitted.objective)
        if not (self.reseed and best.result.converged):
            return best
        seen = best.rows(X)
        return split_and_merge(best, seen, refit, graph=graph, max_moves=self.n_components)

    def _evidence(self, X: np.ndarray) -> Any:
        logits = self._density.logits(X)
        return lambda probabilities: logits


@dataclass(eq=False, repr=False, kw_only=True)
class TwoLevelMixture(_OnGraph):
    """Domains that are compositions of types: cells are normal around their type, and neighbors share a domain.

    Parameters are those of `PottsMixture` as far as they are here, and

    n_components
        Number of domains.
    n_types
        Number of types; by default 20, or as many as there are rows.
    concentration
        Of the Dirichlet prior of every domain's composition, for each type.
    n_neighbors
        Around a row, in whose types the start looks for domains.

    Attributes
    ----------
    labels_, probabilities_
        Domains of the rows given to `fit`.
    types_, type_probabilities_
        Their types.
    compositions_
        Expected fraction of every type in every domain, (n_components, n_types).
    means_, covariances_, weights_
        Of the types: their means, the covariance around them, which all share, and their fractions of the rows.
    elbo_, n_iter_ (epochs), converged_, result_, fit_seconds_
    """

    n_types: int | None = None
    concentration: float = 1.0
    n_neighbors: int = 30

    def fit(self, X: Any, y: Any = None, *, graph: Any = None, coordinates: Any = None) -> TwoLevelMixture:
        """Fit to rows ``X`` on a ``graph`` of edge weights; what is around a row say its ``coordinates``.

        Without a graph rows are joined to the eight nearest others. Without coordinates features take their place.
        """
        began = time.perf_counter()
        rows, checked, places = self._given(X, graph, coordinates)
        check_random(self.random_state)
        options = self._options(len(rows))
        n_types = min(options.config.n_types, len(rows)) if self.n_types is None else self.n_types
        whole("n_types", n_types, least=1, most=len(rows), of="the number of rows")
        whole("n_neighbors", self.n_neighbors, least=1)
        positive("concentration", self.concentration)
        seed = int(check_random_state(self.random_state).randint(2**31))
        options = dataclasses.replace(options, seed=seed, concentration=float(self.concentration))
        types = one_hot(kmeans_labels(center(rows), n_types, seed=seed), n_types)
        around = rows if places is None else places
        start = domains_of_types(types, around, self.n_components, n_neighbors=self.n_neighbors, seed=seed)
        sharded = self._sharded(rows, checked, places, options.config)
        fitted = fit_hierarchical(rows, sharded, start, types, options)
        assert fitted.types is not None
        self._keep(fitted, time.perf_counter() - began)
        concentration = np.exp(np.asarray(fitted.result.global_params["log_concentration"], float))
        self._log_theta = digamma(concentration) - digamma(concentration.sum(1, keepdims=True))
        self.compositions_ = fitted.composition
        self.probabilities_, self.type_probabilities_ = fitted.probabilities, fitted.types
        self.labels_, self.types_ = fitted.labels, fitted.types.argmax(1)
        self.weights_ = fitted.types.mean(0)
        return self

    def _evidence(self, X: np.ndarray) -> Any:
        logits = self._density.logits(X) - self._density.log_weights

        def of_types(probabilities: np.ndarray) -> np.ndarray:
            types = softmax((logits + probabilities @ self._log_theta) / self.temperature, axis=1)
            return types @ self._log_theta.T

        return of_types


def propagate_labels(
    evidence: Callable[[np.ndarray], np.ndarray],
    graph: sp.csr_array,
    shape: tuple[int, int],
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
) -> np.ndarray:
    """Return phi with phi_i = softmax((evidence_i(phi) + beta sum_l r_il phi_l) / temperature), by damped sweeps.

    ``evidence`` gives the log density of every row under every label. Labels that are undecided tell neighbors nothing,
    so the first sweep knows of the rows alone.
    """
    damping = safe_damping(graph, beta, temperature)
    phi = np.full(shape, 1 / shape[1])
    log_phi = np.log(phi)
    for _ in range(MAX_SWEEPS):
        logits = (evidence(phi) + beta * (graph @ phi)) / temperature
        log_phi = log_softmax((logits + damping * log_phi) / (1 + damping), axis=1)
        before, phi = phi, np.exp(log_phi)
        if np.abs(phi - before).max() < SWEEP_TOL:
            break
    return phi
