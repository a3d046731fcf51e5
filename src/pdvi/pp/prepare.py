"""The paper's preprocessing, through scanpy: genes, normalisation, logarithm, scale, principal components."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from pdvi._anndata.checks import counts_of, is_sparse, say, to_change
from pdvi._anndata.keys import COMPONENTS
from pdvi._base import checks

if TYPE_CHECKING:
    from anndata import AnnData


def prepare(
    adata: AnnData,
    *,
    layer: str | None = None,
    n_genes: int = 2_000,
    n_components: int = 50,
    clip: float = 10.0,
    normalize: bool | None = None,
    key_added: str = COMPONENTS,
    seed: int = 0,
    copy: bool = False,
) -> AnnData | None:
    """Write principal components to ``obsm[key_added]``; nothing else in ``adata`` changes.

    Counts: the ``n_genes`` most variable genes (seurat_v3 on counts; all genes of a smaller panel), every spot scaled
    to the median total, log1p, every gene divided by its standard deviation without centring, clipped,
    PCA. The matrix is never made dense as a whole. The paper takes 5,000 genes.

    Parameters
    ----------
    layer
        where the counts are; by default X.
    normalize
        whether X holds counts to be normalised; by default it does if no value is negative and not all values
        look like logarithms (none above 30 and not all whole). What was found is said.
    clip
        the largest value of a gene, in its standard deviations.
    copy
        change and return a copy of ``adata`` instead of ``adata`` itself.
    """
    checks.whole("n_genes", n_genes, least=1)
    checks.whole("n_components", n_components, least=1)
    checks.positive("clip", clip)
    checks.seed("seed", seed)
    adata = to_change(adata, copy=copy)
    import scanpy as sc
    from anndata import AnnData

    matrix = counts_of(adata, layer)
    values = matrix.data if is_sparse(matrix) else matrix.ravel()
    if normalize is None:
        normalize = _looks_like_counts(values)
        if not normalize:
            say("X looks normalised already (logarithms or negative values): totals and log1p are left out.")
    elif normalize and values.size and values.min() < 0:
        msg = f"counts must not be negative, but the smallest is {values.min():g}; set normalize=False."
        raise ValueError(msg)
    names = np.arange(adata.n_obs).astype(str)
    work = AnnData(matrix, obs=pd.DataFrame(index=names), var=pd.DataFrame(index=np.arange(adata.n_vars).astype(str)))
    filled = np.asarray((work.X != 0).sum(0)).ravel() > 0
    if not filled.any():
        msg = "adata.X must have at least one value that is not 0; all genes are empty."
        raise ValueError(msg)
    work = work[:, filled].copy()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(scanpy|anndata|sklearn)")
        warnings.filterwarnings("ignore", message="Some cells have zero counts")  # they stay at zero
        if normalize and work.n_vars > n_genes:
            sc.pp.highly_variable_genes(work, n_top_genes=n_genes, flavor="seurat_v3", check_values=False)
            work = work[:, work.var["highly_variable"]].copy()
        if normalize:
            _normalise(sc, work)
        sc.pp.scale(work, zero_center=False, max_value=clip)
        most = min(n_components, work.n_vars - 1, work.n_obs - 1)
        if most < 1:  # one gene, or two spots: nothing to reduce
            dense = work.X.toarray() if is_sparse(work.X) else work.X
            components = np.asarray(dense - dense.mean(0), np.float32)
        else:
            sc.pp.pca(work, n_comps=most, random_state=seed)
            components = work.obsm["X_pca"]  # scanpy's own name
    adata.obsm[key_added] = np.asarray(components, np.float32)
    return adata if copy else None


def _normalise(sc: ModuleType, work: AnnData) -> None:
    totals = np.asarray(work.X.sum(1)).ravel()
    sc.pp.normalize_total(work, target_sum=float(np.median(totals[totals > 0])))
    sc.pp.log1p(work)


def _looks_like_counts(values: np.ndarray) -> bool:
    if values.size == 0 or values.min() < 0:
        return values.size == 0
    sample = values[:: max(1, values.size // 100_000)]
    return bool(np.all(sample == np.round(sample)) or sample.max() > 30)
