"""The demonstration: a simulated tissue, its domains by k-means and by ours, figures and a report."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sklearn.cluster import KMeans

from pdvi import metrics, pl, pp, report, tl
from pdvi._anndata import keys
from pdvi._base.atomic import replacing
from pdvi.datasets.tissue import tissue
from pdvi.pl.colors import matching_colors
from pdvi.pl.figures import write_figure

FILES = ("map.png", "truth.png", "entropy.png", "trace.png", "report.html")


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

    def judged(method: str, find: Callable[[], Any]) -> Row:
        say(f"finding domains: {method}")
        start = time.perf_counter()
        labels = find()
        seconds = time.perf_counter() - start
        return Row(method, metrics.ari(truth, labels), metrics.nmi(truth, labels), seconds)

    def ours() -> Any:
        tl.domains(adata, n_domains, seed=seed)
        return adata.obs[keys.DOMAIN]

    k_means = KMeans(n_domains, n_init=5, random_state=seed)
    rows = [
        judged("k-means on principal components", lambda: k_means.fit_predict(adata.obsm[keys.COMPONENTS])),
        judged("pdvi, first call (compiles)", ours),
        judged("pdvi, second call", ours),
    ]
    say(f"drawing into {out}")
    colors = matching_colors(truth, adata.obs[keys.DOMAIN], adata.uns[keys.colors(keys.DOMAIN)])
    adata.uns[keys.colors(keys.TRUTH)] = colors
    axes = [pl.domains(adata), pl.domains(adata, key=keys.TRUTH), pl.entropy(adata), pl.trace(adata)]
    for name, each in zip(FILES, axes):
        with replacing(out / name) as temporary:
            write_figure(each, temporary)
    with replacing(out / FILES[-1]) as temporary:
        report.write(adata, temporary, title="pdvi demo")
    return rows
