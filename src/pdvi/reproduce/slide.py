"""Make the embryo as the experiment needs it, simulated or from a file, and the problems of both presets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.metrics import pairwise_distances_argmin

import pdvi
from pdvi import graphs, pp
from pdvi._anndata import keys
from pdvi._anndata.checks import coordinates_of
from pdvi._anndata.read import read_slide
from pdvi._base.atomic import replacing
from pdvi.datasets import embryo
from pdvi.mixtures import empirical_bayes, potts_mixture_problem
from pdvi.pp.neighborhood import averages
from pdvi.shards.partition import Layout, along_space, grid, layout, median_cuts

ANNOTATION = "annotation"
COUNTS = "count"
COMPONENTS = 50
GENES = 5_000  # the most variable ones (the paper)
AVERAGED = 30  # neighbors, as in `pp.neighborhood`


@dataclass(frozen=True)
class Preset:
    """The spatial model's hyper-parameters, and how the slide is cut; by default ours."""

    key: str
    title: str
    averaged: bool = True  # whether a spot's features are the mean over its neighborhood
    neighbors: int = 8
    mutual: bool = False
    flow: bool = False  # whether weights know the direction along which labels do not change
    weights: float = 1.0  # their factor
    temperature: float = 1.0
    noise: float = 1.0  # factor of the k-means estimate of the noise's standard deviation
    cells: tuple[int, int] | None = None  # of a grid; None: balanced patches
    halo: bool = True  # whether edges between patches count
    damping: float | None = None  # of parallel sweeps; None: as much as is safe


DEFAULTS = Preset("defaults", "our defaults")
PUBLISHED = Preset(
    "published",
    "published hyper-parameters",
    averaged=False,
    neighbors=25,
    mutual=True,
    flow=True,
    weights=0.005,
    temperature=1e-4,
    noise=10.0,
    cells=(5, 5),
    halo=False,
    damping=0.0,
)


class Slide(NamedTuple):
    """Principal components, places and true domains (-1: not annotated) of all spots."""

    X: np.ndarray
    coordinates: np.ndarray
    truth: np.ndarray

    @property
    def n_domains(self) -> int:
        """Return how many domains are annotated."""
        return int(self.truth.max()) + 1


def simulated(n_spots: int, n_genes: int, n_domains: int) -> Slide:
    """Simulate the embryo, and prepare it as a real one."""
    adata = embryo(n_spots, n_genes=n_genes, n_domains=n_domains)
    return _prepared(adata, adata.obs[keys.TRUTH], None)


def from_file(path: Path) -> Slide:
    """Read a MOSTA slide: counts in layer `count`, in raw or in X; `obs["annotation"]`; `obsm["spatial"]`."""
    adata = read_slide(path)
    if ANNOTATION not in adata.obs:
        found = sorted(adata.obs)
        msg = f"{str(path)!r}: {ANNOTATION!r} not in adata.obs (it has {found}); put the true domains there."
        raise ValueError(msg)
    truth = adata.obs[ANNOTATION].astype("category").cat.remove_unused_categories()
    if len(truth.cat.categories) < 2:
        names = list(truth.cat.categories)
        msg = f"{str(path)!r}: adata.obs[{ANNOTATION!r}] must name at least 2 domains, got {names}."
        raise ValueError(msg)
    if COUNTS in adata.layers:
        return _prepared(adata, truth, COUNTS)
    return _prepared(adata.raw.to_adata() if adata.raw is not None else adata, truth, None, adata)


def _prepared(adata: Any, truth: pd.Series, layer: str | None, places: Any = None) -> Slide:
    pp.prepare(adata, layer=layer, n_genes=GENES, n_components=COMPONENTS)
    coordinates = coordinates_of(adata if places is None else places)[:, :2]
    return Slide(adata.obsm[keys.COMPONENTS], coordinates, truth.cat.codes.to_numpy().astype(np.int16))


def kept(path: Path, make: Any) -> Slide:
    """Return the slide in a file, which is made first if it is not there."""
    if not path.exists():
        slide = make()
        with replacing(path) as temporary:
            np.savez(temporary, **slide._asdict())
    with np.load(path) as arrays:
        return Slide(**arrays)


def cut(slide: Slide, preset: Preset, n_patches: int) -> tuple[pdvi.Problem, np.ndarray, Layout]:
    """Return the problem of a preset, its features, and its shards on the slide.

    Hyper-parameters are those of one k-means, so that all starts have the same objective.
    """
    X = slide.X
    if preset.averaged:
        X = averages(X, slide.coordinates, np.zeros(len(X), int), [AVERAGED])[AVERAGED]
    settings = empirical_bayes(X, slide.n_domains, seed=0)
    xy, flow = slide.coordinates, None
    edges = graphs.nearest(xy, min(preset.neighbors, len(X) - 1), mutual=preset.mutual)
    if preset.flow:
        flow = graphs.flow_direction(xy, pairwise_distances_argmin(X, settings.means))
    weighted = graphs.weights(edges, X - X.mean(0), xy, flow)
    patches = grid(xy, *preset.cells) if preset.cells else median_cuts(xy, n_patches)
    where = layout(patches, along_space(xy))
    problem = potts_mixture_problem(
        X,
        weighted,
        settings._replace(noise_variance=preset.noise**2 * settings.noise_variance),
        where,
        beta=preset.weights,
        halo=preset.halo,
        temperature=preset.temperature,
        damping=preset.damping,
    )
    return problem, X, where
