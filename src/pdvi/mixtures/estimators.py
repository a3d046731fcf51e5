"""scikit-learn estimators: thin facades over the mixtures."""

from __future__ import annotations

import dataclasses
import time
import warnings
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClusterMixin, DensityMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from pdvi._base.checks import at_least, instance, one_of, whole
from pdvi.mixtures.checks import check_coupling, check_means, check_random, check_shares, in_order, weighted_rows
from pdvi.mixtures.config import CONFIG, Config
from pdvi.mixtures.density import Density, MixtureFit, nearest_component
from pdvi.mixtures.fit_mixture import FitOptions, collapses, fit_mixture, fit_rows
from pdvi.mixtures.init import KMEANS_ROWS, center, kmeans_labels, one_hot
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.mixtures.split_merge import split_and_merge
from pdvi.run.settings import solver_for

COVARIANCE_TYPES = ("full", "tied", "diag", "spherical")  # scikit-learn's
SHARED = ("diagonal", "tied")
MAX_STARTS = 10_000  # each is a whole fit
N_SHARDS, ROWS_PER_SHARD = 16, 500  # of rows without a graph
BLOCK_ROWS = 2048  # that are worked on at once: what is made of them stays in the cache


@dataclass(eq=False, repr=False, kw_only=True)
class Mixture(BaseEstimator):
    """What all mixtures share. Fields are scikit-learn's parameters, which the subclasses document."""

    max_epochs: int = CONFIG.max_epochs
    tol: float = CONFIG.tol
    solver: Any = None
    random_state: Any = None
    config: Config | None = None

    def _options(self, n_rows: int, *, covariance: str = "tied", seed: int = 0) -> FitOptions:
        """Return the options of a fit, checked."""
        params = self.get_params(deep=False)
        whole("n_components", params["n_components"], least=1, most=n_rows, of="the number of rows")
        whole("n_init", params.get("n_init", 1), least=1, most=MAX_STARTS)
        whole("max_epochs", params["max_epochs"], least=1)
        at_least("tol", params["tol"])
        if params.get("n_patches") is not None:
            whole("n_patches", params["n_patches"], least=1, most=n_rows, of="the number of rows")
        check_coupling(params.get("beta", 1.0), params.get("temperature", 1.0))
        config = CONFIG if params["config"] is None else instance("config", params["config"], Config, "a Config")
        return FitOptions(
            covariance=covariance,
            learn_precision=params.get("estimate_noise", True),
            learn_weight=params.get("learn_weights", False),
            temperature=params.get("temperature", 1.0),
            solver=None if params["solver"] is None else solver_for(params["solver"]),
            seed=seed,
            config=dataclasses.replace(config, max_epochs=params["max_epochs"], tol=params["tol"]),
        )

    def _keep(self, fitted: MixtureFit, seconds: float) -> None:
        """Take over a fit, in the units of the rows that were given."""
        self._fitted, self._density = fitted, Density(fitted)
        covariance = fitted.model.covariance
        self.means_, self.weights_ = self._density.means, np.exp(self._density.log_weights)
        self.covariances_ = self._density.shaped(np.array(self._density.covariances), covariance)
        self.result_, self.elbo_ = fitted.result, -fitted.objective
        self.n_iter_ = max(1, round(float(fitted.result.trace["epoch"].iloc[-1])))
        self.converged_, self.fit_seconds_ = fitted.result.converged, seconds
        if not self.converged_:
            msg = f"{type(self).__name__} did not converge in {self.n_iter_} epochs: {fitted.result.status}."
            warnings.warn(msg, ConvergenceWarning, stacklevel=3)


@dataclass(eq=False, repr=False)
class GaussianMixture(DensityMixin, ClusterMixin, Mixture):
    """A Gaussian mixture fitted by P2D-VI, with a posterior over the component means.

    The order of the rows does not matter. To go on with new rows, give all of them to a mixture with ``warm_start``:
    it begins with what it knows. (There is no ``partial_fit``: rows that are gone cannot be weighed against new ones.)

    Parameters
    ----------
    n_components
        Number of components.
    covariance
        "diagonal": one variance per feature, or "tied": one full covariance; shared by all components.
    covariance_type
        scikit-learn's names, with its shapes of ``covariances_`` and ``precisions_``: "full", "diag", "spherical" (each
        component has its own) or "tied". None (default): as ``covariance`` says.
    estimate_noise
        Whether the covariance is estimated; otherwise it stays at the k-means estimate (the paper).
    learn_weights
        Whether the component weights are estimated; otherwise they are equal (the paper).
    n_init
        K-means starts, each fitted to its end, of which the best is kept.
    means_init, weights_init
        Where to begin instead of k-means: means (n_components, n_features), fractions of the rows (n_components,).
    warm_start
        Begin with what the fit before has found, if there was one.
    reseed
        Put a component that lost its rows where the data is explained worst, if that helps.
    exchange
        Give up a component and split another as long as that helps: one start then reaches what several would. Not
        done where a start was given.
    reg_covar
        Is added to the variances. 0 (default) will do: they are never less than a millionth of those of the data.
    max_epochs
        Most epochs of one fit. A fit that ends before it has converged warns
        (`sklearn.exceptions.ConvergenceWarning`).
    tol
        A fit has converged when an epoch gains less than so many nats per row, twice in a row.
    solver
        Any solver of `pdvi.solvers`, or its name; by default `P2DVI()`.
    verbose
        Print the course of the fit.
    random_state
        Seed of k-means, the partition and the draws.
    config
        The numbers behind all this, a `pdvi.mixtures.Config`; by default the usual ones.

    Attributes
    ----------
    means_, covariances_, precisions_, weights_, labels_, elbo_, lower_bound_ (the same per row), n_iter_ (epochs),
    converged_, result_, fit_seconds_
    """

    n_components: int = 1
    _: KW_ONLY
    covariance: str = "diagonal"
    covariance_type: str | None = None
    estimate_noise: bool = True
    learn_weights: bool = True
    n_init: int = 1
    means_init: Any = None
    weights_init: Any = None
    warm_start: bool = False
    reseed: bool = True
    exchange: bool = True
    reg_covar: float = 0.0
    verbose: int = 0

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> GaussianMixture:
        """Fit to rows ``X``; a row of weight w counts as w rows."""
        began = time.perf_counter()
        given = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        if self.covariance_type is not None:
            one_of("covariance_type", self.covariance_type, COVARIANCE_TYPES)
        one_of("covariance", self.covariance, SHARED)
        at_least("reg_covar", self.reg_covar)
        check_random(self.random_state)
        rows, weight = given, None
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, given, dtype=np.float64, ensure_non_negative=True)
            rows, weight = weighted_rows(given, weight)
        kind = self.covariance_type or self.covariance
        options = self._options(len(rows), covariance=kind)
        seeds = check_random_state(self.random_state).randint(2**31, size=self.n_init)
        options = dataclasses.replace(options, seed=int(seeds[0]), added_variance=float(self.reg_covar))
        order, n_shards = in_order(rows), max(1, min(N_SHARDS, len(rows) // ROWS_PER_SHARD))
        dealt: dict[str, Any] = {"n_shards": n_shards, "seed": int(seeds[0])}
        if collapses(options.solver):
            sampled, blocks = order[:: -(-len(rows) // KMEANS_ROWS)], -(-len(rows) // (n_shards * BLOCK_ROWS))
            graph = ShardedGraph(len(rows), weight=weight, order=order, blocks=blocks, **dealt)
            refit = partial(fit_rows, rows, graph, sampled, options=options)
        else:
            rows, weight, sampled = rows[order], None if weight is None else weight[order], np.arange(len(rows))
            graph = ShardedGraph(len(rows), weight=weight, **dealt)
            refit = partial(fit_mixture, rows, graph, options=options)
        some = rows[sampled]
        known = self._known_start(some)
        starts = [known] if known is not None else [self._kmeans_start(some, int(seed)) for seed in seeds]
        best = min(map(refit, starts), key=lambda fitted: fitted.objective)
        if best.result.converged and (self.reseed or (self.exchange and known is None)):
            seen = best.rows(some)
            best = split_and_merge(best, seen, refit, merge=self.exchange and known is None)
        self._keep(best, time.perf_counter() - began)
        self._structure = kind
        self._in_type(given.dtype)
        self.lower_bound_ = self.elbo_ / graph.total_weight
        self.labels_ = self.predict(given)
        if self.verbose:
            print(self.result_.trace[["epoch", "objective", "event"]].to_string(index=False))
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the posterior probability of every component for every row."""
        x, dtype = self._rows(X)
        return self._density.probabilities(x).astype(dtype)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable component of every row."""
        rows, _ = self._rows(X)
        return self._density.labels(rows)

    def score_samples(self, X: Any) -> np.ndarray:
        """Return the log density of every row under the posterior predictive mixture."""
        rows, _ = self._rows(X)
        return self._density.log_density(rows)

    def score(self, X: Any, y: Any = None) -> float:
        """Return the mean log density of the rows."""
        return float(self.score_samples(X).mean())

    def aic(self, X: Any) -> float:
        """Return Akaike's information criterion for these rows; the lower the better."""
        return -2 * self.score(X) * len(X) + 2 * self._n_parameters()

    def bic(self, X: Any) -> float:
        """Return the Bayesian information criterion for these rows; the lower the better."""
        return -2 * self.score(X) * len(X) + self._n_parameters() * float(np.log(len(X)))

    def sample(self, n_samples: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return rows drawn from the mixture, component by component, and the component of each."""
        check_is_fitted(self, "means_")
        n_samples = whole("n_samples", n_samples, least=1)
        rng = check_random_state(self.random_state)
        means, covariances = self._density.means, self._density.covariances
        weights = np.exp(self._density.log_weights)
        counts = rng.multinomial(n_samples, weights / weights.sum())
        rows = []
        for mean, covariance, count in zip(means, covariances, counts):
            size = np.sqrt(np.diag(covariance))
            factor = np.linalg.cholesky(covariance / size[:, None] / size)
            rows.append(mean + rng.standard_normal((count, len(mean))) @ factor.T * size)
        return np.concatenate(rows), np.repeat(np.arange(len(means)), counts)

    def _n_parameters(self) -> int:
        """The free parameters of the mixture, counted as scikit-learn does."""
        check_is_fitted(self, "means_")
        k, d = self._density.means.shape
        shapes = {"full": k * d * (d + 1) // 2, "tied": d * (d + 1) // 2, "diag": k * d, "spherical": k, "diagonal": d}
        return shapes[self._structure] + k * d + k - 1

    def _kmeans_start(self, X: np.ndarray, seed: int) -> np.ndarray:
        labels = kmeans_labels(center(X).astype(np.float32), self.n_components, seed=seed)
        return one_hot(labels, self.n_components)

    def _known_start(self, X: np.ndarray) -> np.ndarray | None:
        """Probabilities to begin with, if a start is given or known from the fit before."""
        shape = (self.n_components, X.shape[1])
        if self.warm_start and "means_" in vars(self):
            if self.means_.shape != shape:
                msg = (
                    f"`warm_start` must go on with as many components and features as before ({self.means_.shape}), "
                    f"got {shape}; set it to False."
                )
                raise ValueError(msg)
            return self._density.probabilities(X)
        weights = None if self.weights_init is None else check_shares(self.weights_init, self.n_components)
        if self.means_init is None and weights is None:
            return None
        if self.means_init is None:
            start = self._kmeans_start(X, int(check_random_state(self.random_state).randint(2**31)))
            means = start.T.astype(float) @ X / np.maximum(start.sum(0), 1)[:, None]
        else:
            means = check_means(self.means_init, shape)
        return nearest_component(np.asarray(X, float), means, weights)

    def _in_type(self, dtype: np.dtype) -> None:
        """Give the attributes the type of the rows; what single precision cannot hold stays in double."""
        self.precisions_ = self._density.shaped(self._density.precisions(), self._structure)
        for name in ("weights_", "means_", "covariances_", "precisions_"):
            values = vars(self)[name]
            large, limits = np.abs(values), np.finfo(dtype)
            if large.max() < limits.max and not ((large > 0) & (large < limits.tiny)).any():
                setattr(self, name, values.astype(dtype))

    def _rows(self, X: Any) -> tuple[np.ndarray, np.dtype]:
        check_is_fitted(self, "means_")
        X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        return X, X.dtype
