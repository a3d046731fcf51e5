"""From counts to log expression of the genes that vary: what principal and spatial components begin with."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pdvi._anndata.checks import counts_of, is_sparse, say


class Expression(NamedTuple):
    """Log expression of the selected genes; sparse if the counts were."""

    work: Any  # an AnnData of its own
    genes: np.ndarray  # which columns of the original they are
    normalized: bool
    target: float | None  # the total that every spot was scaled to


def log_expression(
    adata: Any, *, layer: str | None, n_genes: int, normalize: bool | None, samples: np.ndarray | None = None
) -> Expression:
    """Select the most variable genes (within ``samples``, if given), scale spots to the median total, take log1p.

    Counts are told from logarithms by their values unless ``normalize`` says; those are left as they are.
    """
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
    target = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(scanpy|anndata|sklearn)")
        warnings.filterwarnings("ignore", message="Some cells have zero counts")  # they stay at zero
        if normalize and work.n_vars > n_genes:
            within = {}
            if samples is not None and samples.max() > 0:
                work.obs["sample"] = pd.Categorical(samples.astype(str))
                within = {"batch_key": "sample"}
            sc.pp.highly_variable_genes(work, n_top_genes=n_genes, flavor="seurat_v3", check_values=False, **within)
            work = work[:, work.var["highly_variable"]].copy()
        if normalize:
            totals = np.asarray(work.X.sum(1)).ravel()
            target = float(np.median(totals[totals > 0]))
            sc.pp.normalize_total(work, target_sum=target)
            sc.pp.log1p(work)
    return Expression(work, work.var_names.to_numpy().astype(int), normalize, target)


def _looks_like_counts(values: np.ndarray) -> bool:
    if values.size == 0 or values.min() < 0:
        return values.size == 0
    sample = values[:: max(1, values.size // 100_000)]
    return bool(np.all(sample == np.round(sample)) or sample.max() > 30)
