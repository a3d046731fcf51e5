"""What P2D-VI does where nothing is said: one row of a table, which it explains."""

import numpy as np
import pytest

import pdvi
from models_for_tests import Regression, begun, regression_shards, tissue_problem
from pdvi.core.result import Point
from pdvi.run.running import Run
from pdvi.solvers import AdaptivePenalty, Explored
from pdvi.solvers.primal_dual.behavior import TABLE


def regression():
    return pdvi.Problem(Regression(), regression_shards(np.random.default_rng(0), [10] * 6))


def mixture():
    return pdvi.datasets.mixture(200, dim=2, n_components=3, batch_size=20).problem()


CASES = {
    "asked to explore": (
        lambda: tissue_problem(160, 4),
        pdvi.P2DVI(exploration=2),
        "SVI warm-up",
        "`exploration` asks",
    ),
    "eta": (mixture, pdvi.P2DVI(eta=0.1), "a constant penalty, 1 / eta", "`eta` is given"),
    "many patches": (lambda: tissue_problem(320, 16), pdvi.P2DVI(), "SVI warm-up", "coupled across shards"),
    "few patches": (lambda: tissue_problem(160, 4), pdvi.P2DVI(), "consensus initialization", "in closed form from"),
    "mixture": (mixture, pdvi.P2DVI(), "consensus initialization, adaptive diagonal penalty", "in closed form from"),
    "quadratic": (lambda: pdvi.datasets.quadratic(n=12), pdvi.P2DVI(), "a constant diagonal penalty", "in closed form"),
    "a user's model": (regression, pdvi.P2DVI(), "Newton initialization", "no closed forms"),
    "an oracle": (
        regression,
        pdvi.P2DVI(oracle=pdvi.solvers.primal_dual.oracles.CoordinateDescent()),
        "adaptive penalty, locals and globals in turn",
        "no closed form",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_explains_what_it_does(name):
    make, solver, behavior, reason = CASES[name]
    text = solver.explain(make())
    assert text.startswith(behavior)
    assert reason in text.split(": ", 1)[1]


def test_every_row_of_the_table_is_met():
    met = {solver.explain(make()) for make, solver, _, _ in CASES.values()}
    met.add(pdvi.P2DVI().explain(mixture(), warm=True))
    assert met == {f"{row.behavior}: {row.reason}" for row in TABLE}


def test_what_is_explained_is_done():
    kinds = {
        name: type(begun(make(), solver).solver) for name, (make, solver, _, _) in CASES.items() if name != "an oracle"
    }
    assert kinds == {
        "asked to explore": Explored,
        "eta": pdvi.P2DVI,
        "many patches": Explored,
        "few patches": AdaptivePenalty,
        "mixture": AdaptivePenalty,
        "quadratic": pdvi.P2DVI,
        "a user's model": AdaptivePenalty,
    }


def test_the_scale_is_a_half_in_consensus_and_what_the_user_says():
    tissue = tissue_problem(160, 4)
    assert begun(tissue, pdvi.P2DVI()).solver.solver.scale == 0.5
    assert begun(tissue, pdvi.P2DVI(scale=0.2)).solver.solver.scale == 0.2


def test_given_local_variables_are_not_explored_away():
    tissue = tissue_problem(320, 16, poor=True)
    first = pdvi.fit(tissue, pdvi.P2DVI(), max_epochs=8, tol=0, batch_size=1)
    run = Run(tissue, pdvi.P2DVI(), start=first.point, batch_size=1)
    assert run.solver.initialization == "consensus"
    run.next_segment()
    np.testing.assert_array_equal(run.state.local, first.local_params)
    assert "SVI" not in pdvi.P2DVI().explain(tissue, 1, warm=True)


def test_a_run_from_given_local_variables_is_resumed_as_one():
    """A run from the model's own start would explore: the result remembers that this one did not."""
    tissue = tissue_problem(320, 16, poor=True)
    point = pdvi.fit(tissue, pdvi.P2DVI(), max_epochs=6, tol=0, batch_size=1).point
    settings = {"batch_size": 1, "tol": 0}
    half = pdvi.fit(tissue, pdvi.P2DVI(), start=point, max_epochs=2, **settings)
    resumed = pdvi.fit(tissue, pdvi.P2DVI(), start=half, max_epochs=4, **settings)
    whole = pdvi.fit(tissue, pdvi.P2DVI(), start=point, max_epochs=4, **settings)
    np.testing.assert_array_equal(resumed.trace["objective"], whole.trace["objective"])
    for name, array in whole.state.items():
        np.testing.assert_array_equal(resumed.state[name], array)


class InterruptedInWarmup(pdvi.Memory):
    """Interrupted when the first steps of the warm-up are made."""

    def run_to_stop(self, solver, *arguments):
        if solver.is_warmup:
            raise KeyboardInterrupt
        return super().run_to_stop(solver, *arguments)


def test_a_run_interrupted_as_the_warmup_starts_goes_on_to_the_same_bits():
    tissue, settings = tissue_problem(320, 16, poor=True), {"batch_size": 1, "tol": 0, "max_epochs": 7}
    each = {"callbacks": [lambda progress: None]}
    ended = pdvi.fit(tissue, pdvi.P2DVI(), executor=InterruptedInWarmup(), **each, **settings)
    assert ended.status is pdvi.Status.INTERRUPTED
    assert ended.trace["epoch"].tolist() == [0, 1, 2]
    assert not ended.trace["event"].any()
    resumed, whole = (pdvi.fit(tissue, pdvi.P2DVI(), **start, **settings) for start in ({"start": ended}, {}))
    np.testing.assert_array_equal(resumed.trace["objective"], whole.trace["objective"])
    assert resumed.trace["event"].tolist()[3:6] == 3 * ["exploring"]


def test_local_variables_alone_are_a_start():
    tissue = tissue_problem(160, 4)
    local = pdvi.fit(tissue, pdvi.CAVI(), max_epochs=3, tol=0).local_params
    run = Run(tissue, pdvi.P2DVI(), start=Point({}, local), batch_size=1)
    run.next_segment()
    np.testing.assert_array_equal(run.state.local, local)
    slopes = tissue.evaluate(run.state.lam, run.state.local)[1]
    assert np.abs(slopes).max() < 1e-2  # the best globals for them
