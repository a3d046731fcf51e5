"""Domains of labelled real slides, beside what other tools reach on the same files.

    python benchmarks/slides.py FOLDER [--seeds 5] [--peers run|recorded]

FOLDER has AnnData files with counts in X, coordinates in obsm["spatial"] and hand-drawn domains in
obs["ground_truth"]; spots without a label are left out of the score. Everything is at its default; only the
number of domains is the true one. The peers (peers.py) are run once, with seed 0, where they are installed; numbers of
others were recorded earlier and are marked. Peers' seconds are from counts, with everything imported and compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import anndata as ad
import numpy as np

import pdvi
from pdvi.mixtures.consensus import match
from peers import PEERS, RECORDED, Peer

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


class Row(NamedTuple):
    """What one peer reached on each slide, which of it was recorded earlier, and its seconds on the first slide."""

    aris: np.ndarray
    recorded: np.ndarray
    seconds: float


def try_peer(name: str, peer: Peer, paths: list[Path]) -> Row:
    """Run a peer on every slide; one line tells what went wrong, and the recorded number stands for it."""
    row = Row(np.array(peer.recorded), np.ones(len(paths), bool), np.nan)
    if peer.label is None:
        return row
    for number in reversed(range(len(paths))):  # the first slide, which is timed, last: imported and compiled by then
        adata = ad.read_h5ad(paths[number])
        truth = adata.obs["ground_truth"]
        known = truth.notna().to_numpy()
        n_domains = int(truth.nunique())
        began = time.perf_counter()
        try:
            # some print pages: an error is told below, the rest is not of interest
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as text:
                warnings.simplefilter("ignore")
                with contextlib.redirect_stderr(text):
                    labels = np.asarray(peer.label(adata, n_domains, 0))
        except Exception as error:
            message = " ".join(str(error).split())[:160]
            print(f"{name} failed on {paths[number].stem}: {type(error).__name__}: {message}", flush=True)
            continue
        if number == 0:
            row = row._replace(seconds=time.perf_counter() - began)
        if (found := len(np.unique(labels))) != n_domains:
            print(f"{name} found {found} domains instead of {n_domains} on {paths[number].stem}", flush=True)
        row.aris[number] = pdvi.metrics.ari(truth[known].astype(str), labels[known].astype(str))
        row.recorded[number] = False
    return row


def peers(paths: list[Path], run: bool) -> dict[str, Row]:
    """The peers' rows, and a line about each that says what is run and what is not."""
    rows = {}
    for name, peer in PEERS.items():
        versions = peer.versions()
        missing = [package for package, version in versions.items() if version is None]
        if not run or peer.label is None or missing:
            why = f"not installed: {', '.join(missing)}; " if run and missing else ""
            print(f"{name}: {why}recorded {RECORDED}", flush=True)
            peer = peer._replace(label=None)
        else:
            print(f"{name}: run with {', '.join(f'{key} {version}' for key, version in versions.items())}", flush=True)
        rows[name] = try_peer(name, peer, paths)
    return rows


def table(rows: dict[str, Row]) -> None:
    """Print the peers' rows and the best of each column."""
    print(f"\n{'ARI':36}" + "".join(f"{name[:16]:>18}" for name in SLIDES) + f"{'mean':>8}{'seconds':>10}")
    for name, row in rows.items():
        cells = [
            "- " if np.isnan(value) else f"{value:.2f}{'*' if old else ' '}"
            for value, old in zip(row.aris, row.recorded)
        ]
        seconds = "-" if np.isnan(row.seconds) else f"{row.seconds:.1f}"
        print(f"{name:36}" + "".join(f"{cell:>18}" for cell in cells) + f"{np.nanmean(row.aris):8.3f}{seconds:>10}")
    best = np.nanmax([row.aris for row in rows.values()], axis=0)
    print(f"{'best peer of each column':36}" + "".join(f"{value:17.2f} " for value in best) + f"{best.mean():8.3f}")


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
    parser.add_argument("--peers", choices=("run", "recorded"), default="run")
    arguments = parser.parse_args()
    paths = [arguments.folder / f"{name}.h5ad" for name in SLIDES]
    table(peers(paths, arguments.peers == "run"))
    runs = [[score(path, seed) for seed in range(arguments.seeds)] for path in paths]
    aris = np.array([[run.ari for run in slide] for slide in runs])
    cells = "".join(f"{f'{mean:.2f} ({sd:.3f})':>18}" for mean, sd in zip(aris.mean(1), aris.std(1)))
    print(f"{'pdvi, mean (deviation over seeds)':36}{cells}{aris.mean():8.3f} ({aris.mean(0).std():.3f})")
    fastest = [min(run.seconds for run in slide) for slide in runs]
    print(f"{'pdvi, seconds from counts, fastest':36}" + "".join(f"{value:18.1f}" for value in fastest))
    print(f"* recorded {RECORDED}, not run here; seconds of peers on {SLIDES[0]}, resolutions' search included")
    calibration([run for slide in runs for run in slide])


if __name__ == "__main__":
    main()
