"""Domains of labelled real slides, beside what other tools reach on the same files.

    python benchmarks/slides.py FOLDER [--seeds 5]

FOLDER has AnnData files with counts in X, coordinates in obsm["spatial"] and hand-drawn domains in
obs["ground_truth"]; spots without a label are left out of the score. Everything is at its default; only the
number of domains is the true one. The peers' numbers are theirs at their documented defaults, one seed.
"""

from __future__ import annotations

import argparse
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import anndata as ad
import numpy as np

import pdvi
from pdvi.mixtures.consensus import match

PEERS = {
    "scanpy Leiden (no space)": (0.21, 0.27, 0.18, 0.26, 0.13),
    "SpatialLeiden": (0.30, 0.31, 0.54, 0.82, 0.62),
    "CellCharter (PCA)": (0.29, 0.31, 0.34, 0.44, 0.30),
    "SpaGCN": (0.41, 0.35, 0.27, 0.29, 0.12),
    "BANKSY + Leiden": (0.36, 0.32, 0.69, 0.59, 0.49),
    "BANKSY + tied mixture": (0.29, 0.19, 0.64, 0.79, 0.60),
    "GraphST + tied mixture": (0.57, np.nan, np.nan, 0.75, np.nan),
    "30 neighbours' mean + tied mixture": (0.37, 0.33, 0.63, 0.86, 0.51),
}
SLIDES = ("DLPFC_151673", "DLPFC_151676", "BaristaSeq_slice1", "STARmap_mPFC_BZ5", "osmFISH_SScortex")


class Run(NamedTuple):
    """ARI and seconds of one run from counts; of labelled spots, how certain each is, and whether it is right."""

    ari: float
    seconds: float
    certainty: np.ndarray
    right: np.ndarray


def score(path: Path, seed: int) -> Run:
    """Find domains, and compare them with the hand-drawn ones, matched one to one."""
    adata = ad.read_h5ad(path)
    truth = adata.obs["ground_truth"]
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        pdvi.tl.domains(adata, int(truth.nunique()), seed=seed)
    seconds = time.perf_counter() - began
    known = truth.notna().to_numpy()
    drawn = np.unique(truth[known].astype(str), return_inverse=True)[1]
    found = adata.obs["domain"].cat.codes.to_numpy()[known].astype(int)
    right = match(found, drawn, int(truth.nunique()))[found] == drawn
    ari = pdvi.metrics.ari(truth[known].astype(str), adata.obs["domain"][known].astype(str))
    return Run(ari, seconds, adata.obs["domain_certainty"].to_numpy()[known], right)


def calibration(runs: list[Run], edges: tuple[float, ...] = (0, 0.5, 0.7, 0.85, 0.95, 1.001)) -> None:
    """Print how often spots of about the same certainty are right."""
    certainty, right = (np.concatenate([getattr(run, name) for run in runs]) for name in ("certainty", "right"))
    gaps = []
    print(f"\n{'certainty of':16}{'spots':>8}{'mean':>8}{'right':>8}")
    for low, high in pairwise(edges):
        chosen = (certainty >= low) & (certainty < high)
        if chosen.any():
            said, true = certainty[chosen].mean(), right[chosen].mean()
            gaps.append(abs(said - true))
            print(f"{f'{low:.2f} to {min(high, 1):.2f}':16}{chosen.sum():8}{said:8.2f}{true:8.2f}")
    print(f"mean absolute difference over {len(gaps)} bins: {np.mean(gaps):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    paths = [arguments.folder / f"{name}.h5ad" for name in SLIDES]
    print(f"{'ARI':36}" + "".join(f"{name[:16]:>18}" for name in SLIDES) + f"{'mean':>8}")
    for name, values in PEERS.items():
        print(f"{name:36}" + "".join(f"{value:18.2f}" for value in values) + f"{np.nanmean(values):8.3f}")
    best = np.nanmax(list(PEERS.values()), axis=0)
    print(f"{'best peer of each column':36}" + "".join(f"{value:18.2f}" for value in best) + f"{best.mean():8.3f}")
    runs = [[score(path, seed) for seed in range(arguments.seeds)] for path in paths]
    aris = np.array([[run.ari for run in slide] for slide in runs])
    cells = "".join(f"{f'{mean:.2f} ({sd:.3f})':>18}" for mean, sd in zip(aris.mean(1), aris.std(1)))
    print(f"{'pdvi, mean (deviation over seeds)':36}{cells}{aris.mean():8.3f} ({aris.mean(0).std():.3f})")
    fastest = [min(run.seconds for run in slide) for slide in runs]
    print(f"{'pdvi, seconds from counts, fastest':36}" + "".join(f"{value:18.1f}" for value in fastest))
    calibration([run for slide in runs for run in slide])


if __name__ == "__main__":
    main()
