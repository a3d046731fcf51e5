"""What a report is about: the labels of a slide and all that is known of them, looked up once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
from scipy.spatial import cKDTree

from pdvi._anndata import keys
from pdvi._anndata.checks import MAKES_DOMAINS, coordinates_of, fit_of, samples_of
from pdvi._anndata.image import microns_per_unit
from pdvi._base.checks import key_in
from pdvi.pl.colors import MISSING, colors_of, palette
from pdvi.report.markers import Markers, find_markers

if TYPE_CHECKING:
    from anndata import AnnData

NEIGHBOURS = 6  # for which domain touches which, where the slide has no graph,
ASKED = 500_000  # and how many spots are asked for them: shares in percent are known well from so many


@dataclass(frozen=True)
class Subject:
    """A fit on a slide, as a report needs it."""

    adata: AnnData
    key: str
    sample_key: str | None
    spatial_key: str
    type_key: str | None
    layer: str | None

    @classmethod
    def of(
        cls,
        adata: AnnData,
        key: str,
        *,
        sample_key: str | None,
        spatial_key: str,
        type_key: str | None,
        layer: str | None,
    ) -> Subject:
        """Check that everything named is there; samples are by default those the fit told apart."""
        params = fit_of(adata, key)["params"]
        key_in(adata.obs, key, "adata.obs", MAKES_DOMAINS)
        coordinates_of(adata, spatial_key)
        if sample_key is None and (fitted := str(params.get("sample_key", ""))) in adata.obs:
            sample_key = fitted
        samples_of(adata, sample_key)
        if type_key is not None:
            key_in(adata.obs, type_key, "adata.obs", "give the column with the types")
        elif keys.CELL_TYPE in adata.obs:
            type_key = keys.CELL_TYPE
        if layer is not None:
            key_in(adata.layers, layer, "adata.layers", "name the layer with the counts, or none for adata.X")
        return cls(adata, key, sample_key, spatial_key, type_key, layer)

    @cached_property
    def fit(self) -> Mapping[str, Any]:
        """What `tl.domains` noted."""
        return fit_of(self.adata, self.key)

    @cached_property
    def names(self) -> list[str]:
        """Of the domains, and of spots without one, if there are any."""
        labels = self.adata.obs[self.key].astype("category")
        missing = ["not labelled"] if labels.isna().any() else []
        return [*(str(name) for name in labels.cat.categories), *missing]

    @cached_property
    def codes(self) -> np.ndarray:
        """The domain of every spot; those without come last."""
        codes = self.adata.obs[self.key].astype("category").cat.codes.to_numpy().astype(np.int64)
        return np.where(codes < 0, len(self.names) - 1, codes)

    @cached_property
    def colors(self) -> list[str]:
        """As #rrggbb, which is what the page reads."""
        n = self.adata.obs[self.key].astype("category").cat.categories.size
        given = colors_of(self.adata, self.key, n)
        if not all(re.fullmatch("#[0-9a-fA-F]{6}", color) for color in given):
            given = _as_hex(given)
        return [*given, *[MISSING] * (len(self.names) - n)]

    @cached_property
    def samples(self) -> np.ndarray:
        """The sample of every spot, numbered."""
        return samples_of(self.adata, self.sample_key)

    @cached_property
    def sample_names(self) -> list[str]:
        """In the order of the numbers."""
        if self.sample_key is None:
            return [""]
        return [str(name) for name in np.unique(self.adata.obs[self.sample_key].astype(str))]

    @cached_property
    def coordinates(self) -> np.ndarray:
        """Two columns; the second points downwards, as on an image."""
        return coordinates_of(self.adata, self.spatial_key)[:, :2]

    @cached_property
    def microns(self) -> float | None:
        """Of one unit of the coordinates, where that is known."""
        return microns_per_unit(self.adata)

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
        labelled = self.adata.obs[self.key].notna().to_numpy()
        return find_markers(self.adata, np.where(labelled, self.codes, -1), len(self.names), layer=self.layer)

    def best(self, domain: int, n: int) -> list[int]:
        """Return up to ``n`` markers of a domain, the clearest first."""
        return [] if self.markers is None else self.markers.best(domain, n)

    def contacts(self) -> np.ndarray:
        """Return which share of the edges from one domain lead to each, rows from, columns to."""
        graph_key = str(self.fit["params"].get("graph_key", keys.WEIGHTS))
        if graph_key in self.adata.obsp:
            edges = sp.coo_array(self.adata.obsp[graph_key])
            source, target = edges.row, edges.col
        else:
            source, target = self._nearest()
        n = len(self.names)
        count = np.bincount(self.codes[source] * n + self.codes[target], minlength=n * n).reshape(n, n)
        return count / np.maximum(count.sum(1, keepdims=True), 1)

    def _nearest(self) -> tuple[np.ndarray, np.ndarray]:
        """Edges from spots, evenly spread where they are many, to the nearest others of their sample."""
        sources, targets = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        step = max(1, len(self.samples) // ASKED)
        for sample in np.unique(self.samples):
            rows = np.flatnonzero(self.samples == sample)
            places, asked = self.coordinates[rows], np.arange(0, len(rows), step)
            count = min(NEIGHBOURS + 1, len(rows))
            near = np.asarray(cKDTree(places).query(places[asked], k=[*range(1, count + 1)], workers=-1)[1])
            others = near != asked[:, None]
            sources.append(rows[np.repeat(asked, others.sum(1))])
            targets.append(rows[near[others]])
        return np.concatenate(sources), np.concatenate(targets)

    def shares(self, by: np.ndarray, n: int) -> np.ndarray:
        """Return the share of every domain in each of ``n`` groups of spots, rows groups."""
        k = len(self.names)
        count = np.bincount(by * k + self.codes, minlength=n * k).reshape(n, k)
        return count / np.maximum(count.sum(1, keepdims=True), 1)

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
        names = [str(name) for name in column.cat.categories]
        known = column.cat.codes.to_numpy() >= 0
        at = self.codes[known] * len(names) + column.cat.codes.to_numpy()[known]
        count = np.bincount(at, minlength=len(self.names) * len(names)).reshape(len(self.names), len(names))
        return names, count / np.maximum(count.sum(1, keepdims=True), 1)


def _as_hex(colors: list[str]) -> list[str]:
    from matplotlib.colors import is_color_like, to_hex

    own = palette(len(colors))
    return [to_hex(color) if is_color_like(color) else other for color, other in zip(colors, own)]
