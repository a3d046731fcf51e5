"""What users of scikit-learn's mixtures expect besides fit and predict: information criteria, draws, precisions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from pdvi._base.checks import whole
from pdvi.mixtures.density import Density


class Likelihood(ABC):
    """A mixture with a density: what follows from it. Subclasses keep ``_density`` and ``_structure``."""

    _density: Density
    _structure: str

    @abstractmethod
    def score_samples(self, X: Any) -> np.ndarray:
        """Return the log density of every row."""

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
        rng = check_random_state(self.random_state)  # type: ignore[attr-defined]
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
