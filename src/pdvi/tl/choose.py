"""How many domains: fits of every candidate, their agreement between seeds, and the ELBO."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from pdvi import gr, metrics
from pdvi.anndata_checks import coordinates_of, features_of
from pdvi.estimators import PottsMixture
from pdvi.tl.domains import _make_missing


def choose_n_domains(
    adata: Any,
    candidates: Sequence[int],
    *,
    n_seeds: int = 3,
    beta: float = 1.0,
    sample_key: str | None = None,
    key_added: str = "n_domains",
) -> int:
    """Fit every candidate from several seeds; recommend the one whose domains agree best between seeds.

    Writes a table to ``uns[key_added]`` (per candidate: stability, the mean adjusted Rand index between seeds; the
    best ELBO; `pl.n_domains` draws both) and returns the recommended number: the largest candidate whose stability is
    within 0.02 of the highest.
    """
    candidates = sorted({int(k) for k in candidates})
    if not candidates or candidates[0] < 2 or candidates[-1] > adata.n_obs:
        msg = f"`candidates` must be numbers between 2 and the number of spots ({adata.n_obs}), got {candidates}."
        raise ValueError(msg)
    if n_seeds < 2:
        msg = f"`n_seeds` must be at least 2 to compare, got {n_seeds!r}."
        raise ValueError(msg)
    _make_missing(adata, None, gr.build.KEY, sample_key)
    features = features_of(adata, "X_neighborhood", "pdvi.pp.neighborhood(adata)")
    graph, coordinates = adata.obsp[gr.build.KEY], coordinates_of(adata)[:, :2]
    rows = []
    for k in candidates:
        fits = [
            PottsMixture(k, beta=beta, learn_weights=True, random_state=seed).fit(
                features, graph=graph, coordinates=coordinates
            )
            for seed in range(n_seeds)
        ]
        agreement = [metrics.ari(a.labels_, b.labels_) for a, b in combinations(fits, 2)]
        rows.append((k, float(np.mean(agreement)), max(fit.elbo_ for fit in fits)))
    table = pd.DataFrame(rows, columns=["n_domains", "stability", "elbo"])
    stable = table[table["stability"] >= table["stability"].max() - 0.02]
    recommended = int(stable["n_domains"].max())
    adata.uns[key_added] = {"recommended": recommended, **{name: table[name].to_numpy() for name in table}}
    return recommended
