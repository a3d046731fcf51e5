"""Simulate a tissue: the organ, its slides, their cells, and counts or features of these."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from pdvi._anndata import keys
from pdvi._anndata.lazy import SlideFile
from pdvi._base import checks
from pdvi.datasets.problems import checked_rng
from pdvi.datasets.tissue.anatomy import draw_organ
from pdvi.datasets.tissue.cells import draw_cells, draw_mixtures
from pdvi.datasets.tissue.counts import Counts, Features
from pdvi.datasets.tissue.slides import draw_slides

if TYPE_CHECKING:
    from anndata import AnnData


def tissue(
    n_spots: int = 20_000,
    *,
    n_genes: int = 500,
    n_domains: int = 12,
    n_samples: int = 1,
    cells_per_spot: int = 1,
    mixing: float | None = None,
    depth: float | None = None,
    dropout: float = 0.1,
    features: int | None = None,
    path: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> AnnData:
    """Simulate an organ with layers, regions and nuclei, whose domains are mixtures of cell types.

    The outline is a smooth blob. Along a part of it lie layers, as in a cortex; the inside is divided into warped
    cells around sites, and some of these hold a nucleus. A domain is a mixture of its own two cell types and of
    types found everywhere. Counts are negative binomial; their means are products of the spot's library size, its
    cells' profiles, a weaker regional profile, and, for some genes, a ligand-like gradient around a source that
    knows no domains.

    Parameters
    ----------
    n_spots
        over all samples.
    n_genes
        columns of ``X``.
    n_domains
        about a third are layers, a sixth nuclei.
    n_samples
        slides side by side, each another deformation of the same organ with its own shift in expression.
    cells_per_spot
        1: single cells, unevenly dense; more: spots on a hexagonal grid, each the sum of so many cells.
    mixing
        share of the cells that come from anywhere: 0 tells domains by their types, 1 not at all. By default 0.3 for
        single cells and up to 0.7 for spots of many, since their average is easier to tell apart.
    depth
        mean counts of a spot; by default 12 times the root of the number of genes, up to twice that for many cells.
    dropout
        share of the positive counts that is lost.
    features
        skip the counts, and write this many features into ``obsm["X_pca"]``: for millions of spots. ``n_genes``,
        ``depth`` and ``dropout`` then have no effect.
    path
        write the slide to this new h5ad file (or folder, with the ending .zarr), counts block by block as they are
        drawn: they are never all in memory, and the slide that is returned has none.

    Returns
    -------
    AnnData
        counts in ``X`` (sparse), coordinates in micrometers in ``obsm["spatial"]``, the domain in ``obs["truth"]``,
        the (most frequent) cell type in ``obs["cell_type"]``, the slide in ``obs["sample"]``.
    """
    sizes = {"n_spots": n_spots, "n_genes": n_genes, "n_samples": n_samples, "cells_per_spot": cells_per_spot}
    sizes |= {} if features is None else {"features": features}
    checked_rng(seed, None if depth is None else {"depth": depth}, **sizes)
    if n_spots < 50 * n_samples:
        msg = f"`n_spots` must be at least 50 for each of {n_samples} sample(s), got {n_spots!r}."
        raise ValueError(msg)
    most = n_spots // (10 * n_samples)
    checks.whole("n_domains", n_domains, least=1, most=most, of="a tenth of a sample's spots")
    several = 1 - 1 / cells_per_spot
    mixing = 0.3 + 0.4 * several if mixing is None else checks.share("mixing", mixing)
    checks.share("dropout", dropout, below_one=True)

    anatomy_seed, cells_seed, expression_seed, *sample_seeds = np.random.SeedSequence(seed).spawn(3 + n_samples)
    organ = draw_organ(n_domains, np.random.default_rng(anatomy_seed))
    mixtures = draw_mixtures(n_domains, mixing, np.random.default_rng(cells_seed))
    sizes_of_samples = np.diff(np.arange(n_samples + 1) * n_spots // n_samples).tolist()
    slides = draw_slides(organ, sizes_of_samples, cells_per_spot, sample_seeds)
    rng = np.random.default_rng(expression_seed)
    file = None if path is None else SlideFile(path)
    fill: Counts | Features
    if features is None:
        depth = 12 * np.sqrt(n_genes) * (1 + several) if depth is None else depth
        fill = Counts(n_genes, mixtures, n_samples, depth, dropout, file, rng)
    else:
        fill = Features(n_spots, features, mixtures, n_samples, rng)
    kind = draw_cells(slides, organ, mixtures, cells_per_spot, fill, fill.rows, int(rng.integers(2**63)))

    from anndata import AnnData

    types = [f"type {t + 1}" for t in range(mixtures.shape[1])]
    columns: dict[str, tuple[Any, Any]] = {
        keys.TRUTH: (slides.domain, organ.names),
        keys.CELL_TYPE: (kind, types),
        keys.SAMPLE: (slides.sample, [str(s + 1) for s in range(n_samples)]),
    }
    obs = pd.DataFrame({key: pd.Categorical.from_codes(*each) for key, each in columns.items()})
    adata = AnnData(obs=obs.set_index(pd.RangeIndex(1, n_spots + 1).astype(str)), **fill.parts())
    adata.obsm[keys.SPATIAL] = slides.position
    given: dict[str, Any] = {"n_spots": n_spots, "n_genes": n_genes, "n_domains": n_domains, "n_samples": n_samples}
    given |= {"cells_per_spot": cells_per_spot, "mixing": mixing, "depth": depth, "dropout": dropout}
    given |= {"features": features, "seed": seed}
    adata.uns["tissue"] = {"params": {name: value for name, value in given.items() if value is not None}}
    if file is not None:
        file.finish(adata)
    return adata


def embryo(
    n_spots: int = 150_000, *, n_genes: int = 2_000, n_domains: int = 23, features: int | None = None, seed: int = 0
) -> AnnData:
    """Simulate a `tissue` at the scale of the paper's embryo: 150,000 spots of a few cells each, in 23 domains."""
    return tissue(n_spots, n_genes=n_genes, n_domains=n_domains, cells_per_spot=4, features=features, seed=seed)
