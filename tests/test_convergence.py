"""The rates the paper promises, on the problems it has them for."""

from functools import cache

import numpy as np
import pytest

import pdvi
from pdvi.solvers.primal_dual.oracles import CoordinateDescent

GRID = [c / 2 for c in (0.1, 0.3, 1, 3, 10, 30, 100)]


@cache
def quadratic():
    """The paper's: 10,000 shards, condition number 1,000, the optimum 0 at the origin."""
    return pdvi.datasets.quadratic()


def fit(solver, max_epochs=60):
    return pdvi.fit(quadratic(), solver, batch_size=100, max_epochs=max_epochs, tol=0)


def epochs_to(trace, accuracy):
    """Epochs until the objective is below ``accuracy`` times the start's; infinite if it never is."""
    there = trace["epoch"][trace["objective"] < accuracy * trace["objective"][0]]
    return there.min() if len(there) else np.inf


def line(x, y):
    """Slope and R^2 of a straight line through the points."""
    slope, level = np.polyfit(x, y, 1)
    return slope, 1 - np.var(y - slope * x - level) / np.var(y)


def test_p2dvi_converges_linearly_on_the_papers_quadratic(x64):
    trace = fit(pdvi.P2DVI(), max_epochs=30).trace
    assert epochs_to(trace, 1e-12) <= 30
    decades = np.log10(trace["objective"])
    slope, r2 = line(trace["step"], decades)
    assert slope < 0
    assert r2 > 0.97
    assert decades.iloc[0] - decades.iloc[-1] > 6


@pytest.mark.slow
def test_p2dvi_needs_half_the_epochs_of_the_best_single_eta(x64):
    automatic = epochs_to(fit(pdvi.P2DVI(), max_epochs=30).trace, 1e-12)
    best = min(epochs_to(fit(pdvi.PDVI(eta=eta)).trace, 1e-12) for eta in GRID)
    assert np.isfinite(best)
    assert automatic <= best / 2


def test_automatic_pdvi_is_slow_but_safe(x64):
    """One number for all coordinates, chosen for the stiff ones: never up, and on its way."""
    trace = fit(pdvi.PDVI()).trace
    assert (trace["event"] == "").all()
    assert epochs_to(trace, 1e-4) <= 60


def test_a_convex_problem_converges_like_one_over_t_but_not_linearly(x64):
    """Fitted over each doubling of T: a linear rate would steepen without end on these axes."""
    result = pdvi.fit(pdvi.datasets.quartic(), pdvi.P2DVI(), batch_size=10, max_epochs=400, tol=0)
    epoch, objective = result.trace["epoch"].to_numpy(), result.trace["objective"].to_numpy()
    slopes = [line(np.log(epoch[t : 2 * t]), np.log(objective[t : 2 * t]))[0] for t in (50, 100, 200)]
    assert max(slopes) <= -1
    assert slopes[-1] > 1.5 * slopes[0]


def test_a_nonconvex_problems_mean_squared_gradient_falls_like_one_over_t(x64):
    tanh = pdvi.datasets.tanh_regression()
    # as in the paper: a diagonal, and from the model's own start
    diagonal = pdvi.P2DVI(scale=0.3, preconditioner="diagonal", oracle=CoordinateDescent())
    trace = pdvi.fit(tanh, diagonal, batch_size=10, max_epochs=150, tol=0).trace
    assert (trace["event"] == "").all()
    counts = np.arange(1, len(trace) + 1)
    running = np.cumsum(trace["grad_norm"] ** 2) / counts
    assert line(np.log(counts[20:]), np.log(running[20:]))[0] <= -0.9
