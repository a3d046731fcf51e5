"""The demonstration: a simulated tissue, its domains by k-means and by ours, figures and a report."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.cluster import KMeans

from pdvi import metrics, pl, pp, report, tl
from pdvi._anndata import keys
from pdvi._base.atomic import replacing
from pdvi.datasets.tissue import tissue
from pdvi.pl.colors import matching_colors
from pdvi.pl.figures import write_figure

if TYPE_CHECKING:
    from anndata import AnnData

FILES = ("map.png", "truth.png", "entropy.png", "trace.png", "overview.png", "report.html")
K_MEANS = "k-means"


class Row(NamedTuple):
    """A line of the table: a method, its agreement with the truth, and its time."""

    method: str
    ari: float
    nmi: float
    seconds: float


def run(n_spots: int, n_domains: int, seed: int, out: Path, say: Callable[[str], None]) -> list[Row]:
    """Simulate a tissue, find its domains, write figures and a report into ``out``; return a table of methods."""
    out.mkdir(parents=True, exist_ok=True)
    say(f"simulating a tissue of {n_spots:,} cells and {n_domains} domains")
    adata = tissue(n_spots, n_domains=n_domains, seed=seed)
    say(f"preparing {adata.n_vars} genes")
    pp.prepare(adata)
    truth = adata.obs[keys.TRUTH]

    def ours() -> Any:
        tl.domains(adata, n_domains, seed=seed)
        return adata.obs[keys.DOMAIN]

    def k_means() -> Any:
        labels = KMeans(n_domains, n_init=5, random_state=seed).fit_predict(adata.obsm[keys.COMPONENTS])
        adata.obs[K_MEANS] = pd.Categorical(labels.astype(str))
        return labels

    rows = []
    finders = {"k-means on principal components": k_means}
    finders |= {"pdvi, first call (compiles)": ours, "pdvi, second call": ours}
    for method, find in finders.items():
        say(f"finding domains: {method}")
        start = time.perf_counter()
        labels = find()
        seconds = time.perf_counter() - start
        rows.append(Row(method, metrics.ari(truth, labels), metrics.nmi(truth, labels), seconds))
    say(f"drawing into {out}")
    for other in (keys.TRUTH, K_MEANS):
        colors = matching_colors(adata.obs[other], adata.obs[keys.DOMAIN], adata.uns[keys.colors(keys.DOMAIN)])
        adata.uns[keys.colors(other)] = colors
    axes = [pl.domains(adata), pl.domains(adata, key=keys.TRUTH), pl.entropy(adata), pl.trace(adata)]
    for name, each in zip(FILES, [*axes, _overview(adata, rows)]):
        with replacing(out / name) as temporary:
            write_figure(each, temporary)
    with replacing(out / FILES[-1]) as temporary:
        report.write(adata, temporary, title="pdvi demo")
    return rows


def _overview(adata: AnnData, rows: list[Row]) -> np.ndarray:
    """Draw the truth and what both methods found side by side, in the same colours."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(1, 3, figsize=(11, 2.9), layout="constrained")
    titles = {
        keys.TRUTH: "truth",
        K_MEANS: f"k-means, ARI {rows[0].ari:.2f}",
        keys.DOMAIN: f"pdvi, ARI {rows[-1].ari:.2f}",
    }
    for ax, (key, title) in zip(axes, titles.items()):
        pl.domains(adata, key=key, ax=ax, legend=False, title=title)
    return axes
