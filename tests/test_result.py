"""What is kept is what was there, to the bit, whole or not at all."""

import dataclasses
import os
import zipfile
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import pdvi
from pdvi import load_result
from test_fit import SOLVER, problem


def fit(solver=SOLVER, **settings):
    return pdvi.fit(problem(), solver, **{"batch_size": 3, "max_epochs": 3, "tol": 0, **settings})


@cache
def short():
    return fit()


def assert_same_bits(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two)):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def assert_same(one, two):
    """The same parameters, solver state and trace, but for the time."""
    assert one.n_steps == two.n_steps
    for name in ("global_params", "local_params", "state"):
        assert_same_bits(getattr(one, name), getattr(two, name))
    one, two = (result.trace.drop(columns="seconds") for result in (one, two))
    pd.testing.assert_frame_equal(one, two, check_exact=True)


def assert_kept(result, path):
    """Saved and loaded, every field is the same."""
    result.save(path)
    loaded = load_result(path)
    for name in ("global_params", "local_params", "state"):
        assert_same_bits(getattr(result, name), getattr(loaded, name))
    assert list(result.global_params) == list(loaded.global_params)
    pd.testing.assert_frame_equal(result.trace, loaded.trace, check_exact=True)
    for name in ("status", "n_steps", "seed", "batch_size", "solver", "data", "objective", "converged"):
        assert getattr(result, name) == getattr(loaded, name)


def test_a_run_is_kept_to_the_bit(tmp_path):
    assert_kept(short(), tmp_path / "run.pdvi")


def test_a_run_in_double_precision_is_kept_to_the_bit(tmp_path, x64):
    result = rough_fit(2)
    assert result.local_params.dtype == float
    assert_kept(result, tmp_path / "run.pdvi")


def test_awkward_numbers_and_structures_are_kept(tmp_path):
    rng = np.random.default_rng(0)
    trace = short().trace.copy()
    trace["objective"] = [np.nan, np.inf, -0.0, 5e-324]
    trace.insert(3, "count", np.array([1, 2, 3, 4], np.int32))
    trace["event"] = ["", "rosé: «x4»", "", '"quoted"\n']
    result = dataclasses.replace(
        short(),
        global_params={"z": rng.standard_normal((2, 3, 4)), "a": np.asarray(-0.0), "m/n": np.float32([np.pi])},
        local_params={
            "phi": (rng.standard_normal((12, 2)), [np.arange(12), {"deep": np.zeros((12, 0))}]),
            "none": None,
            "a": {"flag": np.array([True, False]), "small": np.float32([1e-45])},
            "empty": ((), [], {}),
        },
        trace=trace,
        status=pdvi.Status.DIVERGED,
        state={"server.h": np.full(3, np.nan), "own.count": np.int32(4) * np.ones((), np.int32), "a/b": np.zeros(0)},
        solver={"class": "P2DVI", "eta": {"lam": [0.1, 1e-300]}, "exploration": None},
        data="crc32:00c0ffee",
    )
    assert_kept(result, tmp_path / "run.pdvi")


class Pair(NamedTuple):
    """Fields out of alphabetical order."""

    second: jax.Array
    first: jax.Array


class Paired:
    def init_global(self, key):
        return {"lam": jnp.ones(2)}

    def init_local(self, key, shard):
        return Pair(shard, 10 * shard)

    def loss(self, local, globals_, shard):
        return jnp.sum((globals_["lam"] - shard) ** 2) + local.second**2 + (local.first - shard) ** 2


def test_named_tuples_keep_their_order(tmp_path):
    paired = pdvi.Problem(Paired(), np.arange(1.0, 5))
    result = pdvi.fit(paired, SOLVER, max_epochs=2)
    result.save(tmp_path / "run")
    again = pdvi.fit(paired, SOLVER, max_epochs=2, start=tmp_path / "run")  # nothing left to do
    assert_same_bits(result.local_params, again.local_params)


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ({1: np.ones(12)}, r"must have text keys to be saved, got \[1\]"),
        ({"a": object()}, "must be dicts, lists, tuples and arrays to be saved, got <class 'object'>"),
    ],
)
def test_locals_that_cannot_be_kept_are_named(tmp_path, local, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(short(), local_params=local).save(tmp_path / "run")
    assert os.listdir(tmp_path) == []


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no result file at '.*nothing'; give the path that was saved"):
        load_result(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="no result file at"):
        load_result(tmp_path)


def test_a_directory_is_no_place_to_save(tmp_path):
    with pytest.raises(ValueError, match=r"cannot write '.*': it is a directory; give a file name"):
        short().save(tmp_path)
    assert os.listdir(tmp_path) == []


def damaged_files(content):
    middle = len(content) // 2
    yield "empty", b""
    yield "text", b"not a zip file at all"
    for cut in (100, middle, len(content) - 1):
        yield f"cut after {cut}", content[:cut]
    yield "start gone", content[middle:]


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "run.pdvi"
    short().save(path)
    for name, content in damaged_files(path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"is not a pdvi result file, or it is damaged .*; save it again"):
            pytest.fail(f"{name}: {load_result(path)}")


def test_a_changed_byte_in_an_array_is_noticed(tmp_path):
    path = tmp_path / "run.pdvi"
    short().save(path)
    content = path.read_bytes()
    at = content.index(short().global_params["lam"].tobytes())
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(ValueError, match="it is damaged"):
        load_result(path)


def test_another_zip_file_is_named(tmp_path):
    path = tmp_path / "other.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("hello.txt", "hello")
    with pytest.raises(ValueError, match="is not a pdvi result file"):
        load_result(path)


def test_a_file_is_overwritten(tmp_path):
    path = tmp_path / "run.pdvi"
    path.write_text("something else")
    short().save(path)
    fit(max_epochs=1).save(path)
    assert load_result(path).n_steps == 4
    assert os.listdir(tmp_path) == ["run.pdvi"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "run.pdvi"
    short().save(path)
    before = path.read_bytes()

    def no_space(*arguments):
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", no_space)
        with pytest.raises(OSError, match="no space left"):
            fit(max_epochs=1).save(path)
        with pytest.raises(OSError, match="no space left"):
            short().save(tmp_path / "new")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["run.pdvi"]


def test_the_content_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    order, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (order.append("fsync"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *names: (order.append("rename"), replace(*names)))
    short().save(tmp_path / "run")
    assert order == ["fsync", "rename", "fsync"]  # the file, the name, the directory


def test_files_hold_numbers_and_json_only(tmp_path):
    """No pickle: every member is zarr metadata in JSON or one chunk of raw numbers."""
    path = tmp_path / "run.pdvi"
    short().save(path)
    raw = [leaf.tobytes() for leaf in jax.tree.leaves((short().global_params, short().local_params, short().state))]
    with zipfile.ZipFile(path) as file:
        names = set(file.namelist())
        chunks = [name for name in names if not name.endswith("zarr.json")]
        assert all(file.read(name).lstrip().startswith(b"{") for name in names - set(chunks))
        assert all("/c" in name for name in chunks)
        contents = [file.read(name) for name in chunks]
    assert all(value in contents for value in raw)
    trace = short().trace.drop(columns="event")
    allowed = raw + [trace[name].to_numpy().tobytes() for name in trace]
    assert all(content in allowed for content in contents)


@pytest.mark.parametrize("log_every", [1, 0.25])
@pytest.mark.parametrize("kept", ["result", "file", "text"])
def test_a_kept_run_goes_on_with_the_same_bits(tmp_path, log_every, kept):
    """Also from the middle of an epoch."""
    epochs = 2 if log_every == 1 else 1.75
    half = fit(max_epochs=epochs, log_every=log_every)
    assert half.n_steps == 4 * epochs
    half.save(tmp_path / "run")
    start = {"result": half, "file": tmp_path / "run", "text": str(tmp_path / "run")}[kept]
    again, whole = fit(start=start, log_every=log_every), fit(log_every=log_every)
    assert_same_bits(again.global_params, whole.global_params)
    assert_same_bits(again.local_params, whole.local_params)
    assert_same_bits(again.state, whole.state)
    assert_same(again, whole)
    assert (np.diff(again.trace["seconds"]) > 0).all()


@cache
def rough():
    """With eta = 50 the safeguard steps in twice, four epochs apart."""
    return pdvi.datasets.quadratic(n=12, condition=20, heterogeneity=0.8, linear=0.3, nonconvexity=0.05)


def rough_fit(max_epochs, start=None):
    return pdvi.fit(rough(), pdvi.PDVI(eta=50.0), batch_size=3, tol=0, max_epochs=max_epochs, start=start)


@pytest.mark.parametrize("later", [0, 2])
def test_a_run_that_went_wrong_goes_on_with_the_same_bits(x64, tmp_path, later):
    """The enlarged penalty is part of the state, and so must be the last good one. Told once, not again."""
    with pytest.warns(pdvi.SafeguardWarning):
        whole = rough_fit(16)
    events = whole.trace[whole.trace["event"] != ""]
    assert len(events) >= 2  # so the second comes after the pause
    with pytest.warns(pdvi.SafeguardWarning):
        rough_fit(events["epoch"].iloc[0] + later).save(tmp_path / "run")
    assert_same(rough_fit(16, start=tmp_path / "run"), whole)


def test_a_checkpoint_is_the_result(tmp_path):
    result = fit(checkpoint=tmp_path / "run")
    assert_same(load_result(tmp_path / "run"), result)
    assert load_result(tmp_path / "run").status is result.status


def test_checkpoints_are_written_at_log_points(tmp_path):
    path = tmp_path / "run"
    found = []

    def look(progress):
        found.append(load_result(path).n_steps if path.exists() else None)

    fit(checkpoint=pdvi.Checkpoint(path, every_seconds=0), callbacks=[look])
    assert found == [None, 4, 8, 12]
    path.unlink()
    found.clear()
    fit(checkpoint=pdvi.Checkpoint(path, every_seconds=1e6), callbacks=[look])
    assert found == [None] * 4
    assert load_result(path).n_steps == 12


def test_an_unfinished_checkpoint_says_how_to_go_on(tmp_path):
    kept = []

    def look(progress):
        if progress.record["step"] == 8:
            kept.append(load_result(tmp_path / "run"))

    whole = fit(checkpoint=pdvi.Checkpoint(tmp_path / "run", every_seconds=0), callbacks=[look])
    assert kept[0].status is pdvi.Status.RUNNING
    assert "go on with start=" in str(kept[0].status)
    assert_same(fit(start=kept[0]), whole)


def test_another_solvers_result_is_a_starting_point(tmp_path):
    first = fit(pdvi.PDVI(eta=0.1), max_epochs=2)
    first.save(tmp_path / "run")
    states = []
    result = fit(start=tmp_path / "run", seed=5, callbacks=[lambda progress: states.append(progress.state)])
    assert result.trace["step"].tolist() == [0, 4, 8, 12]
    assert result.seed == 5
    assert result.trace["objective"][0] == first.objective
    assert result.solver != first.solver
    np.testing.assert_array_equal(states[0].lam, first.global_params["lam"])
    np.testing.assert_array_equal(states[0].local, first.local_params)


def test_another_step_size_is_another_solver():
    first = fit(pdvi.PDVI(eta=0.1), max_epochs=2)
    assert fit(pdvi.PDVI(eta=0.2), start=first, max_steps=1).n_steps == 1
    assert fit(pdvi.PDVI(eta=0.1), start=first, max_steps=9).n_steps == 9


def test_another_array_of_step_sizes_is_another_solver():
    first = fit(pdvi.P2DVI(eta={"lam": np.full(5, 0.1)}), max_epochs=2)
    second = fit(pdvi.P2DVI(eta={"lam": np.full(5, 1e-6)}), start=first, max_steps=9)
    assert second.trace["step"].tolist() == [0, 4, 8, 9]
    np.testing.assert_allclose(second.global_params["lam"], first.global_params["lam"], rtol=1e-3)
