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


def fitted(
    estimator: Any,
    problem: Problem,
    *,
    solver: Any,
    max_epochs: float,
    tol: float,
    seed: int,
    verbose: int,
    **more: Any,
) -> Result:
    """Return the fit of a problem; the estimator gets the attributes that all of them have, and warns if it must."""
    began = time.perf_counter()
    solver = P2DVI() if solver is None else solver
    result = fit(problem, solver, max_epochs=max_epochs, tol=tol, seed=seed, progress=False, **more)
    estimator.result_ = result
    estimator.elbo_ = -result.objective
    estimator.converged_ = result.converged
    estimator.n_iter_ = max(1, round(float(result.trace["epoch"].iloc[-1])))
    estimator.fit_seconds_ = time.perf_counter() - began
    if verbose:
        print(result.trace[["epoch", "objective", "event"]].to_string(index=False))
    if not result.converged:
        who = type(estimator).__name__
        words = f"{who} did not converge in {estimator.n_iter_} epochs: {result.status}."
        warnings.warn(words, ConvergenceWarning, stacklevel=3)
    return result
