"""scikit-learn estimators: thin facades over the mixtures."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp
from scipy.special import logsumexp
from sklearn.base import BaseEstimator, ClusterMixin, DensityMixin, clone
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from pdvi.core.problem import Problem
from pdvi.mixtures.build import (
    EmpiricalBayes,
    empirical_bayes,
    from_labels,
    gaussian_mixture_problem,
    means_of,
    point_at,
    potts_mixture_problem,
)
from pdvi.mixtures.coarse import coarsened
from pdvi.mixtures.em import FIRST, Fitted, annealed, variational_em
from pdvi.mixtures.reseed import reseeded
from pdvi.mixtures.restarts import best_of
from pdvi.shards.partition import Layout, along_space, consecutive, layout, median_cuts
from pdvi.solvers import P2DVI

COVARIANCES = ("diagonal", "tied")
ROWS_PER_SHARD = 500
LARGE, GROUP = 80_000, 4  # with more rows than this a fit begins with groups of so many, which is as many times faster
SETTLE = 6  # epochs before the first re-estimation from known probabilities
WARM_UP = 10  # epochs that all of several starts run before the best goes on


class Start(NamedTuple):
    """Probabilities to begin with, and the seconds their fit took."""

    probabilities: np.ndarray
    seconds: float


class _Mixture(BaseEstimator):
    """What both mixtures share; every parameter is documented in the subclasses."""

    def _fit(
        self, X: np.ndarray, where: Layout, make: Any, known: np.ndarray | None = None, exchange: bool = False
    ) -> None:
        """Whiten, start (from ``known`` probabilities, if any), fit, and put the answer into the units of ``X``."""
        n_init = self.n_init if known is None else 1
        rng = check_random_state(self.random_state)
        seeds = rng.randint(2**31, size=n_init + 1)
        offset = X.mean(0)
        centred = X - offset
        if known is None:
            settings = [empirical_bayes(centred, self.n_components, seed=int(seed)) for seed in seeds[1:]]
        else:
            settings = [from_labels(centred, known.argmax(1), means_of(centred, known))]
        solver = P2DVI() if self.solver is None else self.solver
        batch_size = where.rows.shape[0] if solver.full_batch else max(1, where.rows.shape[0] // 100)
        common = {"batch_size": batch_size, "max_epochs": self.max_epochs, "tol": self.tol}
        reestimated = self.estimate_noise or self.learn_weights

        def fitted_from(number: int) -> tuple[Fitted, np.ndarray]:
            labels = None if known is None else known.argmax(1)
            whitening = _whitening(centred, settings[number], self.covariance, labels)
            each = _whitened(settings[number], whitening, self.covariance)
            log_scale = float(np.linalg.slogdet(whitening)[1])
            problem = make(centred @ whitening.T, settings=each, where=where, log_scale=log_scale)
            seed = int(seeds[0]) + number  # other draws for every start: exploration forgets where it began
            start: Any = None if known is None else point_at(problem, where.shard(known))
            if n_init > 1 and not reestimated:  # one problem for all of them
                starts = [_start_of(problem, other.means @ whitening.T) for other in settings]
                start = best_of(problem, solver, starts, epochs=WARM_UP, batch_size=batch_size, seed=seed).best
            if getattr(self, "anneal_from", None) is not None:
                start = annealed(problem, solver, self.anneal_from, WARM_UP, start=start, seed=seed, **common).point
            noise = self.covariance if self.estimate_noise else None
            fitted = variational_em(
                problem,
                solver,
                noise=noise,
                weights=self.learn_weights,
                first=FIRST if known is None else SETTLE,
                start=start,
                seed=seed,
                **common,
            )
            return fitted, whitening

        # with its own noise every start must be fitted to its end: which is best does not show before
        fits = (fitted_from(number) for number in range(n_init if reestimated else 1))
        fitted, whitening = min(fits, key=lambda fit: fit[0].result.objective)
        model, result = fitted.problem.model, fitted.result
        if self.reseed:
            result = reseeded(fitted.problem, solver, result, exchange=exchange, seed=int(seeds[0]), **common)
        self._offset, self._whitening = offset, fitted.whitening @ whitening
        back = np.linalg.inv(self._whitening)
        noise = np.asarray(model.noise_variance, float)
        self._noise = noise
        self._mean, self._variance = (np.asarray(result.global_params[name], float) for name in ("mean", "log_var"))
        self._variance = np.exp(self._variance)
        self._log_weights = np.asarray(model.log_weights, float)
        self._log_scale = float(np.linalg.slogdet(self._whitening)[1])
        self.weights_ = np.exp(self._log_weights)
        self.means_ = self._mean @ back.T + offset
        self.covariances_ = back @ np.diag(noise) @ back.T if self.covariance == "tied" else noise
        self.result_ = result
        self.elbo_ = -result.objective
        self.n_iter_ = max(1, round(result.trace["epoch"].iloc[-1]))
        self.converged_ = result.converged
        self.fit_seconds_ = float(result.trace["seconds"].iloc[-1])
        self._responsibilities = np.asarray(where.unshard(result.local_params), float)

    def _check(self, n_rows: int) -> None:
        if not isinstance(self.n_components, int | np.integer) or not 1 <= self.n_components <= n_rows:
            msg = (
                f"`n_components` must be a whole number between 1 and the number of rows (n_samples={n_rows}), "
                f"got {self.n_components!r}."
            )
            raise ValueError(msg)
        if self.covariance not in COVARIANCES:
            msg = f"`covariance` must be one of {COVARIANCES}, got {self.covariance!r}."
            raise ValueError(msg)
        for name in ("n_init", "max_epochs"):
            if not isinstance(getattr(self, name), int | np.integer) or getattr(self, name) < 1:
                msg = f"`{name}` must be a whole number of at least 1, got {getattr(self, name)!r}."
                raise ValueError(msg)

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
        of the fit; see `pdvi.fit`.
    solver
        any solver of `pdvi.solvers`; by default `P2DVI()`.
    random_state
        seed of k-means, the partition and the draws.

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
        max_epochs: int = 100,
        tol: float = 1e-6,
        solver: Any = None,
        random_state: Any = None,
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

    def fit(self, X: Any, y: Any = None) -> GaussianMixture:
        """Fit to rows ``X``."""
        X = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        self._check(len(X))
        order = check_random_state(self.random_state).permutation(len(X))
        where = layout(consecutive(len(X), _n_shards(len(X))), None)
        where = Layout(np.where(where.rows >= 0, order[np.maximum(where.rows, 0)], -1))
        self._fit(X, where, gaussian_mixture_problem)
        self.labels_ = self.predict(X)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """The posterior probability of every component for every row."""
        logits = self._row_logits(self._whiten(X))
        return np.exp(logits - logsumexp(logits, axis=1, keepdims=True))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable component of every row."""
        return self.predict_proba(X).argmax(1)

    def score_samples(self, X: Any) -> np.ndarray:
        """The log density of every row under the posterior predictive mixture."""
        x = self._whiten(X)
        variance = self._noise + self._variance
        squares = ((x[:, None] - self._mean) ** 2 / variance + np.log(2 * np.pi * variance)).sum(-1)
        return logsumexp(self._log_weights - 0.5 * squares, axis=1) + self._log_scale

    def score(self, X: Any, y: Any = None) -> float:
        """The mean log density of the rows."""
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
        max_epochs: int = 100,
        tol: float = 1e-6,
        solver: Any = None,
        random_state: Any = None,
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
        X, graph, coordinates = self._checked(X, graph, coordinates)
        if isinstance(start, Start):
            first: Start | None = start
        else:
            known = None if start is None else check_probabilities(start, (len(X), self.n_components))
            first = self._of_groups(X, graph, coordinates, known, exchange)
            exchange = exchange and first is None  # the groups have done so
            if first is None and known is not None:
                first = Start(known, 0.0)
        n_patches = int(np.clip(len(X) // 32, 1, 32)) if self.n_patches is None else self.n_patches
        if coordinates is None:
            where = layout(consecutive(len(X), n_patches))
        else:
            where = layout(median_cuts(coordinates, n_patches), along_space(coordinates))
        make = partial(potts_mixture_problem, graph=graph, beta=self.beta, halo=self.halo, temperature=self.temperature)
        self._fit(X, where, make, first.probabilities if first else None, exchange)
        self.fit_seconds_ += first.seconds if first else 0.0
        self.probabilities_ = self._responsibilities
        self.labels_ = self.probabilities_.argmax(1)
        return self

    def of_groups(self, X: Any, *, graph: Any, coordinates: Any) -> Start | None:
        """What `fit` begins with: the fit to groups of rows. None for a tissue that is not so large."""
        return self._of_groups(*self._checked(X, graph, coordinates))

    def _of_groups(
        self,
        X: np.ndarray,
        graph: sp.csr_array,
        coordinates: np.ndarray | None,
        known: np.ndarray | None = None,
        exchange: bool = False,
    ) -> Start | None:
        if coordinates is None or not self.estimate_noise or len(X) <= LARGE:
            return None
        coarse = coarsened(X, graph, coordinates, GROUP)
        start = None if known is None else coarse.mean(known)
        found = clone(self).fit(
            coarse.X, graph=coarse.graph, coordinates=coarse.coordinates, start=start, exchange=exchange
        )
        return Start(found.probabilities_.astype(X.dtype)[coarse.group], found.fit_seconds_)

    def _checked(self, X: Any, graph: Any, coordinates: Any) -> tuple[np.ndarray, sp.csr_array, np.ndarray | None]:
        X = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        self._check(len(X))
        if self.n_components < 2:
            msg = f"`n_components` must be at least 2, got {self.n_components!r}."
            raise ValueError(msg)
        if not (np.isfinite(self.beta) and self.beta >= 0):
            msg = f"`beta` must be at least 0 and finite, got {self.beta!r}."
            raise ValueError(msg)
        if not (np.isfinite(self.temperature) and self.temperature > 0):
            msg = f"`temperature` must be positive and finite, got {self.temperature!r}."
            raise ValueError(msg)
        if self.anneal_from is not None and not self.anneal_from > self.temperature:
            msg = f"`anneal_from` must be above `temperature` ({self.temperature!r}), got {self.anneal_from!r}."
            raise ValueError(msg)
        graph = check_graph(graph, len(X))
        return X, graph, None if coordinates is None else check_coordinates(coordinates, len(X))


def check_graph(graph: Any, n_rows: int) -> sp.csr_array:
    """A symmetric sparse matrix of non-negative, finite weights without self-loops."""
    graph = sp.csr_array(graph, dtype=np.float64, copy=True)
    if graph.shape != (n_rows, n_rows):
        msg = f"`graph` must have a row and a column for each of the {n_rows} rows of X, got shape {graph.shape}."
        raise ValueError(msg)
    if not np.isfinite(graph.data).all() or (graph.data < 0).any():
        bad = float(graph.data[~(graph.data >= 0) | ~np.isfinite(graph.data)][0])
        msg = f"`graph` must have finite weights of at least 0, got {bad!r}."
        raise ValueError(msg)
    graph.setdiag(0)
    graph.eliminate_zeros()
    if abs(graph - graph.T).max() > 1e-6 * max(graph.max(), 1e-300):
        warnings.warn("`graph` is not symmetric; the weights of both directions are averaged.", stacklevel=3)
        graph = sp.csr_array((graph + graph.T) * 0.5)
    return graph


def check_coordinates(coordinates: Any, n_rows: int) -> np.ndarray:
    """A finite matrix with one row per row of X."""
    coordinates = np.asarray(coordinates, float)
    if coordinates.ndim != 2 or len(coordinates) != n_rows:
        msg = f"`coordinates` must have one row for each of the {n_rows} rows of X, got shape {coordinates.shape}."
        raise ValueError(msg)
    if not np.isfinite(coordinates).all():
        bad = int((~np.isfinite(coordinates).all(1)).sum())
        msg = f"`coordinates` must be finite: {bad} of {n_rows} rows are not; remove these spots."
        raise ValueError(msg)
    return coordinates


def check_probabilities(start: Any, shape: tuple[int, int]) -> np.ndarray:
    """One row of probabilities for each row of X."""
    start = np.asarray(start, np.result_type(jnp.result_type(float)))
    if start.shape != shape or not (start >= 0).all() or not np.allclose(start.sum(1), 1, atol=1e-3):
        msg = f"`start` must have rows of {shape[1]} probabilities for {shape[0]} rows of X, got shape {start.shape}"
        msg += "." if start.shape != shape else ", whose rows do not all add up to 1; divide each by its sum."
        raise ValueError(msg)
    return start


def _n_shards(n_rows: int) -> int:
    return int(np.clip(n_rows // ROWS_PER_SHARD, 1, 100))


def _whitening(
    X: np.ndarray, settings: EmpiricalBayes, covariance: str, labels: np.ndarray | None = None
) -> np.ndarray:
    """The matrix after which the noise within k-means clusters (or labels) is white; the identity if diagonal."""
    if covariance == "diagonal":
        return np.eye(X.shape[1])
    every = max(1, len(X) // 20_000)
    sample = X[::every]
    if labels is None:
        labels = ((sample**2).sum(1)[:, None] - 2 * sample @ settings.means.T + (settings.means**2).sum(1)).argmin(1)
    else:
        labels = labels[::every]
    residual = np.asarray(sample - settings.means[labels], float)
    scatter = residual.T @ residual / len(sample)
    scatter += 1e-6 * max(np.trace(scatter) / len(scatter), 1e-12) * np.eye(len(scatter))
    return np.linalg.inv(np.linalg.cholesky(scatter))


def _whitened(settings: EmpiricalBayes, whitening: np.ndarray, covariance: str) -> EmpiricalBayes:
    if covariance == "diagonal":
        return settings
    means = settings.means @ whitening.T
    between = means.var(0) if len(means) > 1 else np.ones(means.shape[1])
    floor = 1e-6 * max(float(between.mean()), 1e-12)
    return EmpiricalBayes(
        means, whitening @ settings.prior_mean, np.maximum(between, floor), np.ones_like(settings.noise_variance)
    )


def _start_of(problem: Problem, means: np.ndarray) -> dict[str, Any]:
    return {**problem.model.init_global(None), "mean": means}
