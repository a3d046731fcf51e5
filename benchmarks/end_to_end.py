"""From principal components to labels: seconds, memory and agreement with the truth.

    python benchmarks/end_to_end.py                      # the simulated embryo, 150,000 spots, 23 domains
    python benchmarks/end_to_end.py --slide FILE.h5ad    # the coordinates of a real slide
    python benchmarks/end_to_end.py --counts             # a tissue of 150,000 x 2,000 counts, from the counts

Features of the first two are simulated: 50 components, smooth random domains, and so much noise that k-means sees
next to nothing. "After compilation" is the second call in the same process; peak memory is of the whole process.
"""

from __future__ import annotations

import argparse
import resource
import time
import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
from sklearn.cluster import KMeans
from sklearn.mixture import GaussianMixture

import pdvi

DOMAINS, COMPONENTS = 23, 50


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def simulated_on(coordinates: np.ndarray, noise: float, patchiness: float, seed: int) -> ad.AnnData:
    """Domains and components of a simulated tissue, laid over given coordinates."""
    side = 400
    grid = pdvi.datasets.tissue_features(
        side**2, n_features=COMPONENTS, n_domains=DOMAINS, patchiness=patchiness, seed=seed
    )
    unit = (coordinates - coordinates.min(0)) / np.ptp(coordinates, axis=0).max()
    pixel = np.minimum((unit * side).astype(int), side - 1)
    truth = grid.labels[pixel[:, 0] * side + pixel[:, 1]]
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((DOMAINS, COMPONENTS)) * np.linspace(1.2, 0.2, COMPONENTS)
    pcs = centres[truth] + noise * rng.standard_normal((len(truth), COMPONENTS))
    adata = ad.AnnData(obs=pd.DataFrame({"truth": truth.astype(str)}, index=np.arange(len(truth)).astype(str)))
    adata.obsm["X_pca"], adata.obsm["spatial"] = pcs.astype(np.float32), coordinates
    return adata


def row(name: str, seconds: float, ari: float, note: str = "") -> None:
    print(f"{name:52}{seconds:8.1f} s   ARI {ari:.3f}   peak {peak():.1f} GB   {note}", flush=True)


def from_components(adata: ad.AnnData) -> None:
    truth = adata.obs["truth"]
    for call in ("first call", "after compilation"):
        fresh = ad.AnnData(obs=adata.obs.copy(), obsm={key: adata.obsm[key] for key in ("X_pca", "spatial")})
        began = time.perf_counter()
        pdvi.tl.domains(fresh, DOMAINS)
        seconds = time.perf_counter() - began
        note = f"fit {fresh.uns['domain']['fit_seconds']:.1f} s, {fresh.obs['domain'].nunique()} domains"
        row(f"pdvi, {call}", seconds, pdvi.metrics.ari(truth, fresh.obs["domain"]), note)
    X = adata.obsm["X_pca"]
    began = time.perf_counter()
    labels = KMeans(DOMAINS, n_init=1, random_state=0).fit_predict(X)
    row("k-means on the components", time.perf_counter() - began, pdvi.metrics.ari(truth, labels))
    began = time.perf_counter()
    pdvi.pp.neighborhood(adata, n_components=15)
    labels = GaussianMixture(DOMAINS, covariance_type="tied", random_state=0).fit_predict(adata.obsm["X_neighborhood"])
    row(
        "30 neighbours' mean + scikit-learn's tied mixture",
        time.perf_counter() - began,
        pdvi.metrics.ari(truth, labels),
    )


def from_counts(n_spots: int) -> None:
    adata = pdvi.datasets.tissue(n_spots, n_genes=2_000, n_domains=DOMAINS)
    print(f"{adata.n_obs:,} x {adata.n_vars:,} counts; peak so far {peak():.1f} GB", flush=True)
    began = time.perf_counter()
    pdvi.pp.prepare(adata)
    prepared = time.perf_counter() - began
    pdvi.tl.domains(adata, DOMAINS)
    ari = pdvi.metrics.ari(adata.obs["truth"], adata.obs["domain"])
    row("from counts, first call", time.perf_counter() - began, ari, f"preparing {prepared:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slide", type=Path)
    parser.add_argument("--counts", action="store_true")
    parser.add_argument("--spots", type=int, default=150_000)
    parser.add_argument("--noise", type=float, default=3.0)
    parser.add_argument("--patchiness", type=float, default=27.0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    if arguments.counts:
        from_counts(arguments.spots)
        return
    if arguments.slide:
        coordinates = np.asarray(ad.read_h5ad(arguments.slide).obsm["spatial"], float)[:, :2]
    else:
        side = int(np.ceil(np.sqrt(arguments.spots)))
        coordinates = np.argwhere(np.ones((side, side)))[: arguments.spots].astype(float)
    print(f"{len(coordinates):,} spots, {COMPONENTS} components, {DOMAINS} domains")
    from_components(simulated_on(coordinates, arguments.noise, arguments.patchiness, seed=0))


if __name__ == "__main__":
    main()
