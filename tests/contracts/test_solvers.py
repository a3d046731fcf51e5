"""What every solver owes, on every model it can serve. Listing a solver in `pdvi.solvers.SOLVERS` puts it here."""

import runpy
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

import pdvi
from pdvi import graphs
from pdvi.mixtures import empirical_bayes, potts_mixture_problem
from pdvi.shards.partition import along_space, layout, median_cuts
from pdvi.solvers import SOLVERS as LISTED

SKELETON = runpy.run_path(str(Path(__file__).parents[2] / "docs/skeletons/solver.py"))
SOLVERS = {**LISTED, "Descent": SKELETON["Descent"]()}  # what the documents offer to be copied, too
BATCH = 3
STEPWISE = 0.25  # epochs per log point: one step, so that one compiled function serves all tests of a case


def potts_problem():
    tissue = pdvi.datasets.tissue_features(400, n_features=4, n_domains=3, noise=1.0, patchiness=5, seed=1)
    X = tissue.X.astype(float)
    graph = graphs.weights(graphs.nearest(tissue.coordinates, 6), X)
    where = layout(median_cuts(tissue.coordinates, 7), along_space(tissue.coordinates))
    return potts_mixture_problem(X, graph, empirical_bayes(X, 3), where, beta=0.5)


PROBLEMS = {
    "quadratic": lambda: pdvi.datasets.quadratic(n=12, condition=20, heterogeneity=0.8, linear=0.3),
    "gaussian mixture": lambda: pdvi.datasets.mixture(
        245, dim=2, n_components=3, batch_size=24, separation=2.0, seed=1
    ).problem(),
    "potts mixture": potts_problem,
}
UNSERVED = {  # solver, model: what the model lacks
    ("SVI", "quadratic"): "'natural', 'from_natural'",
    ("PGSVI", "quadratic"): "'natural', 'from_natural'",
    ("SNGVI", "quadratic"): "'natural', 'from_natural', 'natural_gradient'",
}
CASES = [(solver, model) for model in PROBLEMS for solver in SOLVERS if (solver, model) not in UNSERVED]
WITHOUT_NOISE = {"PDVI", "P2DVI", "CAVI", "MemoizedVB", "ControlVariates"}  # a stationary point stays put


@cache  # one problem object per model, so that steps compile once
def problem_of(model):
    return PROBLEMS[model]()


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}".replace(" ", "_"), scope="module")
def case(request):
    """Of module scope, so that the tests of a case come one after the other and share its compilation."""
    return request.param


def fit(case, **settings):
    name, model = case
    size = None if SOLVERS[name].full_batch else BATCH
    settings = {"batch_size": size, "max_epochs": 2, "tol": 0, "log_every": STEPWISE, **settings}
    if size is None and "max_epochs" in settings:
        settings["max_epochs"] *= 4  # a step is an epoch
    return pdvi.fit(problem_of(model), SOLVERS[name], **settings)


def watched(case, **settings):
    """The result and the states at all log points."""
    states = []
    result = fit(case, callbacks=[lambda progress: states.append(progress.state)], **settings)
    return result, states


@cache
def stationary(model):
    """A result at a stationary point, by coordinate ascent until nothing moves."""
    return pdvi.fit(problem_of(model), pdvi.CAVI(), max_epochs=2000, tol=0, grad_tol=1e-13, log_every=100)


def assert_same_bits(one, two):
    for a, b in zip(jax.tree.leaves(contents(one)), jax.tree.leaves(contents(two)), strict=True):
        np.testing.assert_array_equal(a, b)


def contents(result):
    trace = result.trace.drop(columns="seconds").to_dict("list")
    return result.n_steps, result.global_params, result.local_params, result.state, trace


def test_every_solver_is_listed():
    wrappers = {"AdaptivePenalty", "Explored"}
    classes = [getattr(pdvi.solvers, name) for name in pdvi.solvers.__all__ if name not in {"SOLVERS", *wrappers}]
    assert {name: type(solver) for name, solver in LISTED.items()} == {one.__name__: one for one in classes}


@pytest.mark.parametrize(("case", "lacking"), UNSERVED.items(), ids=lambda value: str(value).replace(" ", ""))
def test_a_solver_says_what_the_model_lacks(case, lacking):
    with pytest.raises(ValueError, match=f"{case[0]} needs a model with .*; Quadratic lacks {lacking}"):
        fit(case)


def test_it_begins_at_the_given_start(x64, case):
    problem = problem_of(case[1])
    rng = np.random.default_rng(0)
    lam, local = problem.init(jax.random.key(3))
    start = {name: np.asarray(value) + 0.1 * rng.random() for name, value in problem.unravel(lam).items()}
    result, states = watched(case, start=start, seed=3, max_epochs=0.25)
    np.testing.assert_array_equal(states[0].lam, problem.ravel(start))
    np.testing.assert_array_equal(states[0].local, local)
    expected = problem.evaluate(problem.ravel(start), local)[0].sum()
    assert result.trace["objective"][0] == pytest.approx(float(expected), rel=1e-12)


def test_the_trace_has_the_agreed_columns(x64, case):
    trace = fit(case).trace
    blocks = [f"grad_norm_{name}" for name, _ in problem_of(case[1]).blocks]
    agreed = ["step", "epoch", "seconds", "objective", "grad_norm", *blocks]
    assert list(trace)[: len(agreed)] == agreed
    assert list(trace)[-1] == "event"
    assert trace["step"].tolist() == list(range(len(trace)))
    assert np.isfinite(trace.drop(columns="event").to_numpy(float)).all()


def test_shards_outside_the_batch_are_untouched(x64, case):
    result, states = watched(case)
    n_shards = problem_of(case[1]).n_shards
    if result.batch_size == n_shards:
        assert SOLVERS[case[0]].full_batch
        return
    steps = len(states) - 1
    drawn = pdvi.sampling.batches(pdvi.sampling.Reshuffled(), 0, 0, steps, n_shards, BATCH)
    begun = int(
        result.trace["event"].str.contains("consensus initialization").any()
    )  # over all shards, before the first step
    for before, after, batch in list(zip(states, states[1:], drawn))[begun:]:
        others = np.setdiff1d(np.arange(n_shards), batch)
        np.testing.assert_array_equal(np.asarray(before.local)[others], np.asarray(after.local)[others])
    assert not np.array_equal(states[0].local, states[-1].local)


def test_the_same_seed_gives_the_same_bits(x64, case):
    assert_same_bits(fit(case, seed=5), fit(case, seed=5))


def test_a_stationary_point(x64, case):
    """Stays put without noise; with it, a constant step hovers around it."""
    best = stationary(case[1])
    result = fit(case, start=best.point, max_epochs=4)
    if case[0] in WITHOUT_NOISE:
        for a, b in zip(jax.tree.leaves(result.point), jax.tree.leaves(best.point)):
            np.testing.assert_allclose(a, b, atol=1e-6)
    else:
        room = best.trace["objective"].iloc[0] - best.objective
        assert result.trace["objective"].max() < best.objective + 0.05 * room


def test_it_improves_the_objective(x64, case):
    """From the model's own start, at least four fifths of the way to the stationary point."""
    trace = fit(case, max_epochs=40).trace["objective"]
    room = trace.iloc[0] - stationary(case[1]).objective
    assert trace.iloc[-1] < trace.iloc[0] - 0.8 * room
    assert np.isfinite(trace).all()


def test_a_resumed_run_is_the_uninterrupted_one(x64, case, tmp_path):
    path = tmp_path / "run.zarr"
    fit(case, max_epochs=1, checkpoint=path)
    assert_same_bits(fit(case, start=path), fit(case))


def test_a_solver_has_at_most_twelve_hooks():
    hooks = [name for name, value in vars(pdvi.Solver).items() if callable(value) and not name.startswith("_")]
    assert len(hooks) <= 12, hooks
