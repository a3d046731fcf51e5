"""What was found, as an AnnData holds it: the largest domain is "1", whatever the fits called it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import entr

from pdvi._anndata import keys
from pdvi.core.result import Result
from pdvi.mixtures.annotate import keep
from pdvi.mixtures.consensus import match
from pdvi.mixtures.pipeline import Domains
from pdvi.mixtures.recipe import Recipe
from pdvi.mixtures.samples import about_mean
from pdvi.mixtures.task import Task
from pdvi.mixtures.views import Agreed, Tissue, View
from pdvi.pl.colors import kept_colors

if TYPE_CHECKING:
    from anndata import AnnData


class Outcome(NamedTuple):
    """Hold the label of every spot, how probable each is, and one mixture's own posterior."""

    labels: np.ndarray
    probability: np.ndarray
    certainty: np.ndarray
    posterior: np.ndarray
    result: Result
    refined: bool
    views: dict[str, Any]
    composition: np.ndarray | None = None  # of types in domains
    types: np.ndarray | None = None
    model: dict[str, Any] | None = None  # for other slides, see `tl.annotate`


def of_one(single: Domains, task: Task) -> Outcome:
    """Return the outcome of a single fit: as certain as its own posterior."""
    found = single.found
    found.warn_unless_converged("tl.domains", task)
    own = found.probabilities
    return Outcome(own.argmax(1), own, own.max(1), own, found.result, single.refined, {})


def of_views(agreed: Agreed) -> Outcome:
    """Return the outcome of several views; the posterior is that of the most typical one, or of the fit after them."""
    found, common = agreed.found, agreed.consensus
    n_domains = common.probability.shape[1]
    if found is None:
        typical = agreed.seen[common.medoid]
        own, result = typical.probabilities, typical.result
    else:
        own, result = found.probabilities, found.result
    posterior = np.empty_like(own)
    posterior[:, match(own.argmax(1), common.labels, n_domains)] = own
    views = {
        "names": np.array([f"{one.view.kind}, {one.view.n_neighbors} / {one.n_components}" for one in agreed.seen]),
        "kind": np.array([one.view.kind for one in agreed.seen]),
        "n_neighbors": np.array([one.view.n_neighbors for one in agreed.seen]),
        "n_components": np.array([one.n_components for one in agreed.seen]),
        "elbo": np.array([-float(one.result.objective) for one in agreed.seen]),
        "converged": np.array([one.result.converged for one in agreed.seen]),
        "seconds": np.array([one.seconds for one in agreed.seen]),
        "agreement": common.agreement,
        "medoid": common.medoid,
    }
    outcome = Outcome(common.labels, common.probability, common.certainty, posterior, result, agreed.refined, views)
    of_types = next((i for i, one in enumerate(agreed.seen) if one.composition is not None), None)
    if of_types is None:
        return outcome
    seen = agreed.seen[of_types]
    composition = np.empty_like(seen.composition)
    composition[match(seen.probabilities.argmax(1), common.labels, n_domains)] = seen.composition
    return outcome._replace(composition=composition, types=seen.types)


def kept_model(tissue: Tissue, outcome: Outcome, sizes: dict[View, int], recipe: Recipe) -> dict[str, Any]:
    """Return what labels other slides: the mixture of every view of averages within the domains that were found."""
    n_domains, width = outcome.probability.shape[1], max(sizes.values())
    some = slice(None, None, max(1, len(outcome.labels) // recipe.cloud_rows))
    labels, sample = outcome.labels[some], None if tissue.sample is None else tissue.sample[some]
    kept = [
        keep(about_mean(tissue.rows(view, size).X[some], sample), view.n_neighbors, labels, n_domains, recipe)
        for view, size in sizes.items()
    ]
    missing = [width - size for size in sizes.values()]
    return {
        "n_neighbors": np.array([one.n_neighbors for one in kept]),
        "n_components": np.array(list(sizes.values())),
        "means": np.stack([np.pad(one.means, ((0, 0), (0, m))) for one, m in zip(kept, missing)]),
        "scale": np.stack([np.pad(one.scale, ((0, m), (0, m))) for one, m in zip(kept, missing)]),
        "shares": np.stack([one.shares for one in kept]),
        "distance": np.array([one.distance for one in kept]),
        "explained": np.array([one.explained for one in kept]),
    }


def write(adata: AnnData, key: str, outcome: Outcome, params: dict[str, Any]) -> None:
    """Write an outcome to ``obs``, ``obsm`` and ``uns``."""
    n_domains = params["n_domains"]
    order = np.argsort(-np.bincount(outcome.labels, minlength=n_domains), kind="stable")
    rank = np.argsort(order)
    names = [str(k + 1) for k in range(n_domains)]
    write_labels(adata, key, outcome.probability[:, order], names, rank[outcome.labels], outcome.certainty)
    adata.obsm[keys.posterior(key)] = np.ascontiguousarray(outcome.posterior[:, order], np.float32)
    result = outcome.result
    adata.uns[key] = {
        "params": params,
        "refined": outcome.refined,
        "status": str(result.status),
        "elbo": -float(result.objective),
        "trace": {name: column.to_numpy() for name, column in result.trace.items()},
    }
    if outcome.views:
        adata.uns[key]["views"] = outcome.views
    if outcome.model is not None:
        ordered = {name: outcome.model[name][:, order] for name in ("means", "shares")}
        adata.uns[key]["model"] = {**outcome.model, **ordered}
    if outcome.composition is not None and outcome.types is not None:
        # only types that some spot has; the most frequent first
        counts = np.bincount(outcome.types, minlength=outcome.composition.shape[1])
        used = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
        place = np.full(len(counts), -1)
        place[used] = np.arange(len(used))
        shares = outcome.composition[order][:, used]
        composition = (shares / shares.sum(1, keepdims=True)).astype(np.float32)
        adata.uns[key]["types"] = {
            "names": np.array([str(k + 1) for k in range(len(used))]),
            "composition": composition,
            "of_spot": place[outcome.types].astype(np.int32),
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
    """Write labels, their certainty, probabilities and colours.

    Without ``colors`` domains keep those that they had in an earlier fit of the same name.
    """
    probability = np.ascontiguousarray(probability, np.float32)
    column = pd.Series(pd.Categorical(np.array(names)[labels], categories=names), adata.obs_names)
    adata.uns[keys.colors(key)] = kept_colors(adata, key, column) if colors is None else colors
    adata.obs[key] = column
    adata.obs[keys.certainty(key)] = certainty.astype(np.float32)
    adata.obs[keys.entropy(key)] = _entropy(probability)
    adata.obsm[keys.probability(key)] = probability


def _entropy(probability: np.ndarray) -> np.ndarray:
    """Between 0 and 1."""
    return np.clip(entr(probability).sum(1, dtype=float) / np.log(probability.shape[1]), 0, 1)
