"""scikit-learn estimators: thin facades over the mixtures."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.special import logsumexp
from sklearn.base import BaseEstimator, ClusterMixin, DensityMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from pdvi.mixtures.checks import check_coordinates, check_graph, check_probabilities
from pdvi.mixtures.pipeline import find, find_on_groups, fit_rows
from pdvi.mixtures.recipe import RECIPE, Recipe
from pdvi.mixtures.task import Found, Rows, Start, Task


class _Mixture(BaseEstimator):
    """What both mixtures share; every parameter is documented in the subclasses."""

    def _task(self, n_rows: int) -> Task:
        params = self.get_params(deep=False)
        recipe = RECIPE if self.recipe is None else self.recipe
        return Task(**{**params, "recipe": recipe}).checked(n_rows)

    def _keep(self, found: Found, task: Task) -> None:
        """Take over a fit, in the units of the rows that were given."""
        result, model, back = found.result, found.model, np.linalg.inv(found.whitening)
        self._offset, self._whitening = found.offset, found.whitening
        self._noise = np.asarray(model.noise_variance, float)
        self._mean = np.asarray(result.global_params["mean"], float)
        self._variance = np.exp(np.asarray(result.global_params["log_var"], float))
        self._log_weights = np.asarray(model.log_weights, float)
        self._log_scale = float(np.linalg.slogdet(found.whitening)[1])
        self.weights_ = np.exp(self._log_weights)
        self.means_ = self._mean @ back.T + found.offset
        full = back @ np.diag(self._noise) @ back.T
        self.covariances_ = full if self.covariance == "tied" else np.diag(full).copy()
        self.result_ = result
        self.elbo_ = -result.objective
        self.n_iter_ = max(1, round(found.epochs))
        self.converged_ = result.converged
        self.fit_seconds_ = found.seconds
        found.warn_unless_converged(type(self).__name__, task)

    def _whiten(self, X: Any) -> np.ndarray:
        check_is_fitted(self, "means_")
        X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        return (X - self._offset) @ self._whitening.T

    def _row_logits(self, x: np.ndarray) -> np.ndarray:
        scaled = self._mean / self._noise
        norm = ((self._mean * scaled) + self._variance / self._noise).sum(1)
        return x @ scaled.T + (self._log_weights - 0.5 * norm)


class GaussianMixture(DensityMixin, ClusterMixin, _Mixture):
    """A Gaussian mixture fitted by P2D-VI, with a posterior over the component means.

    Parameters
    ----------
    n_components
        number of components.
    covariance
        "diagonal": one variance per feature, or "tied": one full covariance; shared by all components.
    estimate_noise
        re-estimate the covariance during the fit; otherwise it stays at the k-means estimate (the paper).
    learn_weights
        estimate the component weights; otherwise they are equal (the paper).
    n_init
        k-means starts, of which the best is kept. With fixed noise and weights all run a few epochs as one vectorised
        batch and the best goes on; otherwise each is fitted to its end.
    reseed
        put a component that lost its rows where the data is explained worst, if that helps.
    max_epochs, tol
        of the fit from one start, re-estimation and reseeding included; see `pdvi.fit`. A fit that ends before it has
        converged warns (`sklearn.exceptions.ConvergenceWarning`).
    solver
        any solver of `pdvi.solvers`, or its name; by default `P2DVI()`.
    random_state
        seed of k-means, the partition and the draws.
    recipe
        the numbers behind all this, a `pdvi.mixtures.Recipe`; by default the usual ones.

    Attributes
    ----------
    means_, covariances_, weights_, labels_, elbo_, n_iter_ (epochs), converged_, result_, fit_seconds_
    """

    def __init__(
        self,
        n_components: int = 1,
        *,
        covariance: str = "diagonal",
        estimate_noise: bool = True,
        learn_weights: bool = True,
        n_init: int = 1,
        reseed: bool = True,
        max_epochs: int = RECIPE.max_epochs,
        tol: float = RECIPE.tol,
        solver: Any = None,
        random_state: Any = None,
        recipe: Recipe | None = None,
    ):
        self.n_components = n_components
        self.covariance = covariance
        self.estimate_noise = estimate_noise
        self.learn_weights = learn_weights
        self.n_init = n_init
        self.reseed = reseed
        self.max_epochs = max_epochs
        self.tol = tol
        self.solver = solver
        self.random_state = random_state
        self.recipe = recipe

    def fit(self, X: Any, y: Any = None) -> GaussianMixture:
        """Fit to rows ``X``."""
        X = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        task = self._task(len(X))
        self._keep(find(Rows(X), task), task)
        self.labels_ = self.predict(X)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the posterior probability of every component for every row."""
        logits = self._row_logits(self._whiten(X))
        return np.exp(logits - logsumexp(logits, axis=1, keepdims=True))

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable component of every row."""
        return self.predict_proba(X).argmax(1)

    def score_samples(self, X: Any) -> np.ndarray:
        """Return the log density of every row under the posterior predictive mixture."""
        x = self._whiten(X)
        variance = self._noise + self._variance
        squares = ((x[:, None] - self._mean) ** 2 / variance + np.log(2 * np.pi * variance)).sum(-1)
        return logsumexp(self._log_weights - 0.5 * squares, axis=1) + self._log_scale

    def score(self, X: Any, y: Any = None) -> float:
        """Return the mean log density of the rows."""
        return float(self.score_samples(X).mean())


class PottsMixture(ClusterMixin, _Mixture):
    """A Gaussian mixture whose labels follow a graph: neighbours like to share a component.

    Parameters are those of `GaussianMixture`, and

    beta
        strength of the coupling: edge weights are multiplied by it.
    n_patches
        pieces the rows are cut into; by default one for every 32 rows, at most 32.
    halo
        keep the edges between patches (default); False drops them, as the paper does.
    temperature
        divides the logits; small values harden the labels.
    anneal_from
        a higher temperature to begin with; it falls linearly to ``temperature`` over the first ten epochs.

    ``labels_`` and ``probabilities_`` are of the rows given to `fit`: a new row has no place in the graph.

    With more than 80,000 rows, their coordinates, and noise to be estimated, a fit begins with groups of four rows
    (and these with groups of four, if they are as many); ``result_`` is then of the rows, from what the groups found.
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
        graph: Any,
        coordinates: Any = None,
        start: Any = None,
        exchange: bool = False,
    ) -> PottsMixture:
        """Fit to rows ``X`` on a ``graph`` of edge weights; ``coordinates`` cut the rows into compact patches.

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

    def _given(self, X: Any, graph: Any, coordinates: Any) -> tuple[Rows, Task]:
        X = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        task = self._task(len(X))
        if self.n_components < 2:
            msg = f"`n_components` must be at least 2, got {self.n_components!r}."
            raise ValueError(msg)
        graph = check_graph(sp.csr_array(graph, dtype=np.float64), len(X))
        return Rows(X, graph, None if coordinates is None else check_coordinates(coordinates, len(X))), task
