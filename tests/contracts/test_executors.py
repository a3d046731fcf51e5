"""Memory, disk and cluster give the same numbers for the same draws, and a cluster may lose workers on the way."""

import contextlib
import errno
import os
import random
import signal
import time

import jax
import numpy as np
import pytest

import pdvi
from models_for_tests import largest_difference, numbers, tissue_problem
from pdvi.executors.crew import Crew

pytestmark = pytest.mark.filterwarnings("ignore")  # of dask about workers that are killed on purpose

TIMEOUT = 6.0


PROBLEMS = {
    "tissue": tissue_problem,
    "quadratic": lambda: pdvi.datasets.quadratic(n=12, condition=20, heterogeneity=0.8, linear=0.3),
}


@pytest.fixture(scope="module", params=PROBLEMS)
def both(request, tmp_path_factory):
    """A problem in memory and the same in a store."""
    problem = PROBLEMS[request.param]()
    path = tmp_path_factory.mktemp("stores") / request.param
    pdvi.write_store(path, problem)
    return problem, pdvi.Problem.from_store(path)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_three_executors_one_run(both, cluster, batch_size):
    in_memory, stored = both
    settings = {"batch_size": batch_size, "max_epochs": 6, "tol": 0, "seed": 3}
    memory = pdvi.fit(in_memory, pdvi.P2DVI(), **settings)
    disk = pdvi.fit(stored, pdvi.P2DVI(), executor=pdvi.Disk(), **settings)
    dask = pdvi.fit(stored, pdvi.P2DVI(), executor=pdvi.Dask(cluster[1]), **settings)
    assert memory.n_steps == disk.n_steps == dask.n_steps
    for found in (disk, dask):
        for name, value in memory.global_params.items():
            np.testing.assert_allclose(found.global_params[name], value, rtol=0, atol=1e-6 * np.abs(value).max())
        # float32: probabilities are exponentials of sums, and as far from those in float64 as from each other
        assert largest_difference(memory, found) < 4e-6
    size = max(np.abs(value).max() for value in memory.global_params.values())
    for name in ("objective", "consensus", "grad_norm"):
        scale = memory.trace[name].abs().max()
        if name == "consensus":  # differences of globals, with the rounding of these
            scale = max(scale, size)
        np.testing.assert_allclose(disk.trace[name], memory.trace[name], rtol=1e-6, atol=1e-6 * scale)
        np.testing.assert_allclose(dask.trace[name], memory.trace[name], rtol=1e-6, atol=1e-6 * scale)
    if batch_size == 1:  # one shard per step: nothing is added in another order
        assert all(np.array_equal(a, b) for a, b in zip(numbers(disk), numbers(dask), strict=True))


def test_in_double_precision_all_agree(x64, cluster, tmp_path):
    problem = tissue_problem()
    pdvi.write_store(tmp_path / "store", problem)
    stored = pdvi.Problem.from_store(tmp_path / "store")
    settings = {"batch_size": 2, "max_epochs": 5, "tol": 0}
    memory = pdvi.fit(problem, pdvi.PDVI(), **settings)
    for executor in (pdvi.Disk(), pdvi.Dask(cluster[1])):
        assert largest_difference(memory, pdvi.fit(stored, pdvi.PDVI(), executor=executor, **settings)) < 1e-10


METHODS = [
    pdvi.SVI(),
    pdvi.PGSVI(),
    pdvi.SNGVI(),
    pdvi.MemoizedVB(),
    pdvi.CAVI(),
    pdvi.ControlVariates(rate=1e-5),
    pdvi.SGD(rate=1e-5),
    pdvi.Adam(),
]


@pytest.mark.slow
@pytest.mark.parametrize("solver", METHODS, ids=lambda solver: type(solver).__name__)
def test_every_method_runs_where_the_shards_are(x64, cluster, tmp_path, solver):
    problem = tissue_problem(400, 4)
    pdvi.write_store(tmp_path / "store", problem)
    stored = pdvi.Problem.from_store(tmp_path / "store")
    settings = {"batch_size": None if solver.full_batch else 2, "max_epochs": 3, "tol": 0}
    memory = pdvi.fit(problem, solver, **settings)
    on_workers = [pdvi.Dask(cluster[1])] if isinstance(solver, pdvi.MemoizedVB | pdvi.SVI) else []
    for executor in (pdvi.Disk(), *on_workers):
        found = pdvi.fit(stored, solver, executor=executor, **settings)
        np.testing.assert_allclose(found.trace["objective"], memory.trace["objective"], rtol=1e-10)
        assert largest_difference(memory, found) < 1e-9


@pytest.mark.slow
def test_whoever_answers_first_leads_to_the_same_optimum(both, cluster):
    in_memory, stored = both
    settings = {"batch_size": 2, "max_epochs": 60, "tol": 0}
    expected = pdvi.fit(in_memory, pdvi.P2DVI(), **settings).objective
    found = pdvi.fit(stored, pdvi.P2DVI(), executor=pdvi.Dask(cluster[1], asynchronous=True), **settings)
    assert found.objective == pytest.approx(expected, rel=1e-6)


def test_a_start_with_known_local_variables_stays_put(both, cluster):
    in_memory, stored = both
    optimum = pdvi.fit(in_memory, pdvi.P2DVI(), batch_size=1, max_epochs=60, tol=0)
    for executor in (pdvi.Disk(), pdvi.Dask(cluster[1])):
        again = pdvi.fit(
            stored, pdvi.P2DVI(scale=0.2), batch_size=1, max_epochs=1, start=optimum.point, executor=executor
        )
        np.testing.assert_allclose(again.trace["objective"], optimum.objective, rtol=1e-6)


def test_other_places_are_told_apart(both, cluster):
    in_memory, stored = both
    for executor in (pdvi.Disk(), pdvi.Dask(cluster[1])):
        with pytest.raises(ValueError, match="`problem` must come from a store"):
            pdvi.fit(in_memory, pdvi.P2DVI(), executor=executor)
    with pytest.raises(ValueError, match=r"`problem` must be in memory .* use problem.load\(\)"):
        pdvi.fit(stored, pdvi.P2DVI(), executor=pdvi.Memory())
    with pytest.raises(ValueError, match="`client` must be a"):
        pdvi.Dask("tcp://nowhere")
    with pytest.raises(ValueError, match="`timeout` must be positive"):
        pdvi.Dask(cluster[1], timeout=0)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", "dask"])
def test_an_unfinished_run_goes_on_from_its_checkpoint(both, cluster, tmp_path, place):
    in_memory, stored = both
    make = (lambda: pdvi.Disk()) if place == "disk" else (lambda: pdvi.Dask(cluster[1]))
    expected = pdvi.fit(in_memory, pdvi.P2DVI(), batch_size=2, max_epochs=80, tol=0).objective
    path = tmp_path / "run"

    class Killed(BaseException):
        pass

    def kill(progress):
        if progress.record["epoch"] >= 10:
            raise Killed

    keep = pdvi.Checkpoint(path, every_seconds=0)
    with pytest.raises(Killed):
        pdvi.fit(stored, pdvi.P2DVI(), batch_size=2, tol=0, checkpoint=keep, callbacks=[kill], executor=make())
    assert pdvi.load_result(path).n_steps > 0
    resumed = pdvi.fit(stored, pdvi.P2DVI(), start=path, max_epochs=80, tol=0, executor=make())
    assert resumed.trace["epoch"].is_monotonic_increasing
    assert resumed.objective == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["place", "submit"])  # before a worker has a host, and while it reads
def test_a_worker_lost_while_shards_are_loaded_is_replaced(cluster, tmp_path, monkeypatch, moment):
    problem = PROBLEMS["quadratic"]()
    pdvi.write_store(tmp_path / "store", problem)
    executor, client = pdvi.Dask(cluster[1]), cluster[1]
    client.wait_for_workers(2)
    original, killed = getattr(Crew, moment), []

    def then_kill(*arguments):
        found = original(*arguments)
        if not killed:
            killed.extend(client.run(os.getpid).values())
            os.kill(killed[0], signal.SIGKILL)
        return found

    monkeypatch.setattr(Crew, moment, then_kill)
    settings = {"batch_size": 2, "max_epochs": 60, "tol": 0}
    found = pdvi.fit(pdvi.Problem.from_store(tmp_path / "store"), pdvi.P2DVI(), executor=executor, **settings)
    assert "is gone" in " ".join(found.trace["event"])
    assert found.objective == pytest.approx(pdvi.fit(problem, pdvi.P2DVI(), **settings).objective, rel=1e-6)


def test_a_full_disk_leaves_the_old_checkpoint_and_the_run(both, tmp_path, monkeypatch):
    _, stored = both
    path = tmp_path / "run"
    pdvi.fit(stored, pdvi.P2DVI(), max_epochs=1, checkpoint=path)
    before = path.read_bytes()

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pdvi.core.result_file._write", full)
    keep = pdvi.Checkpoint(path, every_seconds=0)
    with pytest.warns(pdvi.CheckpointWarning, match="No space left on device; the one before is kept"):
        result = pdvi.fit(stored, pdvi.P2DVI(), max_epochs=3, tol=0, checkpoint=keep)
    assert result.n_steps == 3 * stored.n_shards
    assert path.read_bytes() == before


@pytest.mark.slow
def test_bytes_through_the_client_do_not_grow_with_the_shards(cluster, tmp_path):
    """Four times the spots per shard: the same through the client; halo rows, between workers, at most twice."""
    through, between = {}, {}
    for n_spots in (1_600, 6_400):
        path = tmp_path / str(n_spots)
        pdvi.write_store(path, tissue_problem(n_spots, n_patches=4))
        executor = pdvi.Dask(cluster[1])
        problem = pdvi.Problem.from_store(path)
        pdvi.fit(problem, pdvi.P2DVI(eta=0.1), batch_size=1, max_epochs=4, tol=0, executor=executor)
        halo = 4 * 4 * problem.store.halo.shape[1]  # float32, four domains
        globals_ = 4 * problem.n_global
        traffic = executor.traffic
        assert traffic.visits == 16
        # lam0 out; the penalty only when it is new (once here, for two workers)
        assert traffic.sent / traffic.visits < globals_ + globals_ * 2 / 16 + 1_000
        assert traffic.received / traffic.visits < globals_ + 1_000
        assert traffic.halo_between > 0
        assert traffic.halo_between + traffic.halo_within <= 16 * halo
        through[n_spots], between[n_spots] = traffic.sent + traffic.received, traffic.halo_between
    assert through[6_400] == pytest.approx(through[1_600], rel=0.01)  # lists of numbers, as text of some digits
    assert between[6_400] < 2.1 * between[1_600]

    same = []
    for n in (2_000, 8_000):
        data = pdvi.datasets.mixture(n, dim=4, n_components=3, batch_size=n // 4)
        pdvi.write_store(tmp_path / f"rows {n}", data.problem())
        executor = pdvi.Dask(cluster[1])
        problem = pdvi.Problem.from_store(tmp_path / f"rows {n}")
        pdvi.fit(problem, pdvi.P2DVI(), batch_size=1, max_epochs=2, tol=0, executor=executor)
        same.append((executor.traffic.sent, executor.traffic.received))
    assert same[0] == same[1]


@pytest.mark.slow
def test_the_dashboard_names_what_workers_are_at(cluster, both):
    """By the names that its profile offers: one for each stage."""
    named = set()

    def ask(progress):
        for _, found in cluster[1].run(_profiled).items():
            named.update(found)

    pdvi.fit(both[1], pdvi.P2DVI(), max_epochs=3, tol=0, executor=pdvi.Dask(cluster[1]), callbacks=[ask])
    assert {"pdvi.begin_with", "pdvi.visit_shards", "pdvi.look_at_shards"} <= named


def _profiled(dask_worker):
    return {name for _, part in dask_worker.profile_keys_history for name in part} | set(dask_worker.profile_keys)


class Chaos:
    """Kills, freezes or adds a worker at a log point, in random order; never the last that works."""

    def __init__(self, cluster, client, seed):
        self.cluster, self.client = cluster, client
        self.dice = random.Random(seed)
        self.moves = ["kill"] * 5 + ["hang"] * 2 + ["join"] * 3
        self.dice.shuffle(self.moves)
        self.frozen = []

    def __call__(self, progress):
        if self.moves and progress.record["step"] > 0:
            pids = list(self.client.run(os.getpid, workers=self.answering()).values())
            move = "join" if len(pids) < 2 else self.moves.pop()
            if move == "join":
                self.cluster.scale(len(self.cluster.workers) + 1)
                self.client.wait_for_workers(len(self.client.nthreads()) + 1, timeout=60)
            elif move == "kill":
                os.kill(self.dice.choice(pids), signal.SIGKILL)
            else:
                self.frozen.append(self.dice.choice(pids))
                os.kill(self.frozen[-1], signal.SIGSTOP)

    def answering(self):
        probes = {a: self.client.submit(os.getpid, workers=[a], pure=False) for a in self.client.nthreads()}
        until = time.monotonic() + 1.5
        while time.monotonic() < until and not all(probe.done() for probe in probes.values()):
            time.sleep(0.01)
        return [address for address, probe in probes.items() if probe.done()]

    def thaw(self):
        for pid in self.frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_ten_rounds_of_chaos_end_at_the_same_optimum(cluster, tmp_path):
    problem = tissue_problem()
    pdvi.write_store(tmp_path / "store", problem)
    stored = pdvi.Problem.from_store(tmp_path / "store")
    settings = {"batch_size": 2, "max_epochs": 60, "tol": 0}
    expected = pdvi.fit(problem, pdvi.P2DVI(), **settings).objective
    chaos = Chaos(*cluster, seed=5)
    executor = pdvi.Dask(cluster[1], timeout=TIMEOUT)
    try:
        result = pdvi.fit(stored, pdvi.P2DVI(), executor=executor, callbacks=[chaos], **settings)
    finally:
        chaos.thaw()
    assert not chaos.moves
    assert result.n_steps == 60 * 3
    assert result.objective == pytest.approx(expected, rel=1e-6)
    events = " ".join(result.trace["event"])
    assert events.count("is gone") >= 2  # a nanny may replace a killed worker that had no shards yet
    assert events.count("did not answer within") >= 1
    assert "joined" in events
    assert np.isfinite(jax.tree.leaves(result.local_params)[0]).all()


@pytest.mark.slow
def test_workers_that_cannot_reach_each_other_are_told_apart_from_lost_ones(cluster, tmp_path):
    client = cluster[1]
    client.wait_for_workers(2)
    workers = set(client.nthreads())

    def cut_off(dask_worker):
        dask_worker.whole = dask_worker.rpc.connect

        async def connect(address, *arguments, **named):
            if address in workers:
                msg = "no route to host"
                raise OSError(msg)
            return await dask_worker.whole(address, *arguments, **named)

        dask_worker.rpc.connect = connect

    def join(dask_worker):
        dask_worker.rpc.connect = dask_worker.whole

    pdvi.write_store(tmp_path / "store", tissue_problem())
    stored = pdvi.Problem.from_store(tmp_path / "store")
    client.run(cut_off)
    try:
        with pytest.raises(RuntimeError, match=r"must reach each other.*could not ask.*no route to host.*open the"):
            pdvi.fit(stored, pdvi.P2DVI(), max_epochs=2, executor=pdvi.Dask(client))
    finally:
        client.run(join)
    assert pdvi.fit(stored, pdvi.P2DVI(), max_epochs=2, tol=0, executor=pdvi.Dask(client)).n_steps > 0
