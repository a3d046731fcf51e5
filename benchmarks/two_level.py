"""The two-level mixture beside the Potts mixture, both with their defaults, and how its time grows.

    python benchmarks/two_level.py                                # 154,000 cells, 30 types, 20 domains, and a million
    python benchmarks/two_level.py --cells 20000 --growth 80000

Cells are simulated (`pdvi.datasets.two_level_tissue`: domains are compositions of the same types); the Potts mixture is
given their averages over 30 neighbours. Seconds are those of a second fit, with everything compiled; "first" has the
compilation too.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.spatial import cKDTree

import pdvi
from pdvi import graphs, metrics

DOMAINS, TYPES, NEIGHBORS = 20, 30, 30


def seconds_of(mixture: Any, X: np.ndarray, **rows: Any) -> tuple[float, float]:
    """Return the seconds of a first and of a second fit."""
    taken = []
    for _ in range(2):
        began = time.perf_counter()
        mixture.fit(X, **rows)
        taken.append(time.perf_counter() - began)
    return taken[0], taken[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=154_000)
    parser.add_argument("--growth", type=int, default=1_000_000)
    asked = parser.parse_args()
    table = Table(
        "cells", "mixture", "first", "second", "of Potts", "us per cell and epoch", "ARI domains", "ARI types"
    )
    for cells in (asked.cells, asked.growth):
        tissue = pdvi.datasets.two_level_tissue(cells, n_domains=DOMAINS, n_types=TYPES, patchiness=27.0, seed=0)
        graph = graphs.nearest(tissue.coordinates, 8)
        near = np.asarray(cKDTree(tissue.coordinates).query(tissue.coordinates, k=NEIGHBORS + 1, workers=-1)[1])
        averages = np.zeros_like(tissue.X)
        for column in near.T:
            averages += tissue.X[column] / near.shape[1]
        rows = {"graph": graph, "coordinates": tissue.coordinates}
        potts = pdvi.PottsMixture(DOMAINS, random_state=0)
        two_levels = pdvi.TwoLevelMixture(DOMAINS, n_types=TYPES, random_state=0)
        first, reference = seconds_of(potts, averages, **rows)
        fits = [("Potts", potts, first, reference, "")]
        first, second = seconds_of(two_levels, tissue.X, **rows)
        fits.append(("two levels", two_levels, first, second, f"{metrics.ari(tissue.types, two_levels.types_):.3f}"))
        for name, mixture, first, second, types in fits:
            each = f"{second / cells / mixture.n_iter_ * 1e6:.2f}"
            found = f"{metrics.ari(tissue.labels, mixture.labels_):.3f}"
            ratio = f"{second / reference:.2f}"
            table.add_row(f"{cells:,}", name, f"{first:.1f} s", f"{second:.1f} s", ratio, each, found, types)
    Console().print(table)


if __name__ == "__main__":
    main()
