"""Domains in an AnnData: the largest domain is "1", whatever the fits called it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.special import entr

from pdvi._anndata import keys
from pdvi.pl.colors import kept_colors
from pdvi.spatial.consensus import match
from pdvi.spatial.views import Domains, View

if TYPE_CHECKING:
    from anndata import AnnData


def write_domains(
    adata: AnnData,
    key: str,
    domains: Domains,
    views: tuple[View, ...],
    params: dict[str, Any],
    mixtures: dict[str, np.ndarray] | None,
) -> None:
    """Write domains to ``obs``, ``obsm`` and ``uns``; ``mixtures`` label other slides (`tl.annotate`).

    The certainty of a single view is that of its own posterior, that of several the fraction of views that agree.
    """
    n_domains, labels, own = params["n_domains"], domains.labels, domains.best.probabilities
    single = len(views) == 1
    probability, certainty = (own, own.max(1)) if single else (domains.probability, domains.certainty)
    order = np.argsort(-np.bincount(labels, minlength=n_domains), kind="stable")
    rank = np.argsort(order)
    names = [str(k + 1) for k in range(n_domains)]
    write_labels(adata, key, probability[:, order], names, rank[labels], certainty)
    posterior = np.empty_like(own)
    posterior[:, match(own.argmax(1), labels, n_domains)] = own
    adata.obsm[keys.posterior(key)] = np.ascontiguousarray(posterior[:, order], np.float32)
    result = domains.best.result
    adata.uns[key] = {
        "params": params,
        "status": str(result.status),
        "elbo": -float(result.objective),
        "trace": {name: column.to_numpy() for name, column in result.trace.items()},
    }
    if not single:
        adata.uns[key]["views"] = _views(domains, views)
    if mixtures is not None:
        ordered = {name: mixtures[name][:, order] for name in ("means", "shares")}
        adata.uns[key]["model"] = {**mixtures, **ordered}
    types = _types(domains, order)
    if types is not None:
        adata.uns[key]["types"] = types


def _views(domains: Domains, views: tuple[View, ...]) -> dict[str, Any]:
    """What is said of every view."""
    fits = domains.fits
    sizes = [fit.whitening.shape[0] for fit in fits]
    return {
        "names": np.array([f"{view.kind}, {view.n_neighbors} / {size}" for view, size in zip(views, sizes)]),
        "kind": np.array([view.kind for view in views]),
        "n_neighbors": np.array([view.n_neighbors for view in views]),
        "n_components": np.array(sizes),
        "elbo": np.array([-fit.objective for fit in fits]),
        "converged": np.array([fit.result.converged for fit in fits]),
        "seconds": np.array([float(fit.result.trace["seconds"].iloc[-1]) for fit in fits]),
        "agreement": domains.agreement,
        "medoid": domains.medoid,
    }


def _types(domains: Domains, order: np.ndarray) -> dict[str, Any] | None:
    """The composition of domains by the first hierarchical view: of types that some spot has, most frequent first."""
    fit = next((fit for fit in domains.fits if fit.types is not None and len(fit.types) == len(domains.labels)), None)
    if fit is None or fit.types is None or fit.composition is None:
        return None
    composition = np.empty_like(fit.composition)
    composition[match(fit.labels, domains.labels, len(order))] = fit.composition
    of_spot = fit.types.argmax(1)
    counts = np.bincount(of_spot, minlength=composition.shape[1])
    used = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
    place = np.full(len(counts), -1)
    place[used] = np.arange(len(used))
    fractions = composition[order][:, used]
    return {
        "names": np.array([str(k + 1) for k in range(len(used))]),
        "composition": (fractions / fractions.sum(1, keepdims=True)).astype(np.float32),
        "of_spot": place[of_spot].astype(np.int32),
    }


def write_labels(
    adata: AnnData,
    key: str,
    probability: np.ndarray,
    names: list[str],
    labels: np.ndarray,
    certainty: np.ndarray,
    colors: Any = None,
) -> None:
    """Write labels, their certainty, probabilities and colors.

    Without ``colors`` domains keep those that they had in an earlier fit of the same name.
    """
    probability = np.ascontiguousarray(probability, np.float32)
    column = pd.Series(pd.Categorical(np.array(names)[labels], categories=names), adata.obs_names)
    adata.uns[keys.colors(key)] = kept_colors(adata, key, column) if colors is None else colors
    adata.obs[key] = column
    adata.obs[keys.certainty(key)] = certainty.astype(np.float32)
    entropy = entr(probability).sum(1, dtype=float) / np.log(probability.shape[1])
    adata.obs[keys.entropy(key)] = np.clip(entropy, 0, 1)
    adata.obsm[keys.probability(key)] = probability
