"""The paper's preprocessing: genes, normalisation, logarithm, scale, principal components."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdvi._anndata.checks import is_sparse, to_change
from pdvi._anndata.keys import COMPONENTS
from pdvi._base import checks
from pdvi.pp.normalise import expression_of, scaled

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
    """Write principal components to ``obsm[key_added]``, and how they were made to ``uns[key_added]``.

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
    X = scaled(expression_of(adata, layer=layer, n_genes=n_genes, normalize=normalize).X, clip)
    most = min(n_components, X.shape[1] - 1, X.shape[0] - 1)
    if most < 1:  # one gene, or two spots: nothing to reduce
        dense = X.toarray() if is_sparse(X) else X
        components = dense - dense.mean(0)
    else:
        from sklearn.decomposition import PCA

        components = PCA(most, svd_solver="arpack", random_state=seed).fit_transform(X)
    adata.obsm[key_added] = np.asarray(components, np.float32)
    adata.uns[key_added] = {
        "params": {
            "layer": layer or "",
            "n_genes": int(n_genes),
            "n_components": int(n_components),
            "clip": float(clip),
            "seed": int(seed),
        }
    }
    return adata if copy else None
