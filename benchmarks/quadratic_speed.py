"""Speed on the paper's quadratic (10,000 shards), as ratios in one run: python benchmarks/quadratic_speed.py

The same algorithm from the same start with the same draws, three times: pdvi (compiled, float32), a NumPy loop
over the shards of a batch, and NumPy with stacked systems (both float64). All must arrive at the same lam.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

import pdvi

ETA = 1.5  # the best single step size of a seven-point grid
EPOCHS = 3
REPEATS = 7
FIRST_FIT = """
import time
began = time.perf_counter()
import pdvi
problem = pdvi.datasets.quadratic(n=10_000)
imported = time.perf_counter()
pdvi.fit(problem, pdvi.P2DVI(), batch_size=100, max_epochs=30, tol=0)
print(time.perf_counter() - imported, time.perf_counter() - began)
"""

Visit = Callable[["NumpyRun", np.ndarray], np.ndarray]


class NumpyRun:
    """The state of Algorithm 1 with a scalar penalty, before the first step."""

    def __init__(self, problem: pdvi.Problem):
        shards = {name: np.asarray(leaf, float) for name, leaf in problem.shards.items()}
        self.hessian, self.linear = 2 * shards["schur"], shards["linear"]
        self.gain, self.offset = shards["gain"], shards["offset"]
        n, dim = self.linear.shape
        self.lam0, self.h = np.ones(dim), np.zeros(dim)
        self.lam, self.duals = self.lam0, np.zeros((n, dim))
        self.local = np.zeros((n, self.gain.shape[1]))

    def run(self, visit: Visit, batches: np.ndarray) -> np.ndarray:
        """Gamma after one step per row of ``batches``."""
        for batch in batches:
            lam = visit(self, batch)
            self.h = self.h + (lam - self.lam0).sum(0) / len(self.duals)
            self.lam = lam.mean(0)
            self.lam0 = self.lam + self.h
        return self.lam


def one_by_one(run: NumpyRun, batch: np.ndarray) -> np.ndarray:
    """A loop over the shards: a 5 x 5 solve each."""
    penalty = np.eye(run.lam0.size) / ETA
    copies = []
    for b in batch:
        right = run.lam0 / ETA - run.duals[b] - run.linear[b]
        lam = np.linalg.solve(run.hessian[b] + penalty, right)
        run.local[b] = -run.gain[b] @ lam - run.offset[b]
        run.duals[b] += (lam - run.lam0) / ETA
        copies.append(lam)
    return np.array(copies)


def stacked(run: NumpyRun, batch: np.ndarray) -> np.ndarray:
    """The whole batch in one call of each routine."""
    penalty = np.eye(run.lam0.size) / ETA
    right = run.lam0 / ETA - run.duals[batch] - run.linear[batch]
    lam = np.linalg.solve(run.hessian[batch] + penalty, right[:, :, None])
    run.local[batch] = -(run.gain[batch] @ lam)[:, :, 0] - run.offset[batch]
    lam = lam[:, :, 0]
    run.duals[batch] += (lam - run.lam0) / ETA
    return lam


def compare(problem: pdvi.Problem, batch_size: int, visit: Visit) -> tuple[float, float]:
    """Seconds per step of pdvi and of NumPy: of all repeats, taken in turn, the shortest."""
    steps = EPOCHS * problem.n_shards // batch_size
    draws = pdvi.sampling.batches(pdvi.sampling.Reshuffled(), 0, 0, steps, problem.n_shards, batch_size)
    ours, theirs = [], []
    for _ in range(REPEATS):
        result = pdvi.fit(
            problem, pdvi.PDVI(eta=ETA), batch_size=batch_size, max_epochs=EPOCHS, tol=0, seed=0, progress=False
        )
        ours.append(np.diff(result.trace["seconds"]).min() * EPOCHS / steps)  # the first epoch may compile
        run = NumpyRun(problem)
        began = time.perf_counter()
        lam = run.run(visit, draws)
        theirs.append((time.perf_counter() - began) / steps)
        difference = np.abs(result.global_params["lam"] - lam).max() / np.abs(lam).max()
        if difference > 1e-3:
            msg = f"pdvi and {visit.__name__} must agree to 1e-3, but differ by {difference:.1e}."
            raise RuntimeError(msg)
    return min(ours), min(theirs)


def first_fit() -> tuple[float, float]:
    """Seconds of the first fit in a fresh process, and with imports and data."""
    runs = [
        subprocess.run([sys.executable, "-c", FIRST_FIT], check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    times = np.array([[float(word) for word in run.split()] for run in runs]).min(0)
    return float(times[0]), float(times[1])


def main() -> None:
    problem = pdvi.datasets.quadratic(n=10_000, linear=1.0)  # not at the origin, so that lam can be compared
    table = Table("what", "pdvi", "NumPy", "NumPy / pdvi", "target", "")

    def row(what: str, ours: str, theirs: str, ratio: str, target: str, reached: bool) -> None:
        table.add_row(what, ours, theirs, ratio, target, "reached" if reached else "MISSED")

    ours, theirs = compare(problem, 100, one_by_one)
    what = "step of 100 shards, against a loop"
    row(what, f"{ours * 1e6:.0f} us", f"{theirs * 1e6:.0f} us", f"{theirs / ours:.1f}", ">= 20", theirs >= 20 * ours)
    ours, theirs = compare(problem, 1000, stacked)
    what = "step of 1,000 shards, against stacked"
    row(what, f"{ours * 1e6:.0f} us", f"{theirs * 1e6:.0f} us", f"{theirs / ours:.1f}", ">= 1/3", theirs >= ours / 3)
    fit, whole = first_fit()
    row("first fit in a fresh process", f"{fit:.1f} s", "", "", "< 10 s", fit < 10)
    row("the same with imports and data", f"{whole:.1f} s", "", "", "< 10 s", whole < 10)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
