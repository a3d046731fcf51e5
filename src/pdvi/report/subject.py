"""The labels of a slide and all that is known of them, looked up once for a report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp
from scipy.spatial import cKDTree

from pdvi._anndata import keys
from pdvi._anndata.checks import MAKES_DOMAINS, coordinates_of, fit_of, samples_of
from pdvi._base.checks import key_in
from pdvi.pl.colors import MISSING, colors_of, palette
from pdvi.report.markers import Markers, find_markers

if TYPE_CHECKING:
    from anndata import AnnData

NEIGHBORS = 6  # that tell which domain touches which where the slide has no graph,
ASKED = 500_000  # and how many spots are asked for them: shares in percent are known well from so many


class Subject:
    """A fit on a slide, as a report needs it; samples are by default those the fit told apart."""

    def __init__(
        self,
        adata: AnnData,
        key: str,
        sample_key: str | None,
        spatial_key: str,
        type_key: str | None,
        layer: str | None,
    ):
        self.adata, self.key, self.layer = adata, key, layer
        self.fit = fit_of(adata, key)
        key_in(adata.obs, key, "adata.obs", MAKES_DOMAINS)
        self.coordinates = coordinates_of(adata, spatial_key)[:, :2]  # the second points downwards, as on an image
        if sample_key is None and (fitted := str(self.fit["params"].get("sample_key", ""))) in adata.obs:
            sample_key = fitted
        self.samples = samples_of(adata, sample_key)  # of every spot, numbered
        self.sample_names = [""] if sample_key is None else [*map(str, np.unique(adata.obs[sample_key].astype(str)))]
        if type_key is not None:
            key_in(adata.obs, type_key, "adata.obs", "give the column with the types")
        elif keys.CELL_TYPE in adata.obs:
            type_key = keys.CELL_TYPE
        if layer is not None:
            key_in(adata.layers, layer, "adata.layers", "name the layer with the counts, or none for adata.X")
        self.sample_key, self.type_key = sample_key, type_key
        labels = adata.obs[key].astype("category")
        codes, categories = labels.cat.codes.to_numpy().astype(np.int64), labels.cat.categories
        missing = ["not labelled"] if (codes < 0).any() else []
        self.names = [*map(str, categories), *missing]  # of the domains, and of spots without one, if there are any
        self.codes = np.where(codes < 0, len(categories), codes)
        given = colors_of(adata, key, len(categories))
        if not all(re.fullmatch("#[0-9a-fA-F]{6}", color) for color in given):
            from matplotlib.colors import is_color_like, to_hex

            own = palette(len(given))
            given = [to_hex(color) if is_color_like(color) else other for color, other in zip(given, own)]
        self.colors = [*given, *(MISSING for _ in missing)]  # as #rrggbb, which is what the page reads

    @cached_property
    def probability(self) -> np.ndarray | None:
        """Of every domain for every spot."""
        found = self.adata.obsm.get(keys.probability(self.key))
        return None if found is None else np.asarray(found, float)

    @cached_property
    def certainty(self) -> np.ndarray | None:
        """The share of views that agree."""
        column = self.adata.obs.get(keys.certainty(self.key))
        # not asarray, which asks a Series for attributes, and that looks them up among all names of spots
        return None if column is None else column.to_numpy(float)

    @cached_property
    def markers(self) -> Markers | None:
        """Of every domain against the rest; spots without a domain have none and count nowhere."""
        known = self.adata.obs[self.key].notna().to_numpy()
        return find_markers(self.adata, np.where(known, self.codes, -1), len(self.names), layer=self.layer)

    def best(self, domain: int, n: int) -> list[int]:
        """Return up to ``n`` markers of a domain, the clearest first."""
        return [] if self.markers is None else self.markers.best(domain, n)

    def contacts(self) -> np.ndarray:
        """Return which share of the edges from one domain lead to each, rows from, columns to."""
        graph_key = str(self.fit["params"].get("graph_key", keys.WEIGHTS))
        if graph_key in self.adata.obsp:
            source, target = sp.coo_array(self.adata.obsp[graph_key]).coords
        else:
            source, target = self._nearest()
        return shares(self.codes[source], self.codes[target], len(self.names), len(self.names))

    def _nearest(self) -> tuple[np.ndarray, np.ndarray]:
        """Edges from spots, evenly spread where they are many, to the nearest others of their sample."""
        sources, targets = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        step = max(1, len(self.samples) // ASKED)
        for sample in np.unique(self.samples):
            rows = np.flatnonzero(self.samples == sample)
            places, asked = self.coordinates[rows], np.arange(0, len(rows), step)
            k = [*range(1, min(NEIGHBORS + 1, len(rows)) + 1)]
            near = np.asarray(cKDTree(places).query(places[asked], k=k, workers=-1)[1])
            others = near != asked[:, None]
            sources.append(rows[np.repeat(asked, others.sum(1))])
            targets.append(rows[near[others]])
        return np.concatenate(sources), np.concatenate(targets)

    def types(self) -> tuple[list[str], np.ndarray] | None:
        """Return the names of the types, and the share of each in every domain (rows); None if there are none."""
        found = self.fit.get("types")
        if isinstance(found, Mapping) and "composition" in found:
            matrix = np.asarray(found["composition"], float)
            if matrix.ndim == 2 and len(matrix) == len(self.names):
                names = [str(name) for name in found.get("names", range(1, matrix.shape[1] + 1))]
                return names, matrix / np.maximum(matrix.sum(1, keepdims=True), 1e-12)
        if self.type_key is None:
            return None
        column = self.adata.obs[self.type_key].astype("category")
        names, codes = [str(name) for name in column.cat.categories], column.cat.codes.to_numpy()
        known = codes >= 0
        return names, shares(self.codes[known], codes[known], len(self.names), len(names))


def shares(rows: np.ndarray, columns: np.ndarray, n_rows: int, n_columns: int) -> np.ndarray:
    """Return of each group by ``rows`` the share in each group by ``columns``."""
    count = np.bincount(rows * n_columns + columns, minlength=n_rows * n_columns).reshape(n_rows, n_columns)
    return count / np.maximum(count.sum(1, keepdims=True), 1)
