"""Compilation of a tissue's fits while its features are still being made: nothing else in a first call takes so long.

A compiled fit depends on sizes and on the pattern of the graph, not on numbers. So one epoch on random rows compiles
the program that the views will need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import scipy.sparse as sp

from pdvi.mixtures.init import one_hot
from pdvi.mixtures.sharded_graph import ShardedGraph
from pdvi.spatial.views import Tissue, View, ViewSettings, fit_from, shard_tissue

MAX_ROWS = 500_000  # of more rows an epoch takes longer than what is gained

_started: set[Any] = set()  # fits whose compilation has been started by this process


@contextmanager
def compile_ahead(
    graph: sp.csr_array,
    coordinates: np.ndarray,
    sample: np.ndarray | None,
    views: tuple[View, ...],
    n_components: int,
    settings: ViewSettings,
) -> Iterator[None]:
    """Compile the fits of ``views`` to all spots in threads while the body runs.

    The weights of ``graph`` do not matter; ``n_components`` is how many components of single spots there will be. A
    tissue that is fitted in groups of spots ends with a fit of the first view to all of them. Only fits by the default
    solver are compiled ahead.
    """
    n_rows, options = len(coordinates), settings.options
    if n_rows > MAX_ROWS or options.solver is not None or settings.storage is not None:
        yield
        return
    fitted = views if n_rows <= settings.config.group_above else views[:1]
    kinds = sorted({view.kind for view in fitted}, key=lambda kind: kind != "types")  # types take longest
    size, n_samples = settings.n_features(n_components), 0 if sample is None else int(sample.max())
    known = (n_rows, size, graph.nnz, n_samples, settings.n_domains, dataclasses.replace(options, seed=0))
    new = [kind for kind in kinds if (kind, known) not in _started]
    if not new:
        yield
        return
    _started.update((kind, known) for kind in new)
    rows = np.random.default_rng(0).standard_normal((n_rows, size)).astype(np.float32)
    sharded = shard_tissue(Tissue(rows, {}, graph, coordinates, sample), settings)
    with ThreadPoolExecutor(len(new)) as threads:
        for kind in new:
            threads.submit(_fit_for_an_epoch, kind, rows, sharded, settings)
        yield


def _fit_for_an_epoch(kind: str, rows: np.ndarray, graph: ShardedGraph, settings: ViewSettings) -> None:
    """Fit rows for an epoch. What goes wrong here goes wrong again, and is reported, in the fit itself."""
    places = np.arange(len(rows))
    start = one_hot(places % settings.n_domains, settings.n_domains)
    n_types = min(settings.config.n_types, len(rows))
    types = one_hot(places % n_types, n_types) if kind == "types" else None
    config = dataclasses.replace(settings.config, max_epochs=1)
    with suppress(Exception):
        fit_from(rows, graph, start, types, dataclasses.replace(settings.options, config=config))
