"""Spatial domains: one call from an AnnData to labels, probabilities and their certainty."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from pdvi import gr, pp
from pdvi._anndata.checks import coordinates_of, features_of, samples_of, say
from pdvi.mixtures.estimators import PottsMixture, Start
from pdvi.pl import palette
from pdvi.tl.refinement import refined


def domains(
    adata: Any,
    n_domains: int,
    *,
    beta: float = 1.0,
    covariance: str = "tied",
    n_init: int | None = None,
    refine: bool | None = None,
    use_rep: str | None = None,
    graph_key: str = gr.build.KEY,
    sample_key: str | None = None,
    key_added: str = "domain",
    n_patches: int | None = None,
    solver: Any = None,
    seed: int = 0,
) -> None:
    """Find spatial domains with a Potts mixture on a neighbourhood graph.

    Writes ``obs[key]`` (categorical, "1" is the largest), ``obsm[key_probability]``, ``obs[key_entropy]`` (0: certain,
    1: all domains equally likely), ``uns[key]`` and ``uns[key_colors]``. What is missing (principal components,
    averaged neighbourhoods, the graph) is made with the defaults, and said once.

    Parameters
    ----------
    n_domains
        how many; `choose_n_domains` helps.
    beta
        strength of the coupling between neighbours.
    covariance
        of the noise: "tied" (one full covariance, re-estimated) or "diagonal".
    n_init
        k-means starts, of which the best fit is kept; by default 6, fewer from 20,000 spots on, 1 from 60,000.
    refine
        whether labels found on averaged neighbourhoods are refined on "X_pca", spot by spot. By default the data
        decides: yes if the spots of a domain are one normal cloud there (borders get sharper), no if they are not,
        as when a domain has several cell types (it would be torn into them). ``uns[key]["refined"]`` tells.
    use_rep
        features in obsm; by default "X_neighborhood", made from "X_pca" if need be.
    graph_key
        symmetric edge weights in obsp; squidpy's "spatial_connectivities" will do.
    sample_key
        a column of obs that tells samples apart: no edges between samples, domains shared by all.
    seed
        the same seed gives the same labels.
    """
    if not isinstance(n_domains, int | np.integer) or not 2 <= n_domains <= adata.n_obs:
        msg = f"`n_domains` must be between 2 and the number of spots ({adata.n_obs}), got {n_domains!r}."
        raise ValueError(msg)
    if n_init is None:
        n_init = int(np.clip(120_000 // adata.n_obs, 1, 6))
    coordinates = coordinates_of(adata)[:, :2]
    samples = samples_of(adata, sample_key)
    _make_missing(adata, use_rep, graph_key, sample_key)
    features = features_of(adata, use_rep or "X_neighborhood", "pdvi.pp.neighborhood(adata)")
    # samples side by side, so that the patches of one do not reach into the next
    extent = np.ptp(coordinates, axis=0).max() + 1.0
    apart = coordinates - coordinates.min(0) + np.column_stack([2 * extent * samples, np.zeros(len(samples))])
    mixture = PottsMixture(
        int(n_domains),
        beta=beta,
        covariance=covariance,
        learn_weights=True,  # domains differ in size
        n_init=n_init,
        n_patches=n_patches,
        solver=solver,
        random_state=seed,
    )
    rows = {"graph": adata.obsp[graph_key], "coordinates": apart}
    coarse = mixture.of_groups(features, **rows)
    found = coarse or Start(mixture.fit(features, **rows).probabilities_, mixture.fit_seconds_)
    better = None
    if refine or (refine is None and use_rep is None and "X_pca" in adata.obsm):
        better = refined(
            features_of(adata, "X_pca", "pdvi.pp.prepare(adata)"),
            np.asarray(found.probabilities, np.float32),
            apart,
            samples,
            beta=beta,
            covariance=covariance,
            seed=seed,
            force=bool(refine),
        )
    if better is None and coarse:
        mixture.fit(features, start=coarse, **rows)
    fitted = better or mixture
    seconds = mixture.fit_seconds_ if better is None else found.seconds + better.fit_seconds_

    order = np.argsort(-np.bincount(fitted.labels_, minlength=n_domains), kind="stable")
    probability = np.ascontiguousarray(fitted.probabilities_[:, order], np.float32)
    names = [str(k + 1) for k in range(n_domains)]
    labels = probability.argmax(1)
    adata.obs[key_added] = pd.Categorical(np.array(names)[labels], categories=names)
    adata.obsm[f"{key_added}_probability"] = probability
    adata.obs[f"{key_added}_entropy"] = _entropy(probability)
    adata.uns[f"{key_added}_colors"] = palette(n_domains)
    adata.uns[key_added] = {
        "params": {
            "n_domains": int(n_domains),
            "beta": float(beta),
            "covariance": covariance,
            "n_init": int(n_init),
            "use_rep": use_rep or "X_neighborhood",
            "graph_key": graph_key,
            "sample_key": sample_key or "",
            "seed": int(seed),
        },
        "refined": better is not None,
        "fit_seconds": seconds,
        "status": str(fitted.result_.status),
        "elbo": float(fitted.elbo_),
        "trace": {name: column.to_numpy() for name, column in fitted.result_.trace.items()},
    }


def _make_missing(adata: Any, use_rep: str | None, graph_key: str, sample_key: str | None) -> None:
    made = []
    if use_rep is None and "X_neighborhood" not in adata.obsm:
        if "X_pca" not in adata.obsm:
            pp.prepare(adata)
            made.append("pdvi.pp.prepare")
        pp.neighborhood(adata, sample_key=sample_key)
        made.append("pdvi.pp.neighborhood")
    if graph_key not in adata.obsp:
        if graph_key != gr.build.KEY:
            msg = f"{graph_key!r} not in adata.obsp (it has {sorted(adata.obsp)}); run pdvi.gr.knn_graph(adata) first."
            raise ValueError(msg)
        gr.knn_graph(adata, use_rep=use_rep, sample_key=sample_key)
        made.append("pdvi.gr.knn_graph")
    if made:
        say(f"made what was missing with the defaults of {', '.join(made)}.")


def _entropy(probability: np.ndarray) -> np.ndarray:
    """Between 0 and 1."""
    safe = np.maximum(probability.astype(float), 1e-300)
    return np.clip(-(probability * np.log(safe)).sum(1) / np.log(probability.shape[1]), 0, 1)
