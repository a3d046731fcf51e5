"""Factor analysis and probabilistic PCA: `FactorAnalysisModel` with the face of scikit-learn's FactorAnalysis."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.extmath import randomized_svd
from sklearn.utils.validation import check_is_fitted, validate_data

from pdvi._base.checks import one_of, whole
from pdvi.core.problem import Problem
from pdvi.estimators.fitting import ProblemEstimator
from pdvi.models.factor_analysis import LEAST_NOISE, FactorAnalysisModel
from pdvi.shards.grouping import shards_for
from pdvi.shards.partition import consecutive, layout

NOISES = ("diagonal", "isotropic")
SHARDS = 20  # at most: the regression of every column is solved at each visit, which costs as much as some hundred rows
ROWS = 25  # in a shard at least
LEAST_START = 0.05  # of a column's variance is noise at the start: a column that began without any would stay so


class Units(NamedTuple):
    """How rows were brought to mean 0 and size 1: (x - centre) / scale."""

    centre: np.ndarray
    scale: np.ndarray


def factor_problem(
    X: Any, n_components: int, *, noise: str = "diagonal", n_shards: int | None = None, seed: int = 0
) -> tuple[Problem, Units]:
    """Return the problem of finding the factors of rows, for `pdvi.fit`, and the units of its globals.

    Parameters
    ----------
    X
        rows (n, d) in any units. Objective and globals are those of rows of mean 0 and size 1, whatever the units.
    noise
        "diagonal": a variance for each column; "isotropic": one for all, whose size is then relative to all columns.
    n_shards
        by default at most 20, with at least 25 rows each. A shard has consecutive rows.
    seed
        of the randomised singular value decomposition that the start is made of.
    """
    X = np.asarray(X, float)
    one_of("noise", noise, NOISES)
    whole("n_components", n_components, least=1, most=X.shape[1], of="the number of columns")
    centre, spread = X.mean(0), X.std(0)
    if noise == "isotropic":  # the same noise in all columns: so must be their unit
        spread = np.full_like(spread, np.sqrt(np.mean(spread**2)))
    tiny = 1e-12 * np.maximum(np.abs(centre), np.finfo(float).tiny)
    units = Units(centre, np.where(spread > tiny, spread, 1.0))
    scaled = (X - units.centre) / units.scale
    W, variance = _start(scaled, n_components, noise, seed)
    model = FactorAnalysisModel(
        loading=jax.device_put(W),
        mean=jax.device_put(np.zeros(X.shape[1])),
        log_precision=jax.device_put(-np.log(variance)),
    )
    if n_shards is None:
        n_shards = shards_for(len(X), W.size + X.shape[1] + len(variance), most=SHARDS, least_rows=ROWS)
    where = layout(consecutive(len(X), n_shards))
    mask = where.mask.astype(float)
    return Problem(model, {"x": where.shard(scaled) * mask[..., None], "mask": mask}), units


def _start(X: np.ndarray, k: int, noise: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilistic PCA in closed form (Tipping, Bishop 1999): W, and the variance of the noise."""
    _, singular, axes = randomized_svd(X, k, random_state=seed)
    along, everything = singular**2 / len(X), (X**2).mean(0)
    rest = max((everything.sum() - along.sum()) / max(X.shape[1] - k, 1), LEAST_NOISE)
    W = axes.T * np.sqrt(np.maximum(along - rest, LEAST_START * along))
    if noise == "isotropic":
        return W, np.array([rest])
    return W, np.maximum(everything - (W**2).sum(1), LEAST_START)


@dataclass(eq=False, repr=False)
class FactorAnalysis(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ProblemEstimator):
    """Factor analysis, or probabilistic PCA, by P2D-VI: rows may come in any order.

    The ELBO is the log-likelihood, since the factors' posterior is found exactly. Units of the columns do not matter
    with diagonal noise. A noise variance is at least 1e-4 of the variance of its column (of all, if isotropic): without
    a least, the likelihood of a column that is constant or given twice has no maximum.

    Parameters
    ----------
    n_components
        number of factors.
    noise
        "diagonal": every column has noise of its own (factor analysis); "isotropic": all have the same
        (probabilistic PCA).
    max_epochs, tol
        of the fit, see `pdvi.fit`. A fit that ends before it has converged warns
        (`sklearn.exceptions.ConvergenceWarning`).
    solver
        any solver of `pdvi.solvers`, or its name; by default `P2DVI()`.
    n_shards
        into how many shards rows are grouped; by default as `pdvi.estimators.factor_problem` does.
    verbose
        print the course of the fit.
    random_state
        seed of the start and the draws.

    Attributes
    ----------
    components_ (n_components, columns): W', rotated so that W' noise^-1 W is diagonal, the largest first; ``mean_``,
    noise_variance_ (one for each column; a number if isotropic), elbo_, n_iter_ (epochs), converged_, result_,
    fit_seconds_
    """

    n_components: int = 2
    _: KW_ONLY
    noise: str = "diagonal"

    def fit(self, X: Any, y: Any = None) -> FactorAnalysis:
        """Find the factors of rows (n, columns)."""
        whole("n_components", self.n_components, least=1)
        X = validate_data(self, X, dtype=np.float64, ensure_min_samples=2)
        seed = self._seed()
        problem, units = factor_problem(X, self.n_components, noise=self.noise, n_shards=self.n_shards, seed=seed)
        result = self._fit_problem(problem, seed)
        self.elbo_ -= len(X) * float(np.log(units.scale).sum())
        found = {name: np.asarray(value, float) for name, value in result.global_params.items()}
        variance = np.exp(-found["log_precision"])
        self.components_ = (_canonical(found["loading"], variance) * units.scale[:, None]).T
        self.mean_ = units.centre + units.scale * found["mean"]
        if self.noise == "isotropic":
            self.noise_variance_ = float(variance[0] * units.scale[0] ** 2)
        else:
            self.noise_variance_ = variance * units.scale**2
        self._n_features_out = self.n_components
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Return the expected factors of rows."""
        return self._look(X)[0]

    def score_samples(self, X: Any) -> np.ndarray:
        """Return the log-likelihood of every row."""
        return self._look(X)[1]

    def score(self, X: Any, y: Any = None) -> float:
        """Return the mean log-likelihood of rows, as scikit-learn does."""
        return float(self.score_samples(X).mean())

    def get_covariance(self) -> np.ndarray:
        """Return the covariance of the columns that the model says."""
        check_is_fitted(self)
        return self.components_.T @ self.components_ + np.diag(self._variance())

    def get_precision(self) -> np.ndarray:
        """Return its inverse."""
        check_is_fitted(self)
        variance = self._variance()
        inner = _inner(self.components_, variance)
        scaled = self.components_ / variance
        return np.diag(1 / variance) - scaled.T @ np.linalg.solve(inner, scaled)

    def _variance(self) -> np.ndarray:
        return np.broadcast_to(self.noise_variance_, self.mean_.shape)

    def _look(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Expected factors and log-likelihood of rows: all matrices that are inverted have the size of the factors."""
        check_is_fitted(self)
        centred = validate_data(self, X, dtype=np.float64, reset=False) - self.mean_
        variance = self._variance()
        inner = _inner(self.components_, variance)
        along = (centred / variance) @ self.components_.T
        factors = np.linalg.solve(inner, along.T).T
        log_det = np.log(variance).sum() + np.linalg.slogdet(inner)[1]
        squares = (centred**2 / variance).sum(1) - (along * factors).sum(1)
        return factors, -0.5 * (squares + log_det + len(variance) * np.log(2 * np.pi))


def _inner(components: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """The precision of a row's factors."""
    return np.eye(len(components)) + (components / variance) @ components.T


def _canonical(W: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """The rotation of factors, which the likelihood does not know, that makes W' noise^-1 W diagonal; and the signs."""
    W = W @ np.linalg.svd(W / np.sqrt(variance)[:, None], full_matrices=False)[2].T
    return W * np.where(W[np.abs(W).argmax(0), np.arange(W.shape[1])] < 0, -1.0, 1.0)
