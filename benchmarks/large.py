"""Domains of a slide that stays on disk: time, memory, agreement with memory, and what kills do.

    python benchmarks/large.py --spots 2000000                # from counts to labels within 3 GB
    python benchmarks/large.py --spots 2000000 --quarter      # also a quarter of it, read whole
    python benchmarks/large.py --spots 20000 --kills 10       # killed at random moments, resumed each time

The slide is simulated by `pdvi simulate`, which writes counts as they are drawn, and kept in --folder for the next run.
Commands run as processes of their own, whose peak resident memory is printed.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import anndata as ad
import numpy as np
from sklearn.metrics import adjusted_rand_score


def pdvi(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "pdvi", *map(str, arguments), "-q"]


def timed(name: str, command: list[str]) -> float:
    """Run a command and print its seconds and peak memory (the highest of all commands so far)."""
    began = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    print(f"{name:<32} {seconds:8.1f} s   peak so far {peak:.2f} GB", flush=True)
    return seconds


def labels(path: Path) -> np.ndarray:
    from anndata.io import read_elem
    from zarr import open_group

    return read_elem(open_group(path, mode="r")["obs"])["domain"].to_numpy().astype(str)


def quarter(slide: Path, target: Path) -> np.ndarray:
    """Write the quarter of a slide at the lower left in space, and return its rows."""
    lazy = ad.experimental.read_lazy(slide)
    xy = np.asarray(lazy.obsm["spatial"])
    rows = np.flatnonzero((xy < np.median(xy, axis=0)).all(1))
    part = lazy[rows].to_memory()
    part.write_h5ad(target)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spots", type=int, default=200_000)
    parser.add_argument("--genes", type=int, default=300)
    parser.add_argument("--domains", type=int, default=12)
    parser.add_argument("--memory-limit", default="3GB")
    parser.add_argument("--executor", choices=["memory", "disk", "dask"], help="unless given, chosen by the command")
    parser.add_argument("--quarter", action="store_true")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("large-slides"))
    asked = parser.parse_args()
    asked.folder.mkdir(exist_ok=True)
    slide = asked.folder / f"{asked.spots}x{asked.genes}.zarr"
    if not slide.exists():
        sizes = ["--n-spots", asked.spots, "--n-genes", asked.genes, "--n-domains", asked.domains]
        timed("simulate", pdvi("simulate", slide, *sizes))
    whole = asked.folder / "whole.zarr"
    shutil.rmtree(whole, ignore_errors=True)
    how = ["--n-domains", asked.domains, "--memory-limit", asked.memory_limit]
    how += ["--executor", asked.executor] if asked.executor else []
    seconds = timed("domains", pdvi("domains", slide, "-o", whole, *how))
    truth = ad.experimental.read_lazy(slide).obs["truth"].to_numpy().astype(str)
    print(f"ARI with the truth {adjusted_rand_score(labels(whole), truth):.4f}")
    if asked.quarter:
        part = asked.folder / "quarter.h5ad"
        rows = quarter(slide, part)
        there = len(np.unique(truth[rows]))  # fewer domains than the whole slide has
        found = []
        for seed in (0, 1):
            out = asked.folder / f"quarter-{seed}.h5ad"
            wanted = ["--n-domains", there, "--memory-limit", "100GB", "--seed", seed]
            timed(f"a quarter, {there} domains, seed {seed}", pdvi("domains", part, "-o", out, *wanted))
            found.append(ad.read_h5ad(out).obs["domain"].to_numpy().astype(str))
        print(
            f"ARI on the quarter: blocks and whole {adjusted_rand_score(labels(whole)[rows], found[0]):.4f}, ", end=""
        )
        print(f"two seeds {adjusted_rand_score(*found):.4f}")
    if asked.kills:
        again = asked.folder / "again.zarr"
        shutil.rmtree(again, ignore_errors=True)
        draws = random.Random(0)
        for number in range(asked.kills):
            child = subprocess.Popen(pdvi("domains", slide, "-o", again, *how))
            try:
                child.wait(draws.uniform(0.05, 0.3) * seconds)  # from where the last one was: all stages are hit
            except subprocess.TimeoutExpired:
                child.kill()
            ended = child.wait()
            left = again.with_name(again.name + ".stages")
            stages = sorted({file.name.split(".")[0] for file in left.glob("*.npy")}) if left.exists() else []
            print(f"kill {number + 1}: exit {ended}, kept {len(stages)} stages", flush=True)
        timed("resumed", pdvi("domains", slide, "-o", again, *how))
        print(f"ARI with the uninterrupted run {adjusted_rand_score(labels(whole), labels(again)):.4f}")
        print(f"left beside the output: {[path.name for path in asked.folder.glob('again*')]}")


if __name__ == "__main__":
    main()
