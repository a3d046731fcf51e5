"""Domains of labeled real slides, beside what other tools reach on the same files.

    python benchmarks/slides.py FOLDER [--seeds 5] [--peers run|recorded]

FOLDER has AnnData files with counts in X, coordinates in obsm["spatial"] and hand-drawn domains in
obs["ground_truth"]; files without that column are skipped, and spots without a label are left out of the score. The
five slides of the README come first if they are there, then all others by name. Everything is at its default; only the
number of domains is the true one.

The peers (peers.py) are run once, with seed 0, where they are installed, the five-line script always; numbers of others
were recorded earlier on the five slides, and are marked. A tool has a mean where it has a number for each slide; the
best peer is the best of those that have one. Peers' seconds are from counts, with everything imported and compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import textwrap
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import anndata as ad
import h5py
import numpy as np

import pdvi
from pdvi.spatial.consensus import match
from peers import PEERS, RECORDED, RECORDED_ON, Peer

README = RECORDED_ON  # the slides of the README's table


def labeled_slides(folder: Path) -> list[Path]:
    """The files of a folder that have hand-drawn domains, those of the README first; a line tells of each other."""
    found = []
    for path in sorted(folder.glob("*.h5ad")):
        with h5py.File(path) as file:
            if "ground_truth" in file["obs"]:
                found.append(path)
            else:
                print(f'{path.stem}: skipped, it has no obs["ground_truth"]', flush=True)
    return sorted(found, key=lambda path: README.index(path.stem) if path.stem in README else len(README))


class Run(NamedTuple):
    """ARI and seconds of one run from counts; of labeled spots, how certain each is, and whether it is right."""

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


class Column(NamedTuple):
    """What one peer reached on each slide, which of it was recorded earlier, and its seconds on the first slide."""

    aris: np.ndarray
    recorded: np.ndarray
    seconds: float


def try_peer(name: str, peer: Peer, paths: list[Path]) -> Column:
    """Run a peer on every slide; one line tells what went wrong, and the recorded number stands for it."""
    aris = np.array([peer.recorded_ari(path.stem) for path in paths])
    column = Column(aris, np.ones(len(paths), bool), np.nan)
    if peer.label is None:
        return column
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
            column = column._replace(seconds=time.perf_counter() - began)
        if (found := len(np.unique(labels))) != n_domains:
            print(f"{name} found {found} domains instead of {n_domains} on {paths[number].stem}", flush=True)
        column.aris[number] = pdvi.metrics.ari(truth[known].astype(str), labels[known].astype(str))
        column.recorded[number] = False
    return column


def peers(paths: list[Path], run: bool) -> dict[str, Column]:
    """The peers' columns, and a line about each that says what is run and what is not."""
    columns = {}
    for name, peer in PEERS.items():
        versions = peer.versions()
        missing = [package for package, version in versions.items() if version is None]
        if not (run or peer.always) or peer.label is None or missing:
            why = f"not installed: {', '.join(missing)}; " if run and missing else ""
            print(f"{name}: {why}recorded {RECORDED}", flush=True)
            peer = peer._replace(label=None)
        else:
            print(f"{name}: run with {', '.join(f'{key} {version}' for key, version in versions.items())}", flush=True)
        columns[name] = try_peer(name, peer, paths)
    return columns


def cell(value: float, digits: int = 2, mark: str = " ") -> str:
    """A number of the table, or a dash where there is none."""
    return "- " if np.isnan(value) else f"{value:.{digits}f}{mark}"


def line(name: str, cells: list[str], width: int = 14) -> None:
    print(f"{name[:24]:24}" + "".join(f"{text:>{width}}" for text in cells), flush=True)


def heading(names: list[str], width: int = 14) -> None:
    """Print names of columns, each in as many lines as it needs."""
    wrapped = [textwrap.wrap(name, width - 1) for name in names]
    height = max(map(len, wrapped))
    for number in range(height):
        texts = [[""] * (height - len(words)) + words for words in wrapped]
        line("ARI" if number == height - 1 else "", [f"{words[number]} " for words in texts], width)


def table(paths: list[Path], columns: dict[str, Column], runs: list[list[Run]]) -> None:
    """Print a row for each slide: the peers, the best of them, pdvi; and means over all slides and the README's."""
    aris = np.array([[run.ari for run in slide] for slide in runs])
    seconds = np.array([min(run.seconds for run in slide) for slide in runs])
    best = np.fmax.reduce([column.aris for column in columns.values()])
    print()
    heading([*columns, "best peer", "pdvi", "pdvi, deviation over seeds", "pdvi, seconds"])
    for number, path in enumerate(paths):
        cells = [cell(column.aris[number], mark="*" if column.recorded[number] else " ") for column in columns.values()]
        ours = [cell(aris[number].mean()), cell(aris[number].std(), 3), cell(seconds[number], 1)]
        line(path.stem, [*cells, cell(best[number]), *ours])
    known = np.array([path.stem in README for path in paths])
    for name, chosen in {"all": np.ones(len(paths), bool), "the README's": known}.items():
        if chosen.any():
            cells = [cell(column.aris[chosen].mean(), 3) for column in columns.values()]
            means = aris[chosen].mean(0)  # of every seed
            ours = [cell(means.mean(), 3), cell(means.std(), 3), cell(seconds[chosen].mean(), 1)]
            line(f"mean of {name} ({chosen.sum()})", [*cells, cell(best[chosen].mean(), 3), *ours])
    line("seconds, first slide", [cell(column.seconds, 1) for column in columns.values()] + ["", cell(seconds[0], 1)])
    print(
        f"* recorded {RECORDED}, not run here; peers' seconds include the search for a resolution, pdvi's are the least"
    )
    print(f"pdvi over seeds: deviation of the mean {aris.mean(0).std():.3f}, mean deviation {aris.std(1).mean():.3f}")


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
    paths = labeled_slides(arguments.folder)
    if not paths:
        parser.error(f'{arguments.folder} has no .h5ad file with obs["ground_truth"]')
    columns = peers(paths, arguments.peers == "run")
    runs = [[score(path, seed) for seed in range(arguments.seeds)] for path in paths]
    table(paths, columns, runs)
    calibration([run for slide in runs for run in slide])


if __name__ == "__main__":
    main()
