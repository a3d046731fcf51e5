"""What the estimators share: the settings of a fit, the fit, and what it leaves behind."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_non_negative, validate_data

from pdvi._base.checks import at_least
from pdvi.core.problem import Problem
from pdvi.core.result import Result
from pdvi.run.fit import fit
from pdvi.solvers import P2DVI


@dataclass(eq=False, repr=False, kw_only=True)
class ProblemEstimator(BaseEstimator):
    """An estimator that fits one problem. Fields are scikit-learn's parameters: their `__init__` is generated."""

    max_epochs: int = 200
    tol: float = 1e-7
    solver: Any = None
    n_shards: int | None = None
    verbose: int = 0
    random_state: Any = None

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _fit_problem(self, problem: Problem, seed: int, *, default: Any = None) -> Result:
        """Return the fit of a problem, by the solver ``default`` if none is set, and set what all estimators have."""
        at_least("tol", self.tol)
        start = time.perf_counter()
        solver = self.solver if self.solver is not None else default or P2DVI()
        result = fit(problem, solver, seed=seed, progress=False, max_epochs=self.max_epochs, tol=self.tol)
        self.result_ = result
        self.elbo_ = -result.objective
        self.converged_ = result.converged
        self.n_iter_ = max(1, round(float(result.trace["epoch"].iloc[-1])))
        self.fit_seconds_ = time.perf_counter() - start
        if self.verbose:
            print(result.trace[["epoch", "objective", "event"]].to_string(index=False))
        if not result.converged:
            words = f"{type(self).__name__} did not converge in {self.n_iter_} epochs: {result.status}."
            warnings.warn(words, ConvergenceWarning, stacklevel=3)
        return result


class CountEstimator(ProblemEstimator):
    """An estimator of counts, sparse or dense."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.input_tags.sparse = True
        return tags

    def _validated(self, X: Any, *, reset: bool) -> sp.csr_matrix:
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=reset)
        check_non_negative(X, type(self).__name__)
        X = sp.csr_matrix(X, copy=True)
        X.sum_duplicates()
        X.eliminate_zeros()
        return X
