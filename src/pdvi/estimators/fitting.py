"""What the estimators share: a fit, and what it leaves behind."""

from __future__ import annotations

import time
import warnings
from typing import Any

from sklearn.exceptions import ConvergenceWarning

from pdvi.core.problem import Problem
from pdvi.core.result import Result
from pdvi.run.fit import fit
from pdvi.solvers import P2DVI


def fitted(estimator: Any, problem: Problem, seed: int, *, usual: Any = None) -> Result:
    """Return the fit of a problem, with the settings that all estimators have; ``usual`` is the solver unless told.

    The estimator gets the attributes that all of them have, and warns if it has not converged.
    """
    began = time.perf_counter()
    solver = estimator.solver if estimator.solver is not None else usual or P2DVI()
    limits = {"max_epochs": estimator.max_epochs, "tol": estimator.tol}
    result = fit(problem, solver, seed=seed, progress=False, **limits)
    estimator.result_ = result
    estimator.elbo_ = -result.objective
    estimator.converged_ = result.converged
    estimator.n_iter_ = max(1, round(float(result.trace["epoch"].iloc[-1])))
    estimator.fit_seconds_ = time.perf_counter() - began
    if estimator.verbose:
        print(result.trace[["epoch", "objective", "event"]].to_string(index=False))
    if not result.converged:
        who = type(estimator).__name__
        words = f"{who} did not converge in {estimator.n_iter_} epochs: {result.status}."
        warnings.warn(words, ConvergenceWarning, stacklevel=3)
    return result
