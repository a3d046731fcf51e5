"""Another slide's expression in the spatial components of a fitted one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from pdvi._anndata.checks import counts_of, is_sparse, say
from pdvi.pp.normalise import times

if TYPE_CHECKING:
    from anndata import AnnData

FEWEST_GENES = 0.5  # of those that the components are made of: with fewer present their directions mean little


def projected(adata: AnnData, made: Mapping[str, Any], *, layer: str | None = None) -> np.ndarray:
    """Return the components of spots along directions that ``made`` (``uns["X_spatial"]`` of another slide) tells.

    Every step is that of `spatial_components` with the other slide's genes, target, scales and loadings. Genes that
    are missing count as if they had their mean everywhere; the mean of all spots is not taken off.
    """
    genes = np.asarray(made["genes"]).astype(str)
    places = adata.var_names.get_indexer(genes)
    missing = places < 0
    if missing.mean() > 1 - FEWEST_GENES:
        msg = (
            f"`adata` must have the genes of the fitted slide: {int(missing.sum())} of {len(genes)} are not in "
            f"adata.var_names (such as {', '.join(genes[missing][:3])}); use the same names."
        )
        raise ValueError(msg)
    if missing.any():
        say(f"{int(missing.sum())} of {len(genes)} genes of the fitted slide are missing; they count as their mean.")
    X = counts_of(adata, layer)[:, places[~missing]]
    target, params = float(made["target"]), made["params"]
    if params["normalize"]:
        totals = np.asarray(X.sum(1)).ravel()
        share = 1.0
        if missing.any():  # a spot without them is expected to have a smaller total
            kept = totals[totals > 0]
            share = float(np.median(kept)) / target if len(kept) else 1.0
        factors = (target * share / np.where(totals > 0, totals, target * share)).astype(np.float32)
        X = times(X, factors, log=bool(params.get("log", True)))  # of slides that an older version has fitted
    scale, clip = np.asarray(made["scale"])[~missing].astype(np.float32), np.float32(params["clip"])
    if is_sparse(X):
        X = sp.csr_array(X)
        X.data = np.clip(X.data / scale[X.indices], -clip, clip)
    else:
        X = np.clip(X / scale, -clip, clip)
    return np.asarray(X @ np.asarray(made["loadings"], np.float32)[~missing], np.float32)
