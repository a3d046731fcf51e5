"""The demonstration: a simulated tissue, its domains by k-means and by ours, figures and a report."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans

from pdvi import metrics, pl, pp, report, tl
from pdvi._anndata.read import write_figure
from pdvi._base.atomic import replacing
from pdvi.datasets.tissue import tissue

FILES = ("map.png", "truth.png", "entropy.png", "trace.png", "report.html")


class Row(NamedTuple):
    """How well a method did."""

    method: str
    ari: float
    nmi: float
    seconds: float


def run(n_spots: int, n_domains: int, seed: int, out: Path, say: Callable[[str], None]) -> list[Row]:
    """Simulate, find the domains, write figures and a report into ``out``; returns a table."""
    out.mkdir(parents=True, exist_ok=True)
    say(f"simulating a tissue of {n_spots:,} cells and {n_domains} domains")
    adata = tissue(n_spots, n_domains=n_domains, seed=seed)
    say(f"preparing {adata.n_vars} genes")
    pp.prepare(adata)
    truth = adata.obs["truth"]

    def judged(method: str, find: Callable[[], Any]) -> Row:
        say(f"finding domains: {method}")
        start = time.perf_counter()
        labels = find()
        seconds = time.perf_counter() - start
        return Row(method, metrics.ari(truth, labels), metrics.nmi(truth, labels), seconds)

    def ours() -> Any:
        tl.domains(adata, n_domains, seed=seed)
        return adata.obs["domain"]

    k_means = KMeans(n_domains, n_init=5, random_state=seed)
    rows = [
        judged("k-means on principal components", lambda: k_means.fit_predict(adata.obsm["X_pca"])),
        judged("pdvi, first call (compiles)", ours),
        judged("pdvi, second call", ours),
    ]
    say(f"drawing into {out}")
    adata.uns["truth_colors"] = matching_colors(truth, adata.obs["domain"], adata.uns["domain_colors"])
    axes = [pl.domains(adata), pl.domains(adata, key="truth"), pl.entropy(adata), pl.trace(adata)]
    for name, each in zip(FILES, axes):
        with replacing(out / name) as temporary:
            write_figure(each, temporary)
    with replacing(out / FILES[-1]) as temporary:
        report.write(adata, temporary, title="pdvi demo")
    return rows


def matching_colors(truth: pd.Series, found: pd.Series, colors: list[str]) -> list[str]:
    """A colour for each true domain: that of the found one it shares most spots with, one to one."""
    table = pd.crosstab(truth.cat.codes, found.cat.codes)
    table = table.reindex(range(len(truth.cat.categories)), fill_value=0)
    table = table.reindex(range(len(found.cat.categories)), fill_value=0, axis=1)
    matched = dict(zip(*linear_sum_assignment(table.to_numpy(), maximize=True)))
    spare = iter(pl.palette(len(colors) + len(table))[len(colors) :])
    return [str(colors[matched[k]]) if k in matched else next(spare) for k in np.arange(len(table))]
