"""P2D-VI explores a tissue of many patches the same way wherever the patches are, and whatever happens meanwhile."""

import contextlib
import os
import signal

import numpy as np
import pytest

import pdvi
from models_for_tests import largest_difference, tissue_problem

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]  # of dask about workers that are killed on purpose

PATCHES = 32
EXPLORED = [*3 * [""], *3 * ["exploring"], ""]


@pytest.fixture(scope="module")
def tissue(tmp_path_factory):
    """A tissue in memory, and where it is stored."""
    problem = tissue_problem(1_600, PATCHES, poor=True)
    path = tmp_path_factory.mktemp("stores") / "tissue"
    pdvi.write_store(path, problem)
    return problem, path


@pytest.mark.parametrize(("poor", "event"), [(True, ""), (False, "warm-up did not improve the objective")])
def test_three_executors_one_exploration(x64, cluster, tmp_path, poor, event):
    problem = tissue_problem(1_600, PATCHES, poor)
    pdvi.write_store(tmp_path / "store", problem)
    stored = pdvi.Problem.from_store(tmp_path / "store")
    settings = {"batch_size": 2, "max_epochs": 7, "tol": 0, "seed": 3}
    memory = pdvi.fit(problem, pdvi.P2DVI(), **settings)
    assert memory.trace["event"].tolist()[:7] == [*EXPLORED[:6], event]
    for executor in (pdvi.Disk(), pdvi.Dask(cluster[1])):
        found = pdvi.fit(stored, pdvi.P2DVI(), executor=executor, **settings)
        assert found.trace["event"].tolist() == memory.trace["event"].tolist()
        for name in ("objective", "consensus", "grad_norm"):
            scale = memory.trace[name].abs().max()
            np.testing.assert_allclose(found.trace[name], memory.trace[name], rtol=1e-10, atol=1e-10 * scale)
        assert largest_difference(memory, found) < 1e-9


def test_in_single_precision_too(tissue, cluster):
    problem, path = tissue
    stored = pdvi.Problem.from_store(path)
    settings = {"batch_size": 2, "max_epochs": 7, "tol": 0, "seed": 3}
    memory = pdvi.fit(problem, pdvi.P2DVI(), **settings)
    for executor in (pdvi.Disk(), pdvi.Dask(cluster[1])):
        found = pdvi.fit(stored, pdvi.P2DVI(), executor=executor, **settings)
        np.testing.assert_allclose(found.trace["objective"], memory.trace["objective"], rtol=1e-6)
        for name, value in memory.global_params.items():
            np.testing.assert_allclose(found.global_params[name], value, rtol=0, atol=3e-6 * np.abs(value).max())
        assert largest_difference(memory, found) < 4e-6


def test_exploring_asked_for_and_left_out(tissue):
    stored = pdvi.Problem.from_store(tissue[1])
    asked = pdvi.fit(stored, pdvi.P2DVI(exploration=1, eta=0.1), max_epochs=4, tol=0)
    assert asked.trace["event"].tolist() == ["", "", "", "exploring", ""]
    without = pdvi.fit(stored, pdvi.P2DVI(exploration=0), max_epochs=2, tol=0)
    assert without.trace["event"].tolist() == ["", "consensus initialization", ""]
    pdvi.write_store(tissue[1].with_name("quadratic"), pdvi.datasets.quadratic(n=40))
    other = pdvi.Problem.from_store(tissue[1].with_name("quadratic"))
    with pytest.raises(ValueError, match="P2DVI needs a model with 'statistics'"):
        pdvi.fit(other, pdvi.P2DVI(exploration=1))


def test_answers_in_any_order_follow_an_exploration_in_step(tissue, cluster):
    problem, path = tissue
    stored = pdvi.Problem.from_store(path)
    settings = {"batch_size": 2, "max_epochs": 40, "tol": 0}
    expected = pdvi.fit(problem, pdvi.P2DVI(), **settings)
    found = pdvi.fit(stored, pdvi.P2DVI(), executor=pdvi.Dask(cluster[1], asynchronous=True), **settings)
    assert found.trace["event"].tolist()[:7] == EXPLORED
    np.testing.assert_allclose(found.trace["objective"][3:6], expected.trace["objective"][3:6], rtol=1e-6)
    assert found.objective == pytest.approx(expected.objective, rel=1e-6)


class Killed(BaseException):
    """As if the process had ended here."""


@pytest.mark.parametrize(("place", "epochs"), [("disk", 4), ("disk", 5), ("dask", 4)])  # 5: handing over is to come
def test_a_run_goes_on_from_the_middle_of_exploring(tissue, cluster, tmp_path, place, epochs):
    problem, path = tissue
    stored, kept = pdvi.Problem.from_store(path), tmp_path / "kept"
    make = pdvi.Disk if place == "disk" else lambda: pdvi.Dask(cluster[1])
    expected = pdvi.fit(problem, pdvi.P2DVI(), batch_size=2, max_epochs=40, tol=0).objective

    def kill(progress):
        if progress.record["epoch"] == epochs:
            raise Killed

    keep = pdvi.Checkpoint(kept, every_seconds=0)
    with pytest.raises(Killed):
        pdvi.fit(stored, pdvi.P2DVI(), batch_size=2, tol=0, callbacks=[kill], checkpoint=keep, executor=make())
    assert pdvi.load_result(kept).trace["event"].iloc[-1] == "exploring"
    resumed = pdvi.fit(stored, pdvi.P2DVI(), start=kept, max_epochs=40, tol=0, executor=make())
    assert resumed.trace["event"].tolist()[:7] == EXPLORED
    assert resumed.objective == pytest.approx(expected, rel=1e-6)


def test_workers_lost_while_exploring_cost_no_more_than_later(tissue, cluster):
    """One is killed, one hangs, one is killed when statistics of all patches are asked for."""
    problem, path = tissue
    cluster, client = cluster
    expected = pdvi.fit(problem, pdvi.P2DVI(), batch_size=2, max_epochs=40, tol=0).objective
    executor, stopped = pdvi.Dask(client, timeout=6.0), []

    def disturb(progress):
        """Only workers that have shards, and answer."""
        if 3 <= progress.record["epoch"] <= 5:
            workers = [address for address, member in executor.crew.members.items() if member.shards]
            pid = client.run(os.getpid, workers=workers[:1])[workers[0]]
            stopped.append(pid)
            os.kill(pid, signal.SIGSTOP if progress.record["epoch"] == 4 else signal.SIGKILL)
            if len(workers) == 1:
                cluster.scale(len(cluster.workers) + 1)

    stored = pdvi.Problem.from_store(path)
    try:
        found = pdvi.fit(
            stored, pdvi.P2DVI(), batch_size=2, max_epochs=40, tol=0, executor=executor, callbacks=[disturb]
        )
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    events = found.trace["event"].tolist()
    assert all(event.startswith("exploring") for event in events[3:6])
    assert "is gone" in events[4]
    assert "did not answer within" in events[5]
    assert "is gone" in events[6]
    assert found.objective == pytest.approx(expected, rel=1e-6)
