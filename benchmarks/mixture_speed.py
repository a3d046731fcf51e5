"""Speed of the Potts mixture, as ratios in one run.

    python benchmarks/mixture_speed.py                     # 147,456 spots x 50 features x 23 domains x 24 neighbours
    python benchmarks/mixture_speed.py --growth            # also 2 million spots, in a process of its own
    python benchmarks/mixture_speed.py --compare SCRIPT    # also time another script that prints its own lines

Minima over repetitions: the machine is noisy. The sweep is bare: gather, add, softmax over all spots.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import pdvi
from pdvi import graphs
from pdvi.mixtures import empirical_bayes, potts_mixture_problem
from pdvi.models.closed_forms import neighbor_sum
from pdvi.run.running import Run
from pdvi.shards.partition import along_space, layout, median_cuts

PATCHES, NEIGHBOURS, DOMAINS, BETA = 32, 24, 23, 0.3


def tissue_problem(n_spots: int, seed: int = 0) -> tuple[pdvi.Problem, Any, Any]:
    """The problem from a k-means start, the layout and the tissue."""
    tissue = pdvi.datasets.tissue_features(n_spots, n_domains=DOMAINS, seed=seed)
    graph = graphs.weights(graphs.nearest(tissue.coordinates, NEIGHBOURS), tissue.X)
    where = layout(median_cuts(tissue.coordinates, PATCHES), along_space(tissue.coordinates))
    settings = empirical_bayes(tissue.X, DOMAINS, seed=seed)
    return potts_mixture_problem(tissue.X, graph, settings, where, beta=BETA), where, tissue


def fastest(run: Callable[[], Any], repeat: int = 7) -> float:
    """Seconds of the fastest of several calls, after one to compile."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return min(times)


def bare_sweep(problem: pdvi.Problem) -> float:
    """Gather, add, softmax."""
    phi = problem.init(jax.random.key(0))[1]

    @jax.jit
    def sweep(problem: pdvi.Problem, phi: jax.Array) -> jax.Array:
        return problem.map_shards(lambda p, shard: jax.nn.softmax(neighbor_sum(p, shard), axis=1), phi)

    return fastest(lambda: sweep(problem, phi))


def epoch(problem: pdvi.Problem, solver: Any) -> float:
    """One epoch of a solver."""
    run = Run(problem, solver, batch_size=problem.n_shards if solver.full_batch else 1)
    order = np.random.default_rng(0).permutation(problem.n_shards)
    batches = order[None] if solver.full_batch else order[:, None]
    return fastest(lambda: run.executor.run(run.solver, run.state, batches))


def growth(n_spots: int) -> None:
    """Epoch seconds and peak memory at one size, for a process of its own."""
    problem, where, tissue = tissue_problem(n_spots)
    solver = pdvi.P2DVI()
    seconds = epoch(problem, solver)
    result = pdvi.fit(problem, solver, max_epochs=12, tol=0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    labels = where.unshard(result.local_params).argmax(1)
    total, ari = result.trace["seconds"].iloc[-1], pdvi.metrics.ari(tissue.labels, labels)
    print(f"{n_spots:>10,} spots  {seconds:7.3f} s an epoch  {total:6.1f} s for 12  ARI {ari:.3f}  peak {peak:.1f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spots", type=int, default=147_456)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--growth-only", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--compare", help="a script to run with this Python for comparison, with its arguments")
    arguments = parser.parse_args()
    if arguments.growth_only:
        growth(arguments.growth_only)
        return

    problem, *_ = tissue_problem(arguments.spots)
    sweep = bare_sweep(problem)
    print(f"{arguments.spots:,} spots, {PATCHES} patches; damping {float(problem.model.damping):.2f}")
    print(f"{'':24}{'ms':>8}{'sweeps':>8}")
    print(f"{'bare sweep':24}{1e3 * sweep:8.1f}{1.0:8.1f}")
    solvers = {"P2D-VI": pdvi.P2DVI(), "CAVI": pdvi.CAVI(), "memoized VB": pdvi.MemoizedVB()}
    timed = {"P2D-VI, exploring": solvers["P2D-VI"], **solvers, "P2D-VI": pdvi.P2DVI(exploration=0)}
    for name, solver in timed.items():
        seconds = epoch(problem, solver)
        target = "  (target: at most 8)" if name.startswith("P2D-VI") else ""
        print(f"{name + ', one epoch':24}{1e3 * seconds:8.1f}{seconds / sweep:8.1f}{target}")

    precision, n_rows = np.asarray(problem.model.precision, float), float(problem.model.n_rows)
    constant = 0.5 * float(np.sum(np.asarray(problem.shards["square"], float) * precision))
    constant += 0.5 * n_rows * float(np.sum(np.log(2 * np.pi / precision)))
    print("\nfrom k-means to within 1e-5 of the final objective (without its constant part)")
    for name, solver in solvers.items():
        for _ in range(2):  # the first compiles
            trace = pdvi.fit(problem, solver, max_epochs=40, tol=1e-8).trace
        objective = trace["objective"].to_numpy() - constant
        arrived = int(np.argmax(objective - objective.min() <= 1e-5 * abs(objective.min())))
        row = trace.iloc[arrived]
        target = "  (target: at most 12)" if name == "P2D-VI" else ""
        print(f"{name:24}{row.epoch:4.0f} epochs {row.seconds:7.2f} s, final {objective.min():.1f}{target}")
    if arguments.compare:
        print(f"\n{arguments.compare}", flush=True)
        subprocess.run([sys.executable, *arguments.compare.split()], check=True)
    if arguments.growth:
        print("\ngrowth (target: 2 million spots cost 11 to 16 times 147,456, below 9 GB)", flush=True)
        for n_spots in (147_456, 1_982_464):
            subprocess.run([sys.executable, __file__, "--growth-only", str(n_spots)], check=True)


if __name__ == "__main__":
    main()
