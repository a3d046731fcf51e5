"""Other processes and threads, after a fit in this one."""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest

import pdvi


def objective(seed):
    problem = pdvi.datasets.quadratic(n=12, condition=20, seed=seed)
    return pdvi.fit(problem, pdvi.P2DVI(), batch_size=3, max_epochs=2, tol=0).objective


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.filterwarnings("ignore")  # of Python and JAX, about forks of processes with threads
def test_a_forked_process_says_why_it_cannot():
    objective(0)
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool,
        pytest.raises(RuntimeError, match=r"forked from one that had used JAX.*get_context\(.spawn.\)"),
    ):
        pool.submit(objective, 0).result(timeout=60)


def test_threads_and_spawned_processes_give_the_same():
    expected = objective(1)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(objective, [1, 1])) == [expected, expected]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(objective, 1).result(timeout=120) == pytest.approx(expected, rel=1e-6)
