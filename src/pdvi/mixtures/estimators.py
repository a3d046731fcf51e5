"""scikit-learn estimators: thin facades over the mixtures."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
from scipy.special import logsumexp
from sklearn.base import BaseEstimator, ClusterMixin, DensityMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from pdvi._base.checks import at_least, one_of
from pdvi.mixtures.checks import (
    check_means,
    check_shares,
    in_order,
    weighted_rows,
)
from pdvi.mixtures.density import Density, nearest_component
from pdvi.mixtures.free import FreeFound, fit_free, in_shape
from pdvi.mixtures.ground import cut
from pdvi.mixtures.likelihood import Likelihood
from pdvi.mixtures.pipeline import find
from pdvi.mixtures.recipe import RECIPE, Recipe
from pdvi.mixtures.start import empirical_bayes
from pdvi.mixtures.task import COVARIANCES, Found, Rows, Start, Task, warn_unless_converged

COVARIANCE_TYPES = ("full", "tied", "diag", "spherical")  # scikit-learn's


class Mixture(BaseEstimator):
    """What all mixtures share; every parameter is documented in the subclasses."""

    def _task(self, n_rows: int) -> Task:
        params = self.get_params(deep=False)
        recipe = RECIPE if self.recipe is None else self.recipe
        asked = {field.name: params[field.name] for field in fields(Task) if field.name in params}
        return Task(**{**asked, "recipe": recipe}).checked(n_rows)

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
        full = back * self._noise @ back.T
        self.covariances_ = full if task.covariance == "tied" else np.diag(full).copy()
        self.result_ = result
        self.elbo_ = -result.objective
        self.n_iter_ = max(1, round(found.epochs))
        self.converged_ = result.converged
        self.fit_seconds_ = found.seconds
        warn_unless_converged(found.result, found.epochs, type(self).__name__, task)

    def _whitened(self, X: np.ndarray) -> np.ndarray:
        return (X - self._offset) @ self._whitening.T

    def _row_logits(self, x: np.ndarray) -> np.ndarray:
        scaled = self._mean / self._noise
        norm = ((self._mean * scaled) + self._variance / self._noise).sum(1)
        return x @ scaled.T + (self._log_weights - 0.5 * norm)


class GaussianMixture(Likelihood, DensityMixin, ClusterMixin, Mixture):
    """A Gaussian mixture fitted by P2D-VI, with a posterior over the component means.

    The order of the rows does not matter. To go on with new rows, give all of them to a mixture with ``warm_start``:
    it begins with what it knows. (There is no ``partial_fit``: rows that are gone cannot be weighed against new ones.)

    Parameters
    ----------
    n_components
        number of components.
    covariance
        "diagonal": one variance per feature, or "tied": one full covariance; shared by all components.
    covariance_type
        scikit-learn's names, with its shapes of ``covariances_`` and ``precisions_``: "full", "diag", "spherical" (each
        component has its own) or "tied". None (default): as ``covariance`` says.
    estimate_noise
        re-estimate the covariance during the fit; otherwise it stays at the k-means estimate (the paper).
    learn_weights
        estimate the component weights; otherwise they are equal (the paper).
    n_init
        k-means starts, of which the best is kept. With fixed noise and weights all run a few epochs as one vectorised
        batch and the best goes on; otherwise each is fitted to its end.
    means_init, weights_init
        where to begin instead of k-means: means (n_components, n_features), shares of the rows (n_components,).
    warm_start
        begin with what the fit before has found, if there was one.
    reseed
        put a component that lost its rows where the data is explained worst, if that helps.
    exchange
        give up a component and split another as long as that helps: one start then reaches what several would. Not
        done where a start was given.
    reg_covar
        is added to the variances. 0 (default) will do: they are never less than a millionth of those of the data.
    max_epochs, tol
        of the fit from one start, re-estimation and reseeding included; see `pdvi.fit`. A fit that ends before it has
        converged warns (`sklearn.exceptions.ConvergenceWarning`).
    solver
        any solver of `pdvi.solvers`, or its name; by default `P2DVI()`.
    verbose
        print the course of the fit.
    random_state
        seed of k-means, the partition and the draws.
    recipe
        the numbers behind all this, a `pdvi.mixtures.Recipe`; by default the usual ones.

    Attributes
    ----------
    means_, covariances_, precisions_, weights_, labels_, elbo_, lower_bound_ (the same per row), n_iter_ (epochs),
    converged_, result_, fit_seconds_
    """

    def __init__(
        self,
        n_components: int = 1,
        *,
        covariance: str = "diagonal",
        covariance_type: str | None = None,
        estimate_noise: bool = True,
        learn_weights: bool = True,
        n_init: int = 1,
        means_init: Any = None,
        weights_init: Any = None,
        warm_start: bool = False,
        reseed: bool = True,
        exchange: bool = True,
        reg_covar: float = 0.0,
        max_epochs: int = RECIPE.max_epochs,
        tol: float = RECIPE.tol,
        solver: Any = None,
        verbose: int = 0,
        random_state: Any = None,
        recipe: Recipe | None = None,
    ):
        self.n_components = n_components
        self.covariance = covariance
        self.covariance_type = covariance_type
        self.estimate_noise = estimate_noise
        self.learn_weights = learn_weights
        self.n_init = n_init
        self.means_init = means_init
        self.weights_init = weights_init
        self.warm_start = warm_start
        self.reseed = reseed
        self.exchange = exchange
        self.reg_covar = reg_covar
        self.max_epochs = max_epochs
        self.tol = tol
        self.solver = solver
        self.verbose = verbose
        self.random_state = random_state
        self.recipe = recipe

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> GaussianMixture:
        """Fit to rows ``X``; a row of weight w counts as w rows."""
        given = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        if self.covariance_type is not None:
            one_of("covariance_type", self.covariance_type, COVARIANCE_TYPES)
        at_least("reg_covar", self.reg_covar)
        weight = None
        if sample_weight is not None:
            given_weight = _check_sample_weight(sample_weight, given, dtype=np.float64, ensure_non_negative=True)
            X, weight = weighted_rows(given, given_weight)
        else:
            X = given
        X, weight = in_order(X, weight)
        structure = self.covariance_type or self.covariance
        task = self._task(len(X))
        start = self._known_start(X)
        free = structure not in COVARIANCES or self.reg_covar > 0 or weight is not None
        if free:
            self._keep_free(self._find_free(X, weight, task, structure, start), task, structure)
        else:
            self._keep(find(Rows(X), task if start is None else replace(task, exchange=False), start=start), task)
        self._in_type(given.dtype)
        self.lower_bound_ = self.elbo_ / (len(X) if weight is None else float(weight.sum()))
        self.labels_ = self.predict(given)
        if self.verbose:
            print(self.result_.trace[["epoch", "objective", "event"]].to_string(index=False))
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the posterior probability of every component for every row."""
        x, dtype = self._rows(X)
        logits = self._density.logits(x) if self._is_free else self._row_logits(self._whitened(x))
        return np.exp(logits - logsumexp(logits, axis=1, keepdims=True)).astype(dtype)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable component of every row."""
        return self.predict_proba(X).argmax(1)

    def score_samples(self, X: Any) -> np.ndarray:
        """Return the log density of every row under the posterior predictive mixture."""
        x, _ = self._rows(X)
        if self._is_free:
            return self._density.log_density(x)
        x = self._whitened(x)
        variance = self._noise + self._variance
        squares = ((x[:, None] - self._mean) ** 2 / variance + np.log(2 * np.pi * variance)).sum(-1)
        return logsumexp(self._log_weights - 0.5 * squares, axis=1) + self._log_scale

    def _known_start(self, X: np.ndarray) -> Start | None:
        """Probabilities to begin with, if a start is given or known from the fit before."""
        shape = (self.n_components, X.shape[1])
        if self.warm_start and "means_" in vars(self):
            if self.means_.shape != shape:
                msg = (
                    f"`warm_start` must go on with as many components and features as before ({self.means_.shape}), "
                    f"got {shape}; set it to False."
                )
                raise ValueError(msg)
            logits = self._density.logits(np.asarray(X, float))
            return Start(np.exp(logits - logsumexp(logits, axis=1, keepdims=True)))
        weights = None if self.weights_init is None else check_shares(self.weights_init, self.n_components)
        if self.means_init is None and weights is None:
            return None
        if self.means_init is None:
            seed = int(check_random_state(self.random_state).randint(2**31))
            centre = X.mean(0)
            means = empirical_bayes(X - centre, self.n_components, seed=seed).means + centre
        else:
            means = check_means(self.means_init, shape)
        return Start(nearest_component(np.asarray(X, float), means, weights))

    def _find_free(
        self, X: np.ndarray, weight: np.ndarray | None, task: Task, structure: str, start: Start | None
    ) -> FreeFound:
        """Fit components with covariances of their own, from a start or from what a shared covariance finds."""
        where, epochs, seconds = cut(Rows(X), task), 0.0, 0.0
        if start is None:
            shared = replace(task, max_epochs=max(1, task.max_epochs // 2))
            if task.max_epochs > 1:
                found = find(Rows(X), shared)
                start, epochs, seconds = Start(found.probabilities), found.epochs, found.seconds
            else:
                seed = int(check_random_state(self.random_state).randint(2**31))
                centre = X.mean(0)
                means = empirical_bayes(X - centre, self.n_components, seed=seed).means + centre
                start = Start(nearest_component(np.asarray(X, float), means))
        free = fit_free(
            X,
            weight,
            np.asarray(start.probabilities, float),
            where,
            task,
            structure=structure,
            reg_covar=float(self.reg_covar),
            max_epochs=task.max_epochs - epochs,
        )
        return free._replace(epochs=free.epochs + epochs, seconds=free.seconds + seconds)

    def _task(self, n_rows: int) -> Task:
        task = super()._task(n_rows)
        kind = {"full": "tied", "tied": "tied", "diag": "diagonal", "spherical": "diagonal", None: self.covariance}
        return replace(task, covariance=kind[self.covariance_type])

    def _keep(self, found: Found, task: Task) -> None:
        super()._keep(found, task)
        self._is_free, self._structure = False, task.covariance
        back = np.linalg.inv(found.whitening)
        full = back * self._noise @ back.T
        shape = (len(self.weights_), *full.shape)
        variances = self._variance @ (back**2).T
        self._density = Density(self.means_, variances, np.broadcast_to(full, shape), self._log_weights)
        self.covariances_ = in_shape(self._density.covariances, self._structure)

    def _keep_free(self, free: FreeFound, task: Task, structure: str) -> None:
        self._is_free, self._structure = True, structure
        self._density = Density(free.means, free.mean_variances, free.covariances, free.log_weights)
        self.weights_, self.means_ = np.exp(free.log_weights), free.means
        self.covariances_ = in_shape(free.covariances, structure)
        self.result_, self.elbo_ = free.result, -free.result.objective
        self.n_iter_, self.converged_ = max(1, round(free.epochs)), free.result.converged
        self.fit_seconds_ = free.seconds
        warn_unless_converged(free.result, free.epochs, type(self).__name__, task)

    def _in_type(self, dtype: np.dtype) -> None:
        """Give the attributes the type of the rows; what single precision cannot hold stays in double."""
        self.precisions_ = in_shape(_inverses(self._density.covariances), self._structure)
        for name in ("weights_", "means_", "covariances_", "precisions_"):
            values = getattr(self, name)
            large, limits = np.abs(values), np.finfo(dtype)
            if large.max() < limits.max and not ((large > 0) & (large < limits.tiny)).any():
                setattr(self, name, values.astype(dtype))

    def _rows(self, X: Any) -> tuple[np.ndarray, np.dtype]:
        check_is_fitted(self, "means_")
        X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        return np.asarray(X, float), X.dtype


def _inverses(covariances: np.ndarray) -> np.ndarray:
    """Inverse matrices, in units in which they are close to 1: those of tiny ones would not be found."""
    size = np.sqrt(np.diagonal(covariances, axis1=1, axis2=2))
    both = size[:, :, None] * size[:, None, :]
    values, vectors = np.linalg.eigh(covariances / both)
    # columns that are the same but for one far row leave nothing of the least eigenvalue, or less
    values = np.maximum(values, np.finfo(float).eps * values.max(-1, keepdims=True))
    return (vectors / values[..., None, :]) @ np.swapaxes(vectors, -1, -2) / both
