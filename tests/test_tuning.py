"""Tuning: which trials are made, what is kept, and that the way they run does not matter."""

import json
import math
from functools import cache

import numpy as np
import pytest

import pdvi
from pdvi.executors import Memory
from pdvi.run import tune as tuning
from pdvi.run.tune import COARSE, PARTS

EPOCHS = 4  # of 4 steps, so that a part is two steps


@cache  # one problem object each, so that steps compile once
def quadratic():
    return pdvi.datasets.quadratic(n=12, condition=20, heterogeneity=0.8, linear=0.3)


@cache
def mixture():
    return pdvi.datasets.mixture(240, dim=2, n_components=3, batch_size=24, separation=2.0, seed=1).problem()


def tune(problem=None, solver=None, space=("rate", "local_rate"), **settings):
    settings = {"batch_size": 3, "max_epochs": EPOCHS, "trials": 14, "vectorise": False, **settings}
    return pdvi.tune(problem or quadratic(), solver or pdvi.SGD(), space, **settings)


def test_the_best_trial_is_what_fit_reaches_with_its_settings():
    tuned = tune()
    again = pdvi.fit(quadratic(), tuned.solver, batch_size=3, max_epochs=EPOCHS, tol=0, log_every=EPOCHS / 8, seed=0)
    assert again.objective == tuned.objective == tuned.trials["objective"].min()
    assert (tuned.solver.rate, tuned.solver.local_rate) == (tuned.settings["rate"], tuned.settings["local_rate"])


def test_of_settings_that_arrive_the_one_that_arrives_sooner_is_better():
    courses = {"slow": [9.0, 5.0, 1.0], "soon": [9.0, 1.0, 1.0 + 5e-6], "high": [1.5, 1.5, 1.5], "lost": [math.inf] * 3}
    made = [{"rate": name, "course": course} for name, course in courses.items()]
    assert tuning._best(made, 10.0, ["rate"]) == {"rate": "soon"}
    assert tuning._best(made, 10.0, ["rate"], equal=1e-12) == {"rate": "slow"}  # ends a little lower
    assert tuning._best(made[:1] + made[2:], 10.0, ["rate"]) == {"rate": "slow"}
    assert tuning._best(made[2:], 10.0, ["rate"]) == {"rate": "high"}
    assert tuning._best(made[3:], 10.0, ["rate"]) == {"rate": "lost"}


def test_diverged_trials_come_last():
    trials = tune().trials
    assert np.isinf(trials["objective"]).any()  # a rate of 1e4 cannot work
    assert not np.isnan(trials["objective"]).any()
    assert trials.sort_values("objective")["rate"].iloc[-1] > 1e-2


def test_first_all_settings_together_then_each_then_finer():
    trials = tune(trials=22).trials
    coarse = trials[trials["round"] == "coarse"]
    assert coarse["rate"].tolist() == coarse["local_rate"].tolist() == list(COARSE)
    best = coarse.loc[coarse["objective"].idxmin()]
    second = trials[trials["round"] == "coarse rate"].iloc[:5]
    assert sorted([*second["rate"], best["rate"]]) == list(COARSE)
    assert (second["local_rate"] == best["local_rate"]).all()
    assert trials["round"].iloc[-1].startswith("fine")
    fine = trials[trials["round"] == "fine rate"]["rate"].iloc[:2].tolist()
    assert fine[0] / fine[1] == pytest.approx(100)  # ten times up, ten times down


def test_one_setting_is_refined_as_often_as_the_budget_allows():
    tuned = tune(solver=pdvi.ControlVariates(), space=("rate",), trials=16)
    assert tuned.trials["rate"].tolist()[:6] == list(COARSE)
    assert len(tuned.trials) == 16
    ratios = [up / down for up, down in tuned.trials["rate"].to_numpy()[6:].reshape(5, 2)]
    np.testing.assert_allclose(ratios, [100, 10, 10**0.5, 10**0.25, 10**0.125], rtol=1e-4)
    assert tuned.trials["objective"].iloc[6:].min() < tuned.trials["objective"].iloc[:6].min()
    assert tuned.settings["rate"] not in COARSE


@pytest.mark.parametrize(
    ("solver", "space"),
    [
        (pdvi.PDVI(), ("eta",)),
        (pdvi.SGD(), ("local_rate", "rate")),
        (pdvi.P2DVI(), ("eta.*",)),
        (pdvi.Adam(), ["rate"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_method_gets_the_same_number_of_trials(solver, space):
    trials = tune(solver=solver, space=space, trials=20).trials
    assert len(trials) == len(trials.drop(columns=["round", "objective", "course"]).drop_duplicates()) == 20


def test_a_rate_per_block():
    tuned = tune(mixture(), space=("local_rate", "rate.*"), trials=22)
    assert set(tuned.settings) == {"local_rate", "rate.mean", "rate.log_var"}
    assert tuned.solver.rate == {"mean": tuned.settings["rate.mean"], "log_var": tuned.settings["rate.log_var"]}
    one = tune(mixture(), pdvi.SGD(rate=1e-3), space=("rate.mean",), trials=6)
    assert one.solver.rate["log_var"] == 1e-3


def test_a_grid_of_ones_own():
    trials = tune(space={"rate": [1e-2, 1e-3], "local_rate": [0.1, 0.2, 0.3]}, trials=9).trials
    coarse = trials[trials["round"] == "coarse"]
    assert coarse["rate"].tolist() == [1e-3, 1e-2, 1e-2]
    assert coarse["local_rate"].tolist() == [0.1, 0.2, 0.3]
    fine = trials[trials["round"] == "fine rate"]["rate"].tolist()
    assert fine[0] / fine[1] == pytest.approx(10, rel=1e-5)  # the grid's ratio, down from its root


@pytest.mark.parametrize(
    ("which", "solver", "space"),
    [
        (quadratic, pdvi.SGD(), ("local_rate", "rate")),
        (quadratic, pdvi.PDVI(), ("eta",)),
        (mixture, pdvi.SVI(), ("rate",)),
        (mixture, pdvi.Adam(), ("local_rate", "rate.*")),
    ],
    ids=["SGD", "PDVI", "SVI", "Adam"],
)
def test_side_by_side_gives_the_same_ranking(x64, which, solver, space):
    problem = which.__wrapped__()  # in double precision: no ties by rounding
    one = tune(problem, solver, space, vectorise=True)
    two = tune(problem, solver, space, vectorise=False)
    assert one.settings == two.settings
    assert one.trials["round"].tolist() == two.trials["round"].tolist()
    np.testing.assert_allclose(one.trials["objective"], two.trials["objective"], rtol=1e-6)
    ranks = [np.argsort(tuned.trials["objective"].round(9), kind="stable").tolist() for tuned in (one, two)]
    assert ranks[0] == ranks[1]


def test_small_runs_are_side_by_side_unless_told_otherwise(monkeypatch):
    calls = []
    together = tuning._advance_together
    monkeypatch.setattr(tuning, "_advance_together", lambda *arguments: calls.append(1) or together(*arguments))
    tune(trials=6, vectorise=None)
    assert len(calls) == tuning.PARTS
    monkeypatch.setattr(tuning, "VECTORISED", {"cpu": 0, "other": 0})
    tune(trials=6, vectorise=None)
    assert len(calls) == tuning.PARTS


def test_it_is_deterministic():
    one, two = tune(), tune()
    assert one.trials.equals(two.trials)
    assert one.settings == two.settings


def test_it_begins_where_told():
    near = pdvi.fit(quadratic(), pdvi.CAVI(), max_epochs=200, tol=0, log_every=200)
    for start in (near, near.point, near.global_params):
        tuned = tune(start=start, solver=pdvi.ControlVariates(), space=("rate",), trials=6)
        assert tuned.objective < near.objective + 0.1


class Failing(Memory):
    """Fails at the given call, as a machine does."""

    def __init__(self, at):
        self.at, self.runs = at, 0

    def run(self, *arguments):
        self.runs += 1
        if self.runs == self.at:
            raise KeyboardInterrupt
        return super().run(*arguments)


def test_an_interrupted_call_goes_on(tmp_path):
    path = tmp_path / "trials.jsonl"
    with pytest.raises(KeyboardInterrupt):
        tune(path=path, executor=Failing(at=9 * PARTS + 3), vectorise=None)
    assert len(path.read_text().splitlines()) == 1 + 9
    watched = Failing(at=math.inf)
    tuned = tune(path=path, executor=watched, vectorise=None)
    assert watched.runs == (14 - 9) * PARTS
    assert tuned.trials.equals(tune().trials)
    assert tuned.solver == tune().solver
    # nothing left to do
    watched = Failing(at=1)
    assert tune(path=path, executor=watched, vectorise=None).trials.equals(tuned.trials)
    assert watched.runs == 0


def test_half_a_line_is_cut_off(tmp_path):
    path = tmp_path / "trials.jsonl"
    whole = tune(path=path).trials
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:8]) + lines[8][:11])
    watched = Failing(at=math.inf)
    assert tune(path=path, executor=watched, vectorise=None).trials.equals(whole)
    assert watched.runs == (14 - 7) * PARTS
    assert sorted(path.read_text().splitlines()) == sorted(line.strip() for line in lines)


def test_diverged_trials_are_kept_too(tmp_path):
    path = tmp_path / "trials.jsonl"
    trials = tune(path=path, trials=6).trials
    kept = [json.loads(line)["course"][-1] for line in path.read_text().splitlines()[1:]]
    assert [math.inf if value is None else value for value in kept] == trials["objective"].tolist()
    assert None in kept


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"max_epochs": 2}, "max_epochs"),
        ({"seed": 1}, "seed"),
        ({"batch_size": 2}, "batch_size"),
        ({"solver": pdvi.Adam()}, "solver"),
        ({"start": {"lam": np.zeros(5)}}, "start"),
        ({"space": ("rate",)}, "space"),
        ({"sampling": pdvi.sampling.Uniform()}, "sampling"),
    ],
)
def test_trials_of_another_tuning_are_not_used(tmp_path, changed, says):
    path = tmp_path / "trials.jsonl"
    tune(path=path, trials=6)
    with pytest.raises(ValueError, match=f"holds another tuning .*{says}.*choose another file"):
        tune(path=path, trials=6, **changed)


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a tuning\n")
    with pytest.raises(ValueError, match="is not a file of tuning trials"):
        tune(path=path)
    assert path.read_text() == "not a tuning\n"
    with pytest.raises(ValueError, match=r"the folder '.*' does not exist; create it first"):
        tune(path=tmp_path / "nowhere" / "trials.jsonl")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"space": ("speed",)}, r"`space` must name settings of SGD \(\['rate', 'local_rate'\]\)"),
        ({"space": ("rate.mean",)}, r"a block of the model \(\['lam'\]\)"),
        ({"space": ()}, "at least one setting"),
        ({"space": {"rate": []}}, "different positive numbers"),
        ({"space": {"rate": [0.0, 1.0]}}, "different positive numbers"),
        ({"space": {"rate": [1.0, 1.0]}}, "different positive numbers"),
        ({"trials": 5}, r"at least the length of the coarse grid \(6\), got 5"),
        ({"trials": 7.5}, "`trials` must be a whole number"),
        ({"batch_size": 13}, "`batch_size` must be between 1 and the number of shards"),
        ({"max_epochs": 0}, "`max_epochs` must be positive"),
        ({"vectorise": True, "executor": Memory()}, "`vectorise` must be left out or False with an `executor`"),
    ],
)
def test_bad_arguments_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        tune(**settings)


def test_a_method_that_makes_all_steps_with_all_shards():
    with pytest.raises(ValueError, match="`space` must name settings of CAVI"):
        tune(solver=pdvi.CAVI(), space=("rate",), batch_size=None)


def test_progress_is_shown_if_wanted(capsys):
    tune(trials=6, progress=True)
    assert "/6 " in capsys.readouterr().err
    tune(trials=6)
    assert capsys.readouterr().err == ""
