"""A process that works on a store or with a cluster is killed or interrupted: what it kept is enough to go on."""

import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import psutil
import pytest

import pdvi

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]  # of dask about clients and workers that end without a word

# As a user's script would; the log points are told, so that the test knows when a run is under way.
CHILD = """
import contextlib
import signal
import sys

import distributed

import pdvi


def told(progress):
    print("logged", flush=True)


def main(store, kept, place):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell runs in the background
    with contextlib.ExitStack() as stack:
        if place == "disk":
            executor = pdvi.Disk()
        else:
            settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
            client = distributed.Client(**settings) if place == "own" else distributed.Client(place)
            executor = pdvi.Dask(stack.enter_context(client), timeout=20)
        result = pdvi.fit(
            pdvi.Problem.from_store(store),
            pdvi.P2DVI(),
            batch_size=10,
            max_epochs=1e6,
            tol=0,
            checkpoint=pdvi.Checkpoint(kept, every_seconds=0),
            executor=executor,
            callbacks=[told],
        )
        print(result.status.name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Has the script and a store."""
    folder = tmp_path_factory.mktemp("ends")
    (folder / "child.py").write_text(CHILD)
    pdvi.write_store(folder / "store", problem())
    return folder


def problem():
    return pdvi.datasets.quadratic(n=40, condition=20, heterogeneity=0.8, linear=0.3)


@pytest.fixture(scope="module")
def optimum():
    return pdvi.fit(problem(), pdvi.P2DVI(), batch_size=10, max_epochs=200, tol=0).objective


def start(folder, kept, place):
    """The script in a session of its own, as at a terminal, after a few log points."""
    child = subprocess.Popen(
        [sys.executable, str(folder / "child.py"), str(folder / "store"), str(kept), place],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for _ in range(5):
        line = child.stdout.readline()
        if line != "logged\n":
            child.kill()
            pytest.fail(f"the child ended by itself: {line}")
    return child


def left_over(session):
    """Processes of the script that are still there, after a moment to leave."""
    until = time.monotonic() + 10
    while (found := [p for p in psutil.pids() if _session(p) == session]) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def _session(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def goes_on(folder, kept, executor, optimum):
    steps = pdvi.load_result(kept).n_steps
    stored = pdvi.Problem.from_store(folder / "store")
    budget = {"max_epochs": 1e6, "max_steps": steps + 200, "tol": 0}
    resumed = pdvi.fit(stored, pdvi.P2DVI(), start=kept, executor=executor, **budget)
    assert resumed.n_steps == steps + 200
    assert resumed.objective == pytest.approx(optimum, rel=1e-6)


def test_a_client_that_is_killed_goes_on_as_another(folder, cluster, optimum, tmp_path):
    child = start(folder, tmp_path / "kept", cluster[0].scheduler_address)
    child.kill()
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert pdvi.load_result(tmp_path / "kept").status is pdvi.Status.RUNNING
    goes_on(folder, tmp_path / "kept", pdvi.Dask(cluster[1]), optimum)
    assert cluster[1].run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)) == 0  # both runs are forgotten


def interrupt(child):
    """Ctrl-C at a terminal: it tells all processes of the session.

    Python drops the exception if it is just collecting garbage; then a person presses again.
    """
    for _ in range(3):
        os.killpg(child.pid, signal.SIGINT)
        try:
            said, _ = child.communicate(timeout=30)
            break
        except subprocess.TimeoutExpired:
            continue
    else:
        os.killpg(child.pid, signal.SIGKILL)
        pytest.fail("it does not end")
    assert said.split()[-1] == "INTERRUPTED"
    assert child.returncode == 0
    assert left_over(child.pid) == []


@pytest.mark.parametrize("place", ["disk", "cluster"])
def test_an_interrupted_run_returns_what_it_has(folder, cluster, optimum, tmp_path, place):
    kept = tmp_path / "kept"
    interrupt(start(folder, kept, place if place == "disk" else cluster[0].scheduler_address))
    result = pdvi.load_result(kept)
    assert result.status is pdvi.Status.INTERRUPTED
    assert result.trace["event"].iloc[-1].startswith("interrupted: the last logged state")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((result.global_params, result.local_params)))
    assert sorted(os.listdir(folder)) == ["child.py", "store"]  # no scratch
    goes_on(folder, kept, pdvi.Disk() if place == "disk" else pdvi.Dask(cluster[1]), optimum)


def test_workers_that_are_interrupted_too_leave_the_globals(folder, cluster, optimum, tmp_path):
    kept = tmp_path / "kept"
    interrupt(start(folder, kept, "own"))
    result = pdvi.load_result(kept)
    assert result.status is pdvi.Status.INTERRUPTED
    assert np.isfinite(result.global_params["lam"]).all()
    goes_on(folder, kept, pdvi.Dask(cluster[1]), optimum)
