"""Several samples with and without a batch effect, and slides labelled by a model of another one.

    python benchmarks/samples.py FOLDER [--seeds 1]

FOLDER has DLPFC_151673.h5ad and DLPFC_151676.h5ad, with hand-drawn layers in obs["ground_truth"]. The batch effect is
a factor exp(N(0, 0.3)) for every gene of the second slide, whose counts are drawn anew from Poisson distributions. The
simulated samples have different domains: half of them are missing in one. Beside what they give with offsets stands the
same without (components of logarithms too, all spots as one sample), and what the call gives that knows of no samples,
which differs in its components as well: it takes no logarithms.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import scipy.sparse as sp

import pdvi

PAIR = ("DLPFC_151673", "DLPFC_151676")
SAMPLE = "sample"


def with_factors(slide: ad.AnnData, seed: int, spread: float = 0.3) -> ad.AnnData:
    """The slide as another laboratory would have measured it."""
    rng = np.random.default_rng(seed)
    factors = np.exp(spread * rng.standard_normal(slide.n_vars))
    counts = sp.csr_matrix(slide.X, dtype=float) @ sp.diags_array(factors)
    counts.data = rng.poisson(counts.data).astype(np.float32)
    made = slide.copy()
    made.X = sp.csr_matrix(counts)
    return made


def ari(adata: ad.AnnData, truth: str = "ground_truth") -> float:
    known = adata.obs[truth].notna().to_numpy()
    return float(pdvi.metrics.ari(adata.obs[truth][known].astype(str), adata.obs["domain"][known].astype(str)))


def together(slides: list[ad.AnnData], n_domains: int, seed: int, how: str = "offsets") -> ad.AnnData:
    joined = ad.concat(slides, label=SAMPLE, keys=list("ab"), index_unique="-")
    if how == "no offsets":
        pdvi.pp.spatial_components(joined, log=True)
    pdvi.tl.domains(joined, n_domains, sample_key=SAMPLE if how == "offsets" else None, seed=seed)
    return joined


def different_composition(seed: int) -> list[ad.AnnData]:
    """Two simulated samples, the second without half of the domains."""
    both = pdvi.datasets.tissue(8_000, n_genes=150, n_domains=6, n_samples=2, seed=seed)
    names = sorted(both.obs["truth"].astype(str).unique())
    first, second = (both[both.obs["sample"] == name].copy() for name in both.obs["sample"].unique())
    return [first, second[second.obs["truth"].astype(str).isin(names[:3])].copy()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    one, two = (ad.read_h5ad(arguments.folder / f"{name}.h5ad") for name in PAIR)
    for slide in (one, two):
        slide.var_names_make_unique()
    missing: dict[str, list[float]] = {"offsets": [], "no offsets": [], "no samples": []}
    for seed in range(arguments.seeds):
        other = with_factors(two, seed)
        print(f"seed {seed}: two slides together, ARI {ari(together([one, two], 7, seed)):.3f}", flush=True)
        print(f"seed {seed}: with factors on the second {ari(together([one, other], 7, seed)):.3f}", flush=True)
        slides = different_composition(seed)
        scores = {how: ari(together(slides, 6, seed, how), "truth") for how in missing}
        for how, score in scores.items():
            missing[how].append(score)
        told = "; ".join(f"{how} {score:.3f}" for how, score in scores.items())
        print(f"seed {seed}: half of the domains missing in one, {told}", flush=True)
        fitted = one.copy()
        pdvi.tl.domains(fitted, 7, seed=seed)
        shuffled = two.copy()
        shuffled.X = sp.csr_matrix(two.X)[:, np.random.default_rng(seed).permutation(two.n_vars)]
        for name, slide in (("second slide", two), ("with factors", other), ("genes shuffled", shuffled)):
            new = slide.copy()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", UserWarning)
                pdvi.tl.annotate(new, fitted)
            words = [str(word.message) for word in said if "genes of the fitted" not in str(word.message)]
            told = words[0] if words else "no warning"
            print(f"seed {seed}: {name} labelled by the first, ARI {ari(new):.3f}; {told}", flush=True)
    means = "; ".join(f"{how} {np.mean(scores):.4f}" for how, scores in missing.items())
    print(f"half of the domains missing in one, mean of {arguments.seeds} seeds: {means}", flush=True)


if __name__ == "__main__":
    main()
