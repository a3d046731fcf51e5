"""Past one machine's memory, past one process: time per epoch, memory, agreement with the truth, bytes on the wire.

    python benchmarks/scale.py --spots 1000000 --executor memory
    python benchmarks/scale.py --spots 10000000 --executor disk --memory-limit 4GB
    python benchmarks/scale.py --spots 5000000 --executor dask --workers 2
    python benchmarks/scale.py --spots 10000000 --executor memory --subsample 1000000   # agreement on a part

Spots lie on a grid with 16 neighbours each, 50 features and 23 domains. The store is written once to --folder by a
process of its own and kept for the next run; the run itself is in a process of its own too, whose peak memory is
printed. An epoch's time is the median over epochs after the second (compilation and first reads), evaluation excluded.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

import pdvi
from pdvi.shards.partition import Layout

DOMAINS, FEATURES, BETA, NOISE = 23, 50, 0.3, np.float32(1.8)
STEPS = [(0, 1), (1, 0), (1, 1), (1, -1), (0, 2), (2, 0), (1, 2), (2, 1)]  # and their opposites: 16 neighbours


def grid_graph(n_spots: int) -> sp.csr_array:
    """Unit weights between each spot of a grid and its 16 neighbours; rows are made in blocks, at once in CSR."""
    side = int(np.ceil(np.sqrt(n_spots)))
    offsets = np.array(sorted(di * side + dj for di, dj in [*STEPS, *((-i, -j) for i, j in STEPS)]))
    moves = np.array(sorted([*STEPS, *((-i, -j) for i, j in STEPS)], key=lambda step: step[0] * side + step[1]))
    indices, counts = [], []
    for begin in range(0, n_spots, 500_000):
        spot = np.arange(begin, min(n_spots, begin + 500_000))
        column = (spot % side)[:, None] + moves[:, 1]
        target = spot[:, None] + offsets
        inside = (column >= 0) & (column < side) & (target >= 0) & (target < n_spots)
        indices.append(target[inside].astype(np.int32))
        counts.append(inside.sum(1))
    columns = np.concatenate(indices)
    indptr = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int32)
    return sp.csr_array((np.ones(len(columns), np.float32), columns, indptr), shape=(n_spots, n_spots))


def tissue(n_spots: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, coordinates and domains as in `datasets.tissue_features`, whose fields take long at this size.

    Domains are drawn on a coarser grid and enlarged; features are filled in block by block.
    """
    side = int(np.ceil(np.sqrt(n_spots)))
    coarse = min(side, 600)
    small = pdvi.datasets.tissue_features(coarse**2, n_features=1, n_domains=DOMAINS, seed=seed).labels
    nearest = np.arange(side) * coarse // side
    labels = small.reshape(coarse, coarse)[nearest[:, None], nearest].ravel()[:n_spots]
    rng = np.random.default_rng(seed)
    centres = (rng.standard_normal((DOMAINS, FEATURES)) * np.linspace(1.2, 0.2, FEATURES)).astype(np.float32)
    X = np.empty((n_spots, FEATURES), np.float32)
    for begin in range(0, n_spots, 500_000):
        block = labels[begin : begin + 500_000]
        X[begin : begin + 500_000] = centres[block] + NOISE * rng.standard_normal((len(block), FEATURES), np.float32)
    coordinates = np.stack(np.divmod(np.arange(n_spots), side), 1).astype(np.float32)
    return X, coordinates, labels


def write(path: Path, n_spots: int, shard_size: int, part: int | None) -> None:
    """Simulate a tissue, and write it (or its first ``part`` spots) to a store."""
    from anndata import AnnData

    X, coordinates, labels = tissue(n_spots)
    graph = grid_graph(n_spots)
    kept = n_spots if part is None else part
    slide = AnnData(obs={"truth": labels[:kept]})
    slide.obsm["X_pca"], slide.obsm["spatial"] = X[:kept], coordinates[:kept]
    slide.obsp["potts_weights"] = graph if part is None else graph[:kept, :kept]
    began = time.perf_counter()
    pdvi.write_store(path, slide, n_domains=DOMAINS, beta=BETA, shard_size=shard_size)
    np.save(path / "truth.npy", labels[:kept])
    print(f"store of {kept:,} spots written in {time.perf_counter() - began:.0f} s, peak {peak():.1f} GB", flush=True)


def run(path: Path, options: argparse.Namespace) -> None:
    """Fit, and print what it took."""
    began = time.perf_counter()
    problem = pdvi.Problem.from_store(path)
    executor: Any = None
    store: Any = problem.store
    rows: Any = store.rows
    if options.executor == "memory":
        problem = problem.load()
    elif options.executor == "disk":
        executor = pdvi.Disk(options.memory_limit)
    else:
        from distributed import Client, LocalCluster

        cluster = LocalCluster(options.workers, threads_per_worker=1, dashboard_address=None, memory_limit=0)
        executor = pdvi.Dask(Client(cluster))
    opened = time.perf_counter()
    budget = {"batch_size": options.batch_size, "max_epochs": options.epochs, "tol": options.tol}
    # without exploring: all epochs have the same work, and one can be timed
    result = pdvi.fit(problem, pdvi.P2DVI(exploration=0), executor=executor, **budget)
    done, highest = time.perf_counter(), peak()  # before the labels of all spots are compared at once
    truth = np.load(path / "truth.npy")
    labels = np.stack([np.asarray(shard).argmax(1).astype(np.int8) for shard in result.local_params])
    ari = pdvi.metrics.ari(truth, Layout(rows).unshard(labels))
    epochs = np.diff(result.trace["seconds"])
    table = {
        "spots": f"{len(truth):,} in {len(rows)} shards",
        "executor": options.executor + (f", {options.memory_limit}" if options.executor == "disk" else ""),
        "status": result.status.name,
        "epochs": len(epochs),
        "open and verify (and load), s": f"{opened - began:.1f}",
        "fit, s": f"{done - opened:.1f}",
        "one epoch, s": f"{np.median(epochs[2:]):.3f}",
        "peak resident memory, GB": f"{highest:.2f}",
        "objective": f"{result.objective:.8g}",
        "ARI against the truth": f"{ari:.4f}",
    }
    if options.executor == "dask":
        traffic = executor.traffic
        halo = np.unique(store.halo).size / len(rows)
        table["bytes per visit, sent"] = f"{traffic.sent / traffic.visits:,.0f}"
        table["bytes per visit, received"] = f"{traffic.received / traffic.visits:,.0f}"
        table["lam0, bytes"] = f"{4 * problem.n_global:,}"
        table["rows of a shard that others read"] = f"{halo:,.0f}"
    print("\n".join(f"{name:35}{value}" for name, value in table.items()), flush=True)


def peak() -> float:
    """Peak resident memory of this process, in gigabytes."""
    status = Path("/proc/self/status").read_text().split()
    return float(status[status.index("VmHWM:") + 1]) * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spots", type=int, default=1_000_000)
    parser.add_argument("--subsample", type=int, help="work on the first so many spots of the tissue only")
    parser.add_argument("--executor", choices=["memory", "disk", "dask"], default="memory")
    parser.add_argument("--memory-limit", default="4GB")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shard-size", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--tol", type=float, default=1e-6)
    parser.add_argument("--folder", type=Path, default=Path("scale-stores"))
    parser.add_argument("--stage", choices=["all", "write", "run"], default="all", help=argparse.SUPPRESS)
    options = parser.parse_args()
    path = options.folder / f"{options.spots}-{options.subsample or 'all'}-{options.shard_size}"
    if options.stage == "write":
        write(path, options.spots, options.shard_size, options.subsample)
    elif options.stage == "run":
        run(path, options)
    else:
        options.folder.mkdir(exist_ok=True)
        again = [sys.executable, __file__, *sys.argv[1:], "--stage"]
        if not path.exists():
            subprocess.run([*again, "write"], check=True)
        subprocess.run([*again, "run"], check=True)


if __name__ == "__main__":
    main()
