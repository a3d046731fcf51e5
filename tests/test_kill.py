"""A run that is killed again and again ends where an undisturbed one does."""

import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest

import pdvi

pytestmark = pytest.mark.slow

KILLS, EPOCHS = 10, 1_000  # on a fast machine ten children make some 250

CHILD = """
import sys
from pathlib import Path
import pdvi

path = Path(sys.argv[1])
problem = pdvi.datasets.quadratic(n=40, condition=20, heterogeneity=0.8, linear=0.3)
pdvi.fit(
    problem,
    pdvi.P2DVI(),
    batch_size=4,
    max_epochs=int(sys.argv[2]),
    tol=0,
    checkpoint=pdvi.Checkpoint(path, every_seconds=float(sys.argv[3])),
    start=path if path.exists() else None,
)
"""


def written(path):
    return path.stat().st_mtime_ns if path.exists() else None


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    script, path, whole_path = tmp_path / "child.py", tmp_path / "run" / "state.pdvi", tmp_path / "whole.pdvi"
    script.write_text(CHILD)
    path.parent.mkdir()
    environment = {  # so that only the undisturbed run, the first, waits for the compiler
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start(path, every_seconds):
        arguments = [sys.executable, str(script), str(path), str(EPOCHS), str(every_seconds)]
        return subprocess.Popen(arguments, env=environment)

    assert start(whole_path, 1e9).wait() == 0

    moments = random.Random(0)
    reached = [0]
    for _ in range(KILLS):
        before = written(path)
        child = start(path, 0)
        try:
            while written(path) == before:
                assert child.poll() is None, "the child ended by itself"
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.3))
        finally:
            child.kill()
        assert child.wait() == -signal.SIGKILL
        reached.append(pdvi.load_result(path).n_steps)
    assert all(a < b for a, b in pairwise(reached))  # every child went on from where the last was killed
    assert reached[-1] < 10 * EPOCHS  # ten steps per epoch: the last, too, was killed in the middle

    assert start(path, 1e9).wait() == 0
    resumed, whole = pdvi.load_result(path), pdvi.load_result(whole_path)
    assert resumed.n_steps == whole.n_steps == 10 * EPOCHS
    assert resumed.trace["objective"].tolist() == whole.trace["objective"].tolist()
    np.testing.assert_array_equal(resumed.global_params["lam"], whole.global_params["lam"])
    np.testing.assert_array_equal(resumed.local_params, whole.local_params)
    assert list(resumed.state) == list(whole.state)
    for a, b in zip(resumed.state.values(), whole.state.values(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert os.listdir(path.parent) == [path.name]  # nothing half-written is left


STREAMING_CHILD = """
import sys
import pdvi

stored = pdvi.Problem.from_store(sys.argv[1])
pdvi.fit(
    stored,
    pdvi.P2DVI(),
    batch_size=4,
    max_epochs=1e6,
    tol=0,
    checkpoint=pdvi.Checkpoint(sys.argv[2], every_seconds=0),
    executor=pdvi.Disk(),
)
"""


def test_a_killed_run_from_a_store_goes_on_to_the_same_optimum(tmp_path):
    script, store, path = tmp_path / "child.py", tmp_path / "store", tmp_path / "state.pdvi"
    script.write_text(STREAMING_CHILD)
    problem = pdvi.datasets.quadratic(n=40, condition=20, heterogeneity=0.8, linear=0.3)
    pdvi.write_store(store, problem)
    child = subprocess.Popen([sys.executable, str(script), str(store), str(path)])
    try:
        while not path.exists():
            assert child.poll() is None, "the child ended by itself"
            time.sleep(0.001)
    finally:
        child.kill()
    assert child.wait() == -signal.SIGKILL
    steps = pdvi.load_result(path).n_steps
    stored = pdvi.Problem.from_store(store)
    resumed = pdvi.fit(stored, pdvi.P2DVI(), start=path, max_steps=steps + 2_000, tol=0, executor=pdvi.Disk())
    whole = pdvi.fit(problem, pdvi.P2DVI(), batch_size=4, max_epochs=200, tol=0)
    assert resumed.n_steps > steps
    np.testing.assert_allclose(resumed.objective, whole.objective, rtol=1e-6)
    assert sorted(os.listdir(store.parent)) == ["child.py", "state.pdvi", "store"]  # no scratch is left
