"""A run goes on only where it belongs: the same solver, the same data, a state that fits, by name."""

import dataclasses

import jax
import numpy as np
import pytest

import pdvi
from pdvi.core.solver import filled, named, settings_of
from pdvi.executors import Disk, Memory

SETTINGS = {"batch_size": 3, "max_epochs": 2, "tol": 0}


def problem(seed=0):
    return pdvi.datasets.quadratic(n=12, condition=20, heterogeneity=0.8, linear=0.3, seed=seed)


def test_a_checkpoint_knows_its_data(tmp_path):
    path = tmp_path / "run"
    pdvi.fit(problem(), pdvi.P2DVI(), checkpoint=path, **SETTINGS)
    with pytest.raises(ValueError, match=r"`start` must be a run on the same data: .* the same shapes, but other"):
        pdvi.fit(problem(seed=1), pdvi.P2DVI(), start=path, **SETTINGS)
    elsewhere = pdvi.load_result(path)
    assert pdvi.fit(problem(seed=1), pdvi.P2DVI(), start=elsewhere.point, **SETTINGS).n_steps == 8  # a start is fine


def test_a_single_number_makes_other_data():
    one = problem()
    other = jax.tree.map(np.array, one.shards)
    other["v"][3, 2] += 1e-3
    assert pdvi.Problem(one.model, other).fingerprint() != one.fingerprint() == problem().fingerprint()


def test_a_store_is_known_by_its_contents(tmp_path):
    prints = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        pdvi.write_store(tmp_path / name, problem(seed))
        prints.append(pdvi.Problem.from_store(tmp_path / name).fingerprint())
    assert prints[0] == prints[1] != prints[2]


def test_a_solver_is_known_by_its_settings():
    array, numbers = pdvi.P2DVI(eta={"lam": np.array([0.1, 0.2])}), pdvi.P2DVI(eta={"lam": [0.1, 0.2]})
    assert settings_of(array) == settings_of(numbers)
    assert settings_of(pdvi.SVI()) != settings_of(pdvi.SVI(rate=0.2))
    assert settings_of(pdvi.SVI())["class"] == "SVI"
    result = pdvi.fit(problem(), pdvi.PDVI(eta=0.3), **SETTINGS)
    other = pdvi.fit(problem(), pdvi.PDVI(eta=0.2), start=result, **SETTINGS)
    assert other.trace["step"].iloc[0] == 0  # begins at the point, as a new run


def test_a_state_that_does_not_fit_is_refused_by_name():
    result = pdvi.fit(problem(), pdvi.P2DVI(), **SETTINGS)
    assert {"server.lam", "server.lam0", "server.h", "server.penalty", "own.copy", "own.dual"} <= set(result.state)
    without = {name: value for name, value in result.state.items() if name != "own.dual"}
    with pytest.raises(ValueError, match=r"state in `start` must fit the solver: it lacks \['own.dual'\]"):
        pdvi.fit(problem(), pdvi.P2DVI(), start=dataclasses.replace(result, state=without), **SETTINGS)
    shorter = {**result.state, "server.h": result.state["server.h"][:-1]}
    with pytest.raises(ValueError, match=r"expected server.h of shape \(5,\) and type float32, got \(4,\)"):
        pdvi.fit(problem(), pdvi.P2DVI(), start=dataclasses.replace(result, state=shorter), **SETTINGS)


def test_names_and_back():
    tree = {"a": np.arange(3), "b": (np.ones(2), np.zeros(()))}
    arrays = named(tree)
    assert set(arrays) == {"a", "b.0", "b.1"}
    again = filled(tree, arrays, "this")
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True))


class Closing(Memory):
    """Counts how often it is closed."""

    closed = 0

    def close(self):
        self.closed += 1


def fail(progress):
    raise RuntimeError("no")


def test_an_executor_is_closed_however_a_run_ends(tmp_path):
    executor = Closing()
    pdvi.fit(problem(), pdvi.P2DVI(), executor=executor, **SETTINGS)
    assert executor.closed == 1
    with pytest.raises(RuntimeError, match="no"):
        pdvi.fit(problem(), pdvi.P2DVI(), executor=executor, callbacks=[fail], **SETTINGS)
    assert executor.closed == 2
    pdvi.write_store(tmp_path / "store", problem())
    disk = Disk()
    with pytest.raises(RuntimeError, match="no"):
        pdvi.fit(pdvi.Problem.from_store(tmp_path / "store"), pdvi.P2DVI(), executor=disk, callbacks=[fail], **SETTINGS)
    assert "_host" not in vars(disk)
