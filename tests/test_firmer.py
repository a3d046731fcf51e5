"""Batches in the order of the data: the penalty becomes firmer, and the run ends where memoized VB does."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

import pdvi
from models_for_tests import algorithm_1, begun
from pdvi.solvers import Firmer

pytestmark = pytest.mark.slow


@cache
def mixture(seed=0, n=10_000):
    data = pdvi.datasets.mixture(n, batch_size=n // 100, bias=0.95, seed=seed)
    own = [np.bincount(data.labels[data.batch == b], minlength=5).argmax() for b in range(100)]
    return data.problem(seed=seed), pdvi.sampling.Fixed(tuple(int(b) for b in np.argsort(own, kind="stable")))


@pytest.mark.parametrize("seed", [0, 1])
def test_sorted_batches_end_where_memoized_vb_ends(seed):
    problem, by_component = mixture(seed)
    rival = pdvi.fit(problem, pdvi.MemoizedVB(), max_epochs=40, tol=0, seed=seed, sampling=by_component)
    result = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=40, seed=seed, sampling=by_component)
    assert result.converged
    assert result.objective == pytest.approx(rival.objective, rel=1e-5)
    assert result.trace["event"].str.contains("begun again with a firmer penalty").any()
    held = pdvi.fit(problem, pdvi.P2DVI(eta=usual(problem)), max_epochs=40, seed=seed, sampling=by_component)
    assert held.objective > 1.005 * rival.objective  # the usual penalty, held to, loses components


def usual(problem):
    """The step sizes that a run begins with."""
    return problem.unravel(1 / algorithm_1(begun(problem, pdvi.P2DVI()).state.server).penalty)


def test_in_random_order_nothing_changes():
    """The same numbers as with these step sizes held to."""
    problem, _ = mixture()
    one = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=6, tol=0)
    two = pdvi.fit(problem, pdvi.P2DVI(eta=usual(problem)), max_epochs=6, tol=0)
    assert (one.trace["event"] == "").all()
    np.testing.assert_allclose(one.trace["objective"], two.trace["objective"], rtol=1e-6)


def test_it_is_resumed_to_the_same_bits(tmp_path):
    problem, by_component = mixture()
    path = tmp_path / "run.zarr"
    settings = {"tol": 0, "sampling": by_component}
    pdvi.fit(problem, pdvi.P2DVI(), max_epochs=3, checkpoint=path, **settings)
    resumed = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=6, start=path, **settings)
    whole = pdvi.fit(problem, pdvi.P2DVI(), max_epochs=6, **settings)
    assert whole.trace["event"].str.contains("begun again").any()
    for name, array in whole.state.items():
        np.testing.assert_array_equal(resumed.state[name], array)
    np.testing.assert_array_equal(resumed.trace["objective"], whole.trace["objective"])


def test_a_rise_makes_it_firmer_and_early_ones_begin_again():
    problem, _ = mixture()
    run = begun(problem, pdvi.P2DVI())
    solver, server = run.solver, run.state.server
    assert isinstance(solver, Firmer)
    server = server._replace(judged=jnp.asarray(100.0))
    for epoch, again in ((3, True), (20, False)):
        rose = solver.heard(server, epoch, 101.0)
        np.testing.assert_allclose(rose.inner.penalty, 3 * np.asarray(server.inner.penalty), rtol=1e-6)
        assert bool(rose.again) is again
    fell = solver.heard(server, 3, 99.0)
    np.testing.assert_array_equal(fell.inner.penalty, server.inner.penalty)
    assert not fell.again
    assert solver.heard(server, 3.5, 101.0) is server  # judged after whole epochs
