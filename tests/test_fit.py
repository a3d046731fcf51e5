"""The loop: trace, budgets, stopping, callbacks, interruption, and what it refuses."""

import time
from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pdvi
from models_for_tests import begun
from pdvi import Status
from pdvi.executors import Memory
from pdvi.executors.fit_program import MAX_ROWS

SOLVER = pdvi.P2DVI()


@cache  # one problem object, so that its steps compile once for all tests
def problem():
    """12 shards, visited 3 at a time: 4 steps per epoch."""
    return pdvi.datasets.quadratic(n=12, condition=20, heterogeneity=0.8, linear=0.3)


def fit(**settings):
    return pdvi.fit(problem(), SOLVER, **{"batch_size": 3, "max_epochs": 5, "tol": 0, **settings})


class Watched(Memory):
    """Counts the calls, and does ``before_run`` or ``before_evaluate`` first: log point by log point."""

    runs_to_stop = False

    def __init__(self, before_run=lambda count: None, before_evaluate=lambda count: None):
        self.before_run, self.before_evaluate = before_run, before_evaluate
        self.batches, self.evaluations = [], 0

    def run(self, solver, state, batches):
        self.batches.append(batches)
        self.before_run(len(self.batches))
        return super().run(solver, state, batches)

    def evaluate(self, state, solver):
        self.evaluations += 1
        self.before_evaluate(self.evaluations)
        return super().evaluate(state, solver)


def interrupt_at(call):
    def interrupt(count):
        if count == call:
            raise KeyboardInterrupt

    return interrupt


def assert_same(one, two):
    """The same parameters, solver state and trace, but for the time."""
    for a, b in zip(jax.tree.leaves(contents(one)), jax.tree.leaves(contents(two)), strict=True):
        np.testing.assert_array_equal(a, b)


def contents(result):
    trace = result.trace.drop(columns="seconds").to_dict("list")
    return (result.n_steps, result.global_params, result.local_params, result.state, trace)


def test_the_trace_has_a_row_per_log_point():
    trace = fit().trace
    assert list(trace) == [
        "step",
        "epoch",
        "seconds",
        "objective",
        "grad_norm",
        "grad_norm_lam",
        "consensus",
        "event",
    ]
    assert trace["step"].tolist() == [0, 4, 8, 12, 16, 20]
    assert trace["epoch"].tolist() == [0, 1, 2, 3, 4, 5]
    assert trace["seconds"].iloc[0] == 0
    assert (np.diff(trace["seconds"]) > 0).all()
    assert (trace["event"] == "").all()


def test_every_block_has_its_gradient_norm():
    tanh = pdvi.datasets.tanh_regression(6)
    lam, local = tanh.init(jax.random.key(0))
    run = begun(tanh, pdvi.PDVI(eta=1.0))
    row = run.executor.evaluate(run.state, run.solver)
    gradient = np.asarray(tanh.evaluate(lam, local)[1])
    assert row["grad_norm_weight"] == pytest.approx(np.linalg.norm(gradient[:3]), rel=1e-5)
    assert row["grad_norm_gain"] == pytest.approx(abs(gradient[3]), rel=1e-5)
    assert row["grad_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-5)


def numpy_objective(lam, local):
    """F and its gradient in lam, from Q and v."""
    Q, v = (np.asarray(problem().shards[name], float) for name in ("Q", "v"))
    x = np.concatenate([local, np.broadcast_to(lam, (12, 5))], 1).astype(float)
    gradient = (2 * np.einsum("bij,bj->bi", Q, x) + v)[:, 5:].sum(0)
    return np.einsum("bi,bij,bj->", x, Q, x) + np.sum(v * x), np.linalg.norm(gradient)


def test_the_last_row_describes_what_is_returned():
    result = fit(max_epochs=2)
    objective, norm = numpy_objective(result.global_params["lam"], result.local_params)
    assert result.objective == result.trace["objective"].iloc[-1] == pytest.approx(objective, rel=1e-5)
    assert result.trace["grad_norm"].iloc[-1] == pytest.approx(norm, rel=1e-4)


def test_the_first_row_is_the_start():
    objective, norm = numpy_objective(np.ones(5), np.zeros((12, 5)))
    for result in (fit(), fit(start={"lam": np.ones(5)})):
        assert result.trace["objective"][0] == pytest.approx(objective, rel=1e-5)
        assert result.trace["grad_norm"][0] == pytest.approx(norm, rel=1e-5)


def test_a_dict_is_a_start():
    lam = np.array([3.0, -1, 2, 0.5, 0])
    trace = fit(start={"lam": lam}, max_steps=1).trace
    assert trace["objective"][0] == pytest.approx(numpy_objective(lam, np.zeros((12, 5)))[0], rel=1e-5)


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        ({"max_epochs": 3}, 12),
        ({"max_epochs": 1.5}, 6),
        ({"max_epochs": 0.01}, 1),
        ({"max_steps": 7}, 7),
        ({"max_steps": 100, "max_epochs": 2}, 8),
    ],
)
def test_a_budget_of_epochs_or_steps_is_kept(budget, steps):
    result = fit(**budget)
    assert result.n_steps == result.trace["step"].iloc[-1] == steps
    assert result.status is Status.MAX_EPOCHS
    assert not result.converged
    assert "increase max_epochs or loosen tol" in str(result.status)


def test_a_budget_of_seconds_is_kept():
    slow = Watched(before_run=lambda count: time.sleep(0.05))
    result = fit(max_epochs=1000, max_seconds=1.0, log_every=0.25, executor=slow)
    assert result.status is Status.MAX_SECONDS
    assert "increase it, or go on with start=result" in str(result.status)
    assert result.trace["seconds"].iloc[-1] >= 1.0 > result.trace["seconds"].iloc[-2]


def test_a_budget_of_seconds_is_kept_by_the_compiled_program():
    began = time.monotonic()
    result = fit(max_epochs=1e8, max_seconds=0.5)
    assert result.status is Status.MAX_SECONDS
    assert result.trace["seconds"].iloc[-1] >= 0.5
    assert time.monotonic() - began < 20  # compilation, evaluation, and a call that is at most as long as what is left
    assert len(result.trace) > 64


def test_a_small_change_twice_in_a_row_ends_the_run():
    result = fit(max_epochs=200, tol=1e-3)
    assert result.converged
    assert str(result.status) == "CONVERGED: reached the tolerance"
    values = result.trace["objective"].to_numpy()
    small = np.abs(np.diff(values)) < 1e-3 * np.abs(values[:-1])
    assert small[-2:].all()
    assert not any(a and b for a, b in pairwise(small[:-1]))  # and not later than it could


def test_tol_looks_at_whole_epochs_however_often_one_logs():
    """Between quarters of an epoch changes are smaller: they must not end the run earlier."""
    result = fit(max_epochs=200, tol=1e-3, log_every=0.25)
    values = result.trace["objective"].to_numpy()
    assert result.converged
    assert abs(values[-1] - values[-5]) < 1e-3 * abs(values[-5])
    assert abs(values[-5] - values[-9]) < 1e-3 * abs(values[-9])


def test_a_small_gradient_and_a_still_objective_end_the_run():
    result = fit(max_epochs=200, grad_tol=1e-2)
    norms, values = result.trace["grad_norm"].to_numpy(), result.trace["objective"].to_numpy()

    def flat(k):
        still = abs(values[k] - values[k - 1]) <= 1e-2 * np.ptp(values[: k + 1])
        return norms[k] < 1e-2 * norms[0] and still

    assert result.converged
    assert [flat(k) for k in range(1, len(values))] == [False] * (len(values) - 2) + [True]


def test_tol_zero_never_ends_a_run():
    assert fit(max_epochs=80).status is Status.MAX_EPOCHS


def test_seconds_leave_evaluation_out():
    fit(max_epochs=3)  # compiles
    slow = Watched(before_evaluate=lambda count: time.sleep(0.2))
    trace = fit(max_epochs=3, executor=slow).trace
    assert slow.evaluations == 4
    assert trace["seconds"].iloc[-1] < 0.2 * slow.evaluations


@pytest.mark.parametrize(
    ("log_every", "lengths"), [(1, [4] * 3), (0.25, [1] * 12), (0.5, [2] * 6), (2, [8, 4]), (1e-9, [1] * 12)]
)
def test_steps_between_log_points_are_one_call(log_every, lengths):
    watched = Watched()
    result = fit(max_epochs=3, log_every=log_every, executor=watched)
    assert [len(batches) for batches in watched.batches] == lengths
    assert result.trace["step"].tolist() == np.cumsum([0, *lengths]).tolist()
    drawn = pdvi.sampling.batches(pdvi.sampling.Reshuffled(), 0, 0, 12, 12, 3)
    np.testing.assert_array_equal(np.concatenate(watched.batches), drawn)


class Counted:
    """A model whose loss counts how often it is traced."""

    traced = 0

    def init_global(self, key):
        return {"lam": jnp.ones(2)}

    def init_local(self, key, shard):
        return jnp.zeros(2)

    def loss(self, local, globals_, shard):
        type(self).traced += 1
        return jnp.sum((shard - local - globals_["lam"]) ** 2) + jnp.sum(local**2)


def test_one_program_serves_other_budgets_tolerances_data_and_step_sizes():
    model, rng = Counted(), np.random.default_rng(0)
    many = [pdvi.Problem(model, rng.standard_normal((6, 2))) for _ in range(2)]
    pdvi.fit(many[0], pdvi.P2DVI(eta=0.1), batch_size=2, max_epochs=50)
    Counted.traced = 0
    for one in many:
        pdvi.fit(one, pdvi.P2DVI(eta=0.2), batch_size=2, max_epochs=7, tol=0, seed=3)
        pdvi.fit(one, pdvi.P2DVI(eta=0.3), batch_size=2, max_epochs=90, tol=1e-9, abs_tol=1e-3, max_seconds=60)
        pdvi.fit(one, pdvi.P2DVI(eta=0.3), batch_size=2, max_epochs=2, callbacks=[lambda progress: None])
    assert Counted.traced == 0


def test_an_absolute_tolerance_ends_a_run_too():
    result = fit(max_epochs=200, abs_tol=1e-2)
    assert result.converged
    changes = np.abs(np.diff(result.trace["objective"]))
    assert (changes[-2:] < 1e-2).all()
    assert not any(a < 1e-2 and b < 1e-2 for a, b in pairwise(changes[:-1]))


@pytest.mark.parametrize("log_every", [1, 0.25, 3])
def test_log_points_one_by_one_or_in_one_program_are_the_same(log_every):
    settings = {"max_epochs": 70, "tol": 1e-5, "log_every": log_every}
    one, many = fit(**settings, callbacks=[lambda progress: None]), fit(**settings)
    assert one.status is many.status
    assert_same(one, many)


def test_a_large_state_is_not_kept_twice(monkeypatch):
    expected = fit(max_epochs=40)
    monkeypatch.setattr(pdvi.run.running, "LARGE_STATE", 0)
    large = fit(max_epochs=40)
    np.testing.assert_allclose(large.trace["objective"], expected.trace["objective"], rtol=1e-6)


def test_callbacks_see_every_log_point():
    seen, others = [], []
    result = fit(callbacks=[seen.append, lambda progress: others.append(progress.record["step"])])
    assert [progress.record["step"] for progress in seen] == others == result.trace["step"].tolist()
    assert seen[-1].record["objective"] == result.objective
    assert seen[-1].problem is problem()
    np.testing.assert_array_equal(seen[-1].global_params["lam"], result.global_params["lam"])
    np.testing.assert_array_equal(seen[-1].local_params, result.local_params)
    assert not np.array_equal(seen[-2].global_params["lam"], result.global_params["lam"])


def test_a_callback_can_stop_the_run():
    called = []
    result = fit(callbacks=[lambda p: p.record["epoch"] == 2, lambda p: called.append(p.record["epoch"])])
    assert result.status is Status.STOPPED
    assert result.n_steps == 8
    assert called == [0, 1, 2]  # the one after it still hears of the last point
    assert_same(result, fit(max_epochs=2))


def test_a_callback_that_returns_something_else_does_not_stop_the_run():
    assert fit(callbacks=[lambda p: "no", lambda p: 0.5, lambda p: None]).status is Status.MAX_EPOCHS


def test_the_same_seed_gives_the_same_bits():
    assert_same(fit(seed=3), fit(seed=3))
    assert_same(fit(), fit(seed=0))


def test_another_seed_gives_another_run():
    one, two = fit(seed=3), fit(seed=4)
    assert not np.array_equal(one.global_params["lam"], two.global_params["lam"])
    assert one.trace["objective"][0] == two.trace["objective"][0]  # this model's start is not random


def test_the_seed_is_the_models_too():
    tanh = pdvi.datasets.tanh_regression(6)  # starts at random weights
    stop = {"callbacks": [lambda progress: True]}
    starts = [pdvi.fit(tanh, pdvi.PDVI(eta=1.0), seed=seed, **stop).objective for seed in (0, 0, 1)]
    assert starts[0] == starts[1] != starts[2]


@pytest.mark.parametrize("log_every", [0.25, 0.5, 2])
def test_how_often_one_logs_changes_the_run_by_rounding_only(log_every):
    """Not to the bit: a scan of another length is compiled to other instructions."""
    one, two = fit(max_epochs=4), fit(max_epochs=4, log_every=log_every)
    np.testing.assert_allclose(one.global_params["lam"], two.global_params["lam"], atol=1e-6)
    np.testing.assert_allclose(one.local_params, two.local_params, atol=1e-6)


def test_an_interrupted_callback_leaves_the_last_logged_state():
    calls = []

    def interrupt(progress):
        calls.append(progress)
        interrupt_at(4)(len(calls))

    result = fit(callbacks=[interrupt])
    assert result.status is Status.INTERRUPTED
    assert "go on with start=result" in str(result.status)
    assert_same(result, fit(max_epochs=3))
    assert_same(fit(start=result), fit())


@pytest.mark.parametrize("call", [1, 3])
def test_an_interrupted_step_leaves_the_last_logged_state(call):
    result = fit(executor=Watched(before_run=interrupt_at(call)))
    assert result.status is Status.INTERRUPTED
    assert result.n_steps == 4 * (call - 1) == result.trace["step"].iloc[-1]
    assert_same(fit(start=result, executor=Watched()), fit(executor=Watched()))


class Interrupted(Memory):
    """The compiled program is interrupted at a call."""

    def __init__(self, call):
        self.interrupt, self.calls = interrupt_at(call), 0

    def run_to_stop(self, solver, state, good, batches, rules):
        is_evaluation = rules.at_start and rules.step > 0  # of a run on its way, to see how long it takes
        self.calls += not is_evaluation
        self.interrupt(self.calls)
        return super().run_to_stop(solver, state, good, batches, rules)


@pytest.mark.parametrize("alone", [True, False])
def test_an_interrupted_program_leaves_the_last_logged_state(alone):
    callbacks = [lambda progress: None] if alone else []  # with a callback every log point is a call
    budget = {"max_epochs": 50}
    result = fit(executor=Interrupted(3 if alone else 2), callbacks=callbacks, **budget)
    assert result.status is Status.INTERRUPTED
    assert result.n_steps == result.trace["step"].iloc[-1] == (4 if alone else 4 * (MAX_ROWS - 1))
    assert_same(fit(start=result, **budget), fit(**budget))


def test_an_interrupted_evaluation_leaves_the_last_logged_state():
    result = fit(executor=Watched(before_evaluate=interrupt_at(3)))
    assert result.status is Status.INTERRUPTED
    assert result.trace["step"].iloc[-1] == result.n_steps
    objective = numpy_objective(result.global_params["lam"], result.local_params)[0]
    assert result.objective == pytest.approx(objective, rel=1e-5)


def test_an_interrupt_before_the_first_log_point_is_passed_on(tmp_path):
    """Nothing has been done, so there is nothing to return or to keep."""
    with pytest.raises(KeyboardInterrupt):
        fit(executor=Watched(before_evaluate=interrupt_at(1)), checkpoint=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, r"`batch_size` must be between 1 and .* \(12\), got 0"),
        ({"batch_size": 13}, r"`batch_size` must be between 1 and .* \(12\), got 13"),
        ({"batch_size": 3.0}, "`batch_size` must be between 1 and .*, got 3.0"),
        ({"batch_size": True}, "`batch_size` must be between 1 and .*, got True"),
        ({"seed": -1}, "`seed` must be between 0 and .*, got -1"),
        ({"seed": 1.5}, "`seed` must be between 0 and .*, got 1.5"),
        ({"log_every": 0}, "`log_every` must be positive and finite, got 0"),
        ({"max_epochs": 0}, "`max_epochs` must be positive and finite, got 0"),
        ({"max_epochs": np.nan}, "`max_epochs` must be positive and finite, got nan"),
        ({"max_epochs": "a"}, "`max_epochs` must be positive and finite, got 'a'"),
        ({"max_steps": -1}, "`max_steps` must be a whole number of at least 1, got -1"),
        ({"max_seconds": -1}, "`max_seconds` must be positive and finite, got -1"),
        ({"tol": np.nan}, "`tol` must be at least 0 and finite, got nan"),
        (
            {"checkpoint": "nowhere/run.zarr"},
            "cannot write 'nowhere/run.zarr': the folder 'nowhere' does not exist; create it",
        ),
        ({"start": {"lam": ["a"] * 5}}, "`start` of block 'lam' must hold numbers"),
        ({"start": {"lam": np.ones(5), "mu": 1}}, r"`start` must have the blocks \['lam'\], got \['lam', 'mu'\]"),
        ({"start": {}}, r"`start` must have the blocks \['lam'\], got \[\]"),
        ({"start": 7}, r"`start` must have the blocks \['lam'\], got int"),
        ({"start": {"lam": np.ones(4)}}, r"`start` of block 'lam' must have shape \(5,\), got \(4,\)"),
        ({"start": {"lam": [1, 2, np.nan, 4, 5]}}, "`start` must be finite: block 'lam' has NaN"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        fit(**settings)


def test_a_start_where_the_objective_is_not_finite_is_named():
    with pytest.raises(ValueError, match=r"the objective at the start is (inf|nan); give another `start`"):
        fit(start={"lam": np.full(5, 1e25)})


def test_a_run_is_continued_with_its_own_seed_and_batch_size():
    half = fit(max_epochs=2, seed=3)
    assert_same(fit(start=half, seed=3), fit(seed=3))
    assert_same(fit(start=half, batch_size=None), fit(seed=3))
    with pytest.raises(ValueError, match=r"`seed` must be that of the run to continue \(3\), got 4"):
        fit(start=half, seed=4)
    with pytest.raises(ValueError, match=r"`batch_size` must be that of the run to continue \(3\), got 2"):
        fit(start=half, batch_size=2)


def test_a_run_is_continued_on_a_problem_of_its_size_only():
    other = pdvi.datasets.quadratic(n=10, condition=20)
    with pytest.raises(ValueError, match=r"the local variables of `start` must fit the problem: expected arrays"):
        pdvi.fit(other, SOLVER, start=fit(max_epochs=2))


def test_the_progress_bar_is_there_while_the_model_is_compiled(capsys):
    fit(progress=True)
    shown = capsys.readouterr().err.split("\r")
    assert shown[1].startswith("compiling")
    assert any("objective" in line and "compiling" not in line for line in shown)
    fit()
    assert not capsys.readouterr().err
