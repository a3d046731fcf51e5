"""Past one machine's memory, past one process: time per epoch, memory, agreement with the truth, bytes on the wire.

    python benchmarks/scale.py --spots 1000000 --executor memory
    python benchmarks/scale.py --spots 10000000 --executor disk --memory-limit 4GB
    python benchmarks/scale.py --spots 1000000 --executor disk --memory-limit 800MB --cold   # nothing cached
    python benchmarks/scale.py --spots 5000000 --executor dask --workers 2
    python benchmarks/scale.py --spots 1000000 --executor dask --explore
    python benchmarks/scale.py --spots 10000000 --executor memory --subsample 1000000   # agreement on a part

Spots lie on a grid with 16 neighbours each, 50 features and 23 domains. The store is written once to --folder by a
process of its own and kept for the next run; the run itself is in a process of its own too, whose peak memory is
printed. An epoch's time is the median over epochs after the second (compilation and first reads), evaluation excluded.
With --cold the system forgets the files of the store, and those that hold local variables, before every epoch. Bytes
read, visits and bytes on the wire are those of epochs too, counted apart for those that explore (--explore).
"""

from __future__ import annotations

import argparse
import os
import stat
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
        executor = pdvi.Dask(Client(cluster, direct_to_workers=True))
    opened = time.perf_counter()
    budget = {"batch_size": options.batch_size, "max_epochs": options.epochs, "tol": options.tol}
    # without exploring all epochs have the same work
    solver = pdvi.P2DVI(exploration=3 if options.explore else 0)
    epochs = Epochs(executor or pdvi.Memory(), path if options.cold else None)
    result = pdvi.fit(problem, solver, executor=epochs.executor, callbacks=[epochs.logged], **budget)
    done, highest = time.perf_counter(), peak()  # before the labels of all spots are compared at once
    truth = np.load(path / "truth.npy")
    labels = np.stack([np.asarray(shard).argmax(1).astype(np.int8) for shard in result.local_params])
    ari = pdvi.metrics.ari(truth, Layout(rows).unshard(labels))
    exploring = result.trace["event"].str.startswith("exploring").to_numpy()[1:]
    seconds = np.diff(result.trace["seconds"])
    plain = seconds[2:][~exploring[2:]]
    table = {
        "spots": f"{len(truth):,} in {len(rows)} shards",
        "executor": options.executor
        + (f", {options.memory_limit}" if options.executor == "disk" else "")
        + (", cold" if options.cold else ""),
        "status": result.status.name,
        "epochs": len(seconds),
        "open and verify (and load), s": f"{opened - began:.1f}",
        "fit, s": f"{done - opened:.1f}",
        "one epoch, s (fastest)": f"{np.median(plain):.3f} ({min(plain):.3f})",
        "peak resident memory, GB": f"{highest:.2f}",
        "objective": f"{result.objective:.8g}",
        "ARI against the truth": f"{ari:.4f}",
    }
    if options.explore:
        table["one epoch of exploring, s"] = f"{np.median(seconds[exploring]):.3f}"
    if options.executor != "memory":
        table["lam0, bytes"] = f"{4 * problem.n_global:,}"
        table |= epochs.table(~exploring, "an epoch")
        if options.explore:
            table |= epochs.table(exploring, "exploring")
    print("\n".join(f"{name:38}{value}" for name, value in table.items()), flush=True)


class Epochs:
    """Counts what the steps of each epoch read and send. ``cold``: a store that is forgotten before each."""

    def __init__(self, executor: Any, cold: Path | None):
        self.executor, self.cold, self._steps = executor, cold, executor.run
        self.rows: list[dict[str, int]] = []
        executor.run = self._run
        self._row: dict[str, int] = {}

    def _run(self, solver: Any, state: Any, batches: np.ndarray) -> Any:
        before = self._counted()
        state = self._steps(solver, state, batches)
        for name, value in self._counted().items():
            self._row[name] = self._row.get(name, 0) + value - before[name]
        return state

    def _counted(self) -> dict[str, int]:
        told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        files = {"read": int(told["rchar"]), "from_disk": int(told["read_bytes"])}
        return files | (vars(self.executor.traffic) if isinstance(self.executor, pdvi.Dask) else {})

    def logged(self, progress: Any) -> None:
        """Take notice of a log point, and forget the files."""
        if self._row:
            self.rows.append(self._row)
            self._row = {}
        if self.cold is not None:
            forget(self.cold)

    def table(self, chosen: np.ndarray, name: str) -> dict[str, str]:
        """Return what the chosen epochs took."""
        rows = [row for row, wanted in zip(self.rows, chosen) if wanted]
        mean = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
        if "visits" not in mean:
            return {f"{name}, bytes {key}": f"{mean[key]:,.0f}" for key in ("read", "from_disk")}
        wire = ("sent", "received", "halo_between", "halo_within")
        return {f"{name}, visits": f"{mean['visits']:,.0f}"} | {
            f"{name}, bytes {key} a visit": f"{mean[key] / mean['visits']:,.0f}" for key in wire
        }


def forget(store: Path) -> None:
    """Let the system drop what it has cached of a store, and of the files that this process has open."""
    os.sync()
    for shard in store.iterdir():
        with shard.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISREG(os.fstat(number).st_mode):
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:  # the one that lists them
            pass


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
    parser.add_argument("--cold", action="store_true", help="let the system forget the files before every epoch")
    parser.add_argument("--explore", action="store_true", help="three epochs of exploring after the second")
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
