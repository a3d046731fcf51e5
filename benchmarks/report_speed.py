"""Print how long a map and a report take and how large they are, for slides of several sizes.

    python benchmarks/report_speed.py
    python benchmarks/report_speed.py --sizes 10000000 --genes 20

Each slide is simulated, with labels and probabilities put in as `tl.domains` would; a report is then written by
`pdvi report` in a process of its own, so that imports and reading count.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import AnnData

import pdvi


def slide(n_spots: int, n_genes: int, n_domains: int = 12) -> AnnData:
    rng = np.random.default_rng(0)
    xy = rng.random((n_spots, 2)) * np.sqrt(n_spots)
    wave = np.sin(8 * xy[:, 0] / xy.max()) + np.cos(6 * xy[:, 1] / xy.max())
    codes = np.asarray(pd.qcut(wave, n_domains, labels=False), int)
    rates = rng.gamma(0.4, 1.0, (n_domains, n_genes))
    blocks = [
        sp.csr_matrix(rng.poisson(rates[codes[i : i + 50_000]]).astype(np.float32)) for i in range(0, n_spots, 50_000)
    ]
    adata = AnnData(sp.csr_matrix(sp.vstack(blocks)), obs=pd.DataFrame(index=np.arange(n_spots).astype(str)))
    names = np.array([str(k + 1) for k in range(n_domains)])
    adata.obs["domain"] = pd.Categorical(names[codes], categories=names)
    adata.obs["domain_entropy"] = rng.random(n_spots)
    probability = np.full((n_spots, n_domains), 0.1 / n_domains, np.float32)
    probability[np.arange(n_spots), codes] += 0.9
    adata.obsm["spatial"], adata.obsm["domain_probability"] = xy, probability
    trace = {"epoch": np.arange(9.0), "objective": 9.0 - np.arange(9.0), "grad_norm": 0.1 ** np.arange(9.0)}
    adata.uns["domain"] = {"params": {"n_domains": n_domains}, "status": "CONVERGED", "elbo": 0.0, "trace": trace}
    return adata


def map_of(adata: AnnData, path: Path) -> float:
    """Return the seconds that a map of the domains takes."""
    start = time.perf_counter()
    axes: Any = pdvi.pl.domains(adata)
    axes.figure.savefig(path, dpi=150)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[3_600, 154_000, 1_000_000])
    parser.add_argument("--genes", type=int, default=60)
    arguments = parser.parse_args()
    matplotlib.use("Agg")
    print(f"{'spots':>10} {'genes':>6} {'map, s':>8} {'MB':>6} {'report, s':>10} {'MB':>6}")
    with tempfile.TemporaryDirectory() as folder:
        for n_spots in arguments.sizes:
            adata, drawing = slide(n_spots, arguments.genes), Path(folder) / "map.png"
            drawn = map_of(adata, drawing)
            adata.write_h5ad(Path(folder) / "slide.h5ad")
            del adata
            page = Path(folder) / "report.html"
            command = [sys.executable, "-m", "pdvi", "report", str(Path(folder) / "slide.h5ad"), "-o", str(page), "-q"]
            start = time.perf_counter()
            subprocess.run(command, check=True)
            seconds, size = time.perf_counter() - start, page.stat().st_size / 1e6
            about_map = f"{drawn:>8.1f} {drawing.stat().st_size / 1e6:>6.2f}"
            print(f"{n_spots:>10,} {arguments.genes:>6} {about_map} {seconds:>10.1f} {size:>6.2f}", flush=True)


if __name__ == "__main__":
    main()
