"""However a run is made (a fit, a given start, a trial of tuning, another place), the same numbers come out."""

import runpy
from pathlib import Path

import numpy as np
import pytest

import pdvi
from models_for_tests import largest_difference, tissue_problem

SKELETON = runpy.run_path(str(Path(__file__).parents[2] / "docs/skeletons/executor.py"))
SETTINGS = {"batch_size": 1, "seed": 0}


@pytest.fixture
def tissue(x64):
    """In double precision: data in single precision would be rounded elsewhere by every other program."""
    return tissue_problem(800, 16, poor=True)


@pytest.mark.slow
@pytest.mark.parametrize("solver", [pdvi.P2DVI(exploration=2), pdvi.P2DVI(scale=0.3, exploration=0), pdvi.MemoizedVB()])
def test_a_fit_a_given_start_and_a_trial_are_one_run(tissue, solver):
    """Six epochs, with segments in between, from the model's own start."""
    alone = pdvi.fit(tissue, solver, max_epochs=6, tol=0, **SETTINGS)
    started = pdvi.fit(tissue, solver, max_epochs=6, tol=0, start=tissue.model.init_global(None), **SETTINGS)
    np.testing.assert_allclose(started.trace["objective"], alone.trace["objective"], rtol=1e-12)
    if isinstance(solver, pdvi.P2DVI):
        space = {"scale": [0.3]}
        tuned = [
            pdvi.tune(tissue, solver, space, trials=1, max_epochs=6, vectorise=vectorise, **SETTINGS).objective
            for vectorise in (True, False)
        ]
        np.testing.assert_allclose(tuned, alone.objective, rtol=1e-12)


@pytest.mark.parametrize(
    "solver", [pdvi.P2DVI(), pdvi.SVI(), pdvi.ControlVariates(rate=1e-5)], ids=lambda solver: type(solver).__name__
)
def test_an_executor_to_copy_gives_the_numbers_of_memory(x64, solver):
    problem = tissue_problem(160, 4)
    settings = {"batch_size": 2, "max_epochs": 3, "tol": 0}
    memory = pdvi.fit(problem, solver, **settings)
    copied = pdvi.fit(problem, solver, executor=SKELETON["OneByOne"](), **settings)
    np.testing.assert_allclose(copied.trace["objective"], memory.trace["objective"], rtol=1e-10)
    assert largest_difference(memory, copied) < 1e-9


def test_a_start_with_known_locals_at_an_executor_to_copy(x64):
    problem = pdvi.datasets.quadratic(n=8, condition=20, linear=0.3)
    best = pdvi.fit(problem, pdvi.CAVI(), max_epochs=500, tol=0, grad_tol=1e-13, log_every=100)
    stays = pdvi.fit(
        problem, pdvi.P2DVI(), start=best.point, executor=SKELETON["OneByOne"](), max_epochs=1, tol=0, batch_size=2
    )
    np.testing.assert_allclose(stays.trace["objective"], best.objective, rtol=1e-9)
