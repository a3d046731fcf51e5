"""What every number of the configuration of `tl.domains` is worth on labeled slides.

    python benchmarks/ablations.py FOLDER [--seeds 3] [--only NAME ...]
    python benchmarks/ablations.py FOLDER --choose
    python benchmarks/ablations.py --large 154000

FOLDER has AnnData files with counts in X, coordinates in obsm["spatial"] and hand-drawn domains in
obs["ground_truth"]. Each number is replaced by a smaller and a larger one, all others stay. Printed are the mean
adjusted Rand index over slides and seeds, its change, the largest fall on one slide, and the seconds of all fits.
Numbers that act on large tissues only are tried on a simulated one (`--large SPOTS`), and those of `choose_n_domains`
by what it recommends of the seven numbers around the true one (`--choose`), on slides of at most 5,000 spots.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np

import pdvi
from pdvi.mixtures import CONFIG, Config

TRIED: dict[str, tuple[float, float]] = {
    "max_epochs": (25, 400),
    "tol": (1e-5, 1e-3),
    "n_patches": (1, 32),
    "kmeans_runs": (1, 16),
    "budget": (1, 60_000),
    "n_components": (5, 15),
    "n_types": (10, 40),
}
CHOOSE: dict[str, tuple[float, float]] = {"held_out_neighbors": (8, 30), "held_out_gain": (0.4, 0.8)}
MAX_CHOSEN = 5_000  # spots of a slide whose number of domains is chosen
LARGE: dict[str, tuple[float, float]] = {"group_above": (0, 10**9), "group_size": (4, 16)}


def other(name: str, value: float) -> Config:
    """The usual configuration with another value of one number."""
    fields: dict[str, Any] = {name: value}
    return dataclasses.replace(CONFIG, **fields)


def scores(slides: list[ad.AnnData], config: Config, seeds: int) -> tuple[np.ndarray, float]:
    """The adjusted Rand index of every slide and seed, and the seconds of all."""
    found, began = [], time.perf_counter()
    for slide in slides:
        truth = slide.obs["ground_truth"]
        known = truth.notna().to_numpy()
        row = []
        for seed in range(seeds):
            adata = slide.copy()
            pdvi.tl.domains(adata, int(truth.nunique()), seed=seed, config=config)
            row.append(pdvi.metrics.ari(truth[known].astype(str), adata.obs["domain"][known].astype(str)))
        found.append(row)
    return np.array(found), time.perf_counter() - began


def table(slides: list[ad.AnnData], tried: dict[str, tuple[float, float]], seeds: int) -> None:
    """Print a row for the usual configuration and one for every other value."""
    scores(slides, CONFIG, 1)  # compiles
    usual, seconds = scores(slides, CONFIG, seeds)
    print(f"{'number':16}{'value':>12}{'mean ARI':>10}{'change':>9}{'worst slide':>13}{'seconds':>9}", flush=True)
    print(f"{'as it is':16}{'':12}{usual.mean():10.3f}{'':9}{'':13}{seconds:9.1f}", flush=True)
    for name, values in tried.items():
        for value in values:
            own, seconds = scores(slides, other(name, value), seeds)
            change = own.mean(1) - usual.mean(1)
            row = f"{name:16}{value:>12g}{own.mean():10.3f}{own.mean() - usual.mean():+9.3f}{change.min():+13.3f}"
            print(f"{row}{seconds:9.1f}", flush=True)


def choices(slides: list[ad.AnnData]) -> None:
    """Print for every value how far the recommended numbers of domains are from the true ones."""
    cases = [("as it is", CONFIG)]
    cases += [(f"{name} {value:g}", other(name, value)) for name, values in CHOOSE.items() for value in values]
    small = [slide for slide in slides if slide.n_obs <= MAX_CHOSEN]
    truth = [int(slide.obs["ground_truth"].nunique()) for slide in small]
    for name, config in cases:
        found = [
            pdvi.tl.choose_n_domains(slide.copy(), range(max(2, k - 3), k + 4), config=config)
            for slide, k in zip(small, truth)
        ]
        away = np.array(found) - truth
        counts = f"right {(away == 0).sum()}, one off {(abs(away) == 1).sum()} of {len(small)}"
        print(f"{name:24}{counts}: {away}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--choose", action="store_true", help="the numbers of choose_n_domains")
    parser.add_argument("--large", type=int, help="spots of a simulated tissue, instead of a folder")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    if arguments.large:
        tissue = pdvi.datasets.tissue(arguments.large, features=20, n_domains=15, seed=3)
        tissue.obs["ground_truth"] = tissue.obs["truth"]
        slides, tried = [tissue], LARGE
    else:
        if arguments.folder is None:
            parser.error("give a folder, or --large")
        slides = [ad.read_h5ad(path) for path in sorted(arguments.folder.glob("*.h5ad"))]
        slides, tried = [slide for slide in slides if "ground_truth" in slide.obs], TRIED
    if arguments.choose:
        choices(slides)
        return
    if arguments.only:
        tried = {name: tried[name] for name in arguments.only}
    table(slides, tried, arguments.seeds)


if __name__ == "__main__":
    main()
