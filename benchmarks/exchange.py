"""What one start reaches, with and without the exchange of components, beside scikit-learn with one start and ten.

    python benchmarks/exchange.py               # 20 random mixtures: 5 components, 10 features, 50,000 rows
    python benchmarks/exchange.py --quick       # 4 of 5,000 rows

Rows are sorted by cluster, the worst order for methods that go through them in turn. A hit is an end whose mean
log-likelihood per row is within 1e-3 of the best that any of the methods found for that mixture. A poor start is
k-means on ten random rows.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from sklearn.mixture import GaussianMixture as Reference

import pdvi
from pdvi.mixtures.recipe import RECIPE

HIT = 1e-3  # of the log-likelihood per row
POOR = 10  # rows that k-means looks at for a poor start


def mixtures(seed: int, seeds: int) -> dict[str, Any]:
    """The methods of one trial: all with one covariance shared by the components."""

    def ours(**more: Any) -> pdvi.GaussianMixture:
        return pdvi.GaussianMixture(5, covariance="tied", random_state=seed, **more)

    poor = replace(RECIPE, kmeans_rows=POOR)
    return {
        "pdvi, 1 poor start, no exchange": ours(recipe=poor, exchange=False),
        "pdvi, 1 poor start": ours(recipe=poor),
        "pdvi, 1 start, no exchange": ours(exchange=False),
        "pdvi, 1 start": ours(),
        "scikit-learn, 1 start": Reference(5, covariance_type="tied", random_state=seed),
        f"scikit-learn, {seeds} starts": Reference(5, covariance_type="tied", random_state=seed, n_init=seeds),
    }


def trial(seed: int, n_rows: int, separation: float, seeds: int = 10) -> pd.DataFrame:
    """Every method on one random mixture."""
    data = pdvi.datasets.mixture(n_rows, dim=10, n_components=5, separation=separation, seed=seed)
    order = np.argsort(data.labels, kind="stable")
    X, labels = data.X[order], data.labels[order]
    rows = []
    for name, mixture in mixtures(seed, seeds).items():
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about convergence: what counts is where it ends
            mixture.fit(X)
        seconds = time.perf_counter() - began
        ari = pdvi.metrics.ari(labels, mixture.predict(X))
        rows.append({"method": name, "seed": seed, "score": mixture.score(X), "ARI": ari, "seconds": seconds})
    table = pd.DataFrame(rows)
    return table.assign(hit=table["score"] >= table["score"].max() - HIT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--separation", type=float, default=3.0)
    options = parser.parse_args()
    seeds, n_rows = (4, 5_000) if options.quick else (20, 50_000)
    found = pd.concat([trial(seed, n_rows, options.separation) for seed in range(options.seeds or seeds)])
    table = found.groupby("method", sort=False).agg(
        hits=("hit", "sum"),
        of=("hit", "size"),
        score=("score", "mean"),
        ARI=("ARI", "mean"),
        seconds=("seconds", "mean"),
    )
    print(table.round(4).to_string())


if __name__ == "__main__":
    main()
