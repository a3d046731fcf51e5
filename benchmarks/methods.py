"""Every method of the paper, tuned the same way, on four problems: python benchmarks/methods.py

    python benchmarks/methods.py --quick                        # one seed, a small budget
    python benchmarks/methods.py --problems tissue --seeds 3    # some of it

Every method with a step size is tuned on data of its own (seed 0) with the same number of trials of the same number of
epochs; then all run on fresh data, from the same start with the same draws. "Gap" is (F - best) / (F at the start -
best), with the best objective any method reached on those data. Seconds are those spent in the solver, compilation
excluded. Epochs and seconds are means over the seeds that arrived; a count says if not all did.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import pdvi
from pdvi import graphs
from pdvi.mixtures import empirical_bayes, potts_mixture_problem
from pdvi.reproduce.methods import METHODS, applicable, spelled
from pdvi.shards.partition import along_space, layout, median_cuts

TARGETS = (1e-3, 1e-4, 1e-5)
NAMES = tuple(method.name for method in METHODS)


def tissue(seed: int) -> pdvi.Problem:
    spots = pdvi.datasets.tissue_features(20_000, seed=seed)
    graph = graphs.weights(graphs.nearest(spots.coordinates, 8), spots.X)
    where = layout(median_cuts(spots.coordinates, 32), along_space(spots.coordinates))
    return potts_mixture_problem(spots.X, graph, empirical_bayes(spots.X, 23, seed=seed), where)


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem by seed, and how it is visited."""

    name: str
    make: Callable[[int], pdvi.Problem]
    batch_size: int
    epochs: int


CASES = {
    "quadratic": Case(
        "quadratic: 10,000 shards, 100 per step, optimum at the origin (the paper's)",
        lambda seed: pdvi.datasets.quadratic(n=10_000, seed=seed),
        100,
        40,
    ),
    "shifted": Case(
        "shifted quadratic: the same with linear terms, so that shards disagree at the optimum",
        lambda seed: pdvi.datasets.quadratic(n=10_000, linear=1.0, seed=seed),
        100,
        40,
    ),
    "biased": Case(
        "biased mixture: 100,000 rows, d = 10, K = 5, batches of 1,000, 95 % of one cluster",
        lambda seed: pdvi.datasets.mixture(seed=seed).problem(seed=seed),
        1,
        40,
    ),
    "iid": Case(
        "i.i.d. mixture: the same with batches drawn at random",
        lambda seed: pdvi.datasets.mixture(bias=0.0, seed=seed).problem(seed=seed),
        1,
        40,
    ),
    "tissue": Case("simulated tissue: 20,000 spots, 50 features, 23 domains, 32 patches", tissue, 1, 40),
}


def tuned_solvers(case: Case, epochs: int, trials: int, keep: Path | None) -> dict[str, tuple[Any, str]]:
    """Every method that can serve the problem, with the best settings found and their text."""
    problem = case.make(0)
    solvers = {}
    for method in applicable(NAMES, problem):
        if method.space is None:
            solvers[method.name] = method.solver, ""
            continue
        path = None if keep is None else keep / f"{case.name.split(':')[0]} {method.name}.jsonl".replace(" ", "_")
        tuned = pdvi.tune(
            problem,
            method.solver,
            method.space,
            trials=trials,
            batch_size=case.batch_size,
            max_epochs=epochs,
            path=path,
        )
        solvers[method.name] = tuned.solver, spelled(tuned.settings)
    return solvers


def runs(case: Case, solvers: dict[str, tuple[Any, str]], epochs: int, seed: int) -> dict[str, Any]:
    """The trace of every method on the data of one seed."""
    problem = case.make(seed)
    traces = {}
    for name, (solver, _) in solvers.items():
        size = None if solver.full_batch else case.batch_size
        for budget in (5, epochs):  # the first compiles, all stages of it
            result = pdvi.fit(problem, solver, batch_size=size, max_epochs=budget, tol=0, seed=seed, progress=False)
        traces[name] = result.trace
    return traces


def summary(traces: list[dict[str, Any]], name: str) -> list[str]:
    """Objective, gap, and epochs and seconds to each target."""
    gaps, arrivals = [], []
    for by_method in traces:
        trace = by_method[name]
        best = min(one["objective"].min() for one in by_method.values())
        gap = (trace["objective"] - best) / (trace["objective"].iloc[0] - best)
        gaps.append(gap.iloc[-1])
        reached = [np.flatnonzero(gap <= target) for target in TARGETS]
        arrivals.append([trace[["epoch", "seconds"]].to_numpy()[rows[:1]] for rows in reached])
    cells = [f"{np.mean([by_method[name]['objective'].iloc[-1] for by_method in traces]):.7g}", f"{np.mean(gaps):.1e}"]
    for target in range(len(TARGETS)):
        there = np.concatenate([one[target] for one in arrivals])
        if not len(there):
            cells.append("-")
            continue
        epochs, seconds = there.mean(0)
        count = "" if len(there) == len(traces) else f" [{len(there)}/{len(traces)}]"
        cells.append(f"{epochs:.1f} / {seconds:.2f}{count}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="data sets to run on (default 5)")
    parser.add_argument("--trials", type=int, default=30, help="tuning trials of every method (default 30)")
    parser.add_argument("--problems", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--keep", type=Path, help="folder for finished trials, so that a second call goes on")
    parser.add_argument("--quick", action="store_true", help="one seed, few trials of few epochs")
    chosen = parser.parse_args()
    seeds, trials = (1, 8) if chosen.quick else (chosen.seeds, chosen.trials)
    if chosen.keep is not None:
        chosen.keep.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if "COLUMNS" in os.environ else 170)
    for case in (CASES[name] for name in chosen.problems):
        epochs = 10 if chosen.quick else case.epochs
        began = time.perf_counter()
        solvers = tuned_solvers(case, epochs, trials, chosen.keep)
        spent = time.perf_counter() - began
        traces = [runs(case, solvers, epochs, seed) for seed in range(1, seeds + 1)]
        table = Table(title=f"{case.name}; {epochs} epochs, {trials} trials, {seeds} seeds", title_justify="left")
        for column in ("method", "setting", "objective", "gap"):
            table.add_column(column, justify="right" if column in ("objective", "gap") else "left")
        for target in TARGETS:
            table.add_column(f"to {target:.0e}: epochs / s", justify="right")
        for name, (_, text) in solvers.items():
            table.add_row(name, text, *summary(traces, name))
        console.print(table)
        console.print(f"tuning took {spent:.0f} s, the whole {time.perf_counter() - began:.0f} s\n")


if __name__ == "__main__":
    main()
