"""A simulated slide: an organ with its regions, their cells, and counts or features of these."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp

if TYPE_CHECKING:
    from anndata import AnnData

CELL = 10.0  # micrometres: one cell in each square of this side
PROBE = 20_000  # points that shares and quantiles are measured on
COMMON_TYPES = 3  # cell types that belong to no domain: vessels, immune cells, ...
LIGANDS = 3
ENTRIES = 500_000  # of a block of counts: what stays in cache
POINTS = 100_000  # of a block of coordinates
DIRECT = 8.0  # means above it are drawn as gamma-Poisson, below it by inversion


def tissue(
    n_spots: int = 20_000,
    *,
    n_genes: int = 500,
    n_domains: int = 12,
    n_samples: int = 1,
    cells_per_spot: int = 1,
    mixing: float | None = None,
    depth: float | None = None,
    dropout: float = 0.1,
    features: int | None = None,
    seed: int = 0,
) -> AnnData:
    """An organ with layers, regions and nuclei, whose domains are mixtures of cell types.

    The outline is a smooth blob. Along a part of it lie layers, as in a cortex; the inside is divided into warped
    cells around sites, and some of these hold a nucleus. A domain is a mixture of its own two cell types and of
    types found everywhere. Counts are negative binomial; their means are products of the spot's library size, its
    cells' profiles, a weaker regional profile, and, for some genes, a ligand-like gradient around a source that
    knows no domains.

    Parameters
    ----------
    n_spots
        over all samples.
    n_genes
        columns of ``X``.
    n_domains
        about a third are layers, a sixth nuclei.
    n_samples
        slides side by side, each another deformation of the same organ with its own shift in expression.
    cells_per_spot
        1: single cells, unevenly dense; more: spots on a hexagonal grid, each the sum of so many cells.
    mixing
        share of the cells that come from anywhere: 0 tells domains by their types, 1 not at all. By default 0.3 for
        single cells and up to 0.7 for spots of many, since their average is easier to tell apart.
    depth
        mean counts of a spot; by default 12 times the root of the number of genes, up to twice that for many cells.
    dropout
        share of the positive counts that is lost.
    features
        skip the counts, and write this many features into ``obsm["X_pca"]``: for millions of spots. ``n_genes``,
        ``depth`` and ``dropout`` then have no effect.

    Returns
    -------
    AnnData
        counts in ``X`` (sparse), coordinates in micrometres in ``obsm["spatial"]``, the domain in ``obs["truth"]``,
        the (most frequent) cell type in ``obs["cell_type"]``, the slide in ``obs["sample"]``.
    """
    whole = {"n_genes": n_genes, "n_samples": n_samples, "cells_per_spot": cells_per_spot}
    if features is not None:
        whole["features"] = features
    for name, value in whole.items():
        if value < 1:
            msg = f"`{name}` must be a whole number of at least 1, got {value!r}."
            raise ValueError(msg)
    if n_spots < 50 * n_samples:
        msg = f"`n_spots` must be at least 50 for each of {n_samples} sample(s), got {n_spots!r}."
        raise ValueError(msg)
    if not 1 <= n_domains <= n_spots // (10 * n_samples):
        most = n_spots // (10 * n_samples)
        msg = f"`n_domains` must be between 1 and a tenth of a sample's spots ({most}), got {n_domains!r}."
        raise ValueError(msg)
    several = 1 - 1 / cells_per_spot
    mixing = 0.3 + 0.4 * several if mixing is None else mixing
    if not 0 <= mixing <= 1:
        msg = f"`mixing` must be between 0 and 1, got {mixing!r}."
        raise ValueError(msg)
    if not 0 <= dropout < 1:
        msg = f"`dropout` must be at least 0 and below 1, got {dropout!r}."
        raise ValueError(msg)
    if depth is not None and not depth > 0:
        msg = f"`depth` must be positive, got {depth!r}."
        raise ValueError(msg)

    anatomy_seed, cells_seed, expression_seed, *sample_seeds = np.random.SeedSequence(seed).spawn(3 + n_samples)
    organ = _organ(n_domains, np.random.default_rng(anatomy_seed))
    mixtures = _mixtures(n_domains, mixing, np.random.default_rng(cells_seed))
    slides = _slides(organ, _shares(n_spots, n_samples), cells_per_spot, sample_seeds)
    rng = np.random.default_rng(expression_seed)
    fill: _Counts | _Features
    if features is None:
        depth = 12 * np.sqrt(n_genes) * (1 + several) if depth is None else depth
        fill = _Counts(_profiles(n_genes, mixtures, n_samples, rng), depth, dropout)
    else:
        fill = _Features(n_spots, features, mixtures, n_samples, rng)
    kind = _simulate(slides, organ, mixtures, cells_per_spot, fill, int(rng.integers(2**63)))

    from anndata import AnnData

    obs = pd.DataFrame(
        {
            "truth": _categorical(slides.domain, organ.names),
            "cell_type": _categorical(kind, [f"type {t + 1}" for t in range(mixtures.shape[1])]),
            "sample": _categorical(slides.sample, [str(s + 1) for s in range(n_samples)]),
        },
        index=pd.RangeIndex(1, n_spots + 1).astype(str),
    )
    adata = AnnData(obs=obs, **fill.parts())
    adata.obsm["spatial"] = slides.position
    given: dict[str, Any] = {"n_spots": n_spots, "n_genes": n_genes, "n_domains": n_domains, "n_samples": n_samples}
    given |= {"cells_per_spot": cells_per_spot, "mixing": mixing, "depth": depth, "dropout": dropout}
    given |= {"features": features, "seed": seed}
    adata.uns["tissue"] = {"params": {name: value for name, value in given.items() if value is not None}}
    return adata


def embryo(
    n_spots: int = 150_000, *, n_genes: int = 2_000, n_domains: int = 23, features: int | None = None, seed: int = 0
) -> AnnData:
    """A `tissue` at the scale of the paper's embryo: 150,000 spots of a few cells each, in 23 domains."""
    return tissue(n_spots, n_genes=n_genes, n_domains=n_domains, cells_per_spot=4, features=features, seed=seed)


# ---------------------------------------------------------------------------------------------- anatomy


class _Waves(NamedTuple):
    """A smooth random field: a sum of sines."""

    frequency: np.ndarray
    phase: np.ndarray
    amplitude: np.ndarray

    @staticmethod
    def draw(rng: np.random.Generator, *, scale: float, size: float, dim: int, n: int = 8) -> _Waves:
        """``dim`` fields of standard deviation ``size`` that change over lengths of about ``scale``."""
        amplitude = rng.standard_normal((n, dim)) * size * np.sqrt(2 / n)
        frequency, phase = rng.standard_normal((2, n)) / scale, rng.uniform(0, 2 * np.pi, n)
        return _Waves(*(part.astype(np.float32) for part in (frequency, phase, amplitude)))

    def __call__(self, points: np.ndarray) -> np.ndarray:
        return np.sin(points @ self.frequency + self.phase) @ self.amplitude


class _Organ(NamedTuple):
    """Where the domains are, in the frame of a disc of radius about one. Points are float32: many are asked for."""

    outline: np.ndarray  # cosine and sine parts of the radius, from the second harmonic on
    top: float  # the angle the layers are thickest at
    rough: _Waves
    edges: np.ndarray  # of the layers, in scaled depth
    sites: np.ndarray
    pull: np.ndarray
    bend: _Waves
    nucleus: np.ndarray  # for each site the radius of its nucleus, 0 where there is none
    names: list[str]

    def reach(self, points: np.ndarray) -> np.ndarray:
        """The distance from the centre as a share of the outline's: below 1 inside."""
        angle = np.arctan2(points[:, 1], points[:, 0])
        turns = angle[:, None] * np.arange(2, 2 + len(self.outline), dtype=np.float32)
        waves = np.cos(turns) @ self.outline[:, 0] + np.sin(turns) @ self.outline[:, 1]
        return np.hypot(points[:, 0], points[:, 1]) / (1 + waves)

    def depth(self, points: np.ndarray) -> np.ndarray:
        """Below the surface, in units that are small where the layers are thin, so that they pinch out."""
        angle = np.arctan2(points[:, 1], points[:, 0]) - self.top
        thick = 1 / (1 + np.exp(-5 * (np.cos(angle) - np.float32(0.1))))
        beneath = 1 - self.reach(points) + self.rough(points)[:, 0]
        return (beneath + 0.2 * (1 - thick)) / (thick + 0.02)

    def distances(self, points: np.ndarray) -> np.ndarray:
        """From the sites, bent and weighted."""
        bent = points + self.bend(points)
        squares = (bent**2).sum(1)[:, None] - 2 * bent @ self.sites.T + (self.sites**2).sum(1)
        return np.sqrt(np.maximum(squares, 0)) * self.pull

    def label(self, points: np.ndarray) -> np.ndarray:
        """The domain of each point inside."""
        distances = self.distances(points)
        nearest = distances.argmin(1)
        labels = len(self.edges) + nearest
        inner = distances[np.arange(len(points)), nearest] < self.nucleus[nearest]
        rank = np.cumsum(self.nucleus > 0) - 1
        labels[inner] = len(self.edges) + len(self.sites) + rank[nearest[inner]]
        if len(self.edges):
            depth = self.depth(points)
            layered = depth < self.edges[-1]
            labels[layered] = np.searchsorted(self.edges, depth[layered], side="right")
        return labels.astype(np.int16)


def _organ(n_domains: int, rng: np.random.Generator) -> _Organ:
    """Draw organs until one has no tiny domain."""
    best, best_share = None, -1.0
    for _ in range(20):
        organ, probe = _draw_organ(n_domains, rng)
        share = np.bincount(organ.label(probe), minlength=n_domains).min() / len(probe)
        if share > best_share:
            best, best_share = organ, share
        if share > 0.3 / n_domains:
            break
    assert best is not None
    return best


def _draw_organ(n_domains: int, rng: np.random.Generator) -> tuple[_Organ, np.ndarray]:
    n_layers, n_nuclei = n_domains // 3, n_domains // 6
    n_sites = n_domains - n_layers - n_nuclei
    order = np.arange(2, 7)
    names = [f"{kind} {i + 1}" for kind, n in _kinds(n_layers, n_sites, n_nuclei) for i in range(n)]
    blank = _Organ(
        outline=(rng.standard_normal((len(order), 2)) * 0.22 / order[:, None]).astype(np.float32),
        top=rng.uniform(0, 2 * np.pi),
        rough=_Waves.draw(rng, scale=0.15, size=0.02, dim=1),
        edges=np.empty(0),
        sites=np.zeros((n_sites, 2), np.float32),
        pull=rng.uniform(0.8, 1.2, n_sites).astype(np.float32),
        bend=_Waves.draw(rng, scale=0.25, size=0.06, dim=2),
        nucleus=np.zeros(n_sites, np.float32),
        names=names,
    )
    probe = rng.uniform(-2, 2, (4 * PROBE, 2)).astype(np.float32)
    probe = probe[blank.reach(probe) < 1]
    core, edges = probe, np.empty(0)
    if n_layers:
        depth = blank.depth(probe)
        parts = np.cumsum(rng.uniform(0.7, 1.3, n_layers))
        edges = np.quantile(depth, parts / parts[-1] * n_layers / n_domains)
        core = probe[depth >= edges[-1]]
    organ = blank._replace(edges=edges, sites=_spread_sites(core + blank.bend(core), n_sites, rng))
    distances = organ.distances(core)
    nearest = distances.argmin(1)
    nucleus = blank.nucleus.copy()
    for site in np.argsort(-np.bincount(nearest, minlength=n_sites))[:n_nuclei]:
        nucleus[site] = np.quantile(distances[nearest == site, site], 0.4)
    return organ._replace(nucleus=nucleus), probe


def _kinds(n_layers: int, n_sites: int, n_nuclei: int) -> Iterable[tuple[str, int]]:
    return ("layer", n_layers), ("region", n_sites), ("nucleus", n_nuclei)


def _spread_sites(points: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """A few rounds of Lloyd's: sites apart from each other, but not a lattice."""
    sites = points[rng.choice(len(points), n, replace=False)]
    for _ in range(4):
        nearest = ((points**2).sum(1)[:, None] - 2 * points @ sites.T + (sites**2).sum(1)).argmin(1)
        sizes = np.bincount(nearest, minlength=n)
        sums = np.stack([np.bincount(nearest, points[:, axis], minlength=n) for axis in (0, 1)], 1)
        sites = np.where(sizes[:, None] > 0, sums / np.maximum(sizes, 1)[:, None], sites).astype(np.float32)
    return sites


# ----------------------------------------------------------------------------------------------- slides


class _Slides(NamedTuple):
    """All spots: where they are on their slide, where that is in the organ, and in which domain."""

    position: np.ndarray
    place: np.ndarray
    domain: np.ndarray
    sample: np.ndarray


class _Deformation(NamedTuple):
    """From the frame of a slide to that of the organ."""

    matrix: np.ndarray
    bend: _Waves

    def __call__(self, points: np.ndarray) -> np.ndarray:
        return points @ self.matrix + self.bend(points)


def _slides(organ: _Organ, sizes: list[int], cells_per_spot: int, seeds: list[np.random.SeedSequence]) -> _Slides:
    parts = []
    left = 0.0
    for number, (size, seed) in enumerate(zip(sizes, seeds)):
        rng = np.random.default_rng(seed)
        position, place, domain = _slide(organ, size, cells_per_spot, number, rng)
        position -= position.min(0)
        position[:, 0] += left
        left = float(position[:, 0].max()) * 1.05  # side by side, also for those who plot them all at once
        parts.append(_Slides(position, place, domain, np.full(size, number, np.int16)))
    if len(parts) == 1:
        return parts[0]
    return _Slides(*(np.concatenate(field) for field in zip(*parts)))


def _slide(
    organ: _Organ, n: int, cells_per_spot: int, number: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    deform = _deformation(number, rng)
    probe = rng.uniform(-2.4, 2.4, (6 * PROBE, 2)).astype(np.float32)
    inside = probe[organ.reach(deform(probe)) < 1]
    area = 4.8**2 * len(inside) / len(probe)
    low, high = inside.min(0) - 0.05, inside.max(0) + 0.05
    single = cells_per_spot == 1
    density = rng.uniform(0.5, 1, len(organ.names)) if single else np.ones(len(organ.names))
    mean_density = density[organ.label(deform(inside))].mean()
    wanted = 1.01 * n / mean_density
    while True:
        pitch = np.sqrt(area / wanted * 2 / np.sqrt(3))
        blocks = _lattice(low, high, pitch, 0.35 if single else 0.0, rng)
        with _threads() as pool:
            found = list(pool.map(lambda points: _within(organ, deform, points), blocks))
        spot, place, domain = (np.concatenate(part) for part in zip(*found))
        if len(spot) >= n / mean_density:
            break
        wanted *= 1.01
    # a weighted sample without replacement: the smallest of exponential waiting times
    waiting = rng.standard_exponential(len(spot), np.float32) / density.astype(np.float32)[domain]
    keep = np.sort(np.argpartition(waiting, n - 1)[:n])
    spacing = CELL * np.sqrt(cells_per_spot)
    scale = spacing / (pitch / np.sqrt(mean_density))
    return spot[keep] * np.float32(scale), place[keep], domain[keep]


def _deformation(number: int, rng: np.random.Generator) -> _Deformation:
    """None for the first slide; the others are turned, stretched and bent."""
    size = 0.0 if number == 0 else 1.0
    angle = rng.uniform(-0.35, 0.35) * size
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    stretch = np.exp(rng.uniform(-0.12, 0.12, 2) * size)
    return _Deformation((turn * stretch).astype(np.float32), _Waves.draw(rng, scale=0.6, size=0.06 * size, dim=2))


def _lattice(
    low: np.ndarray, high: np.ndarray, pitch: float, jitter: float, rng: np.random.Generator
) -> Iterable[np.ndarray]:
    """A hexagonal grid over a box, some rows at a time."""
    x = np.arange(low[0], high[0], pitch)
    y = np.arange(low[1], high[1], pitch * np.sqrt(3) / 2)
    rows = max(1, POINTS // len(x))
    for begin in range(0, len(y), rows):
        row = np.arange(begin, min(begin + rows, len(y)))
        lattice = np.empty((len(row), len(x), 2), np.float32)
        lattice[..., 0] = x + (row % 2)[:, None] * pitch / 2
        lattice[..., 1] = y[row][:, None]
        points = lattice.reshape(-1, 2)
        if jitter:
            points += np.float32(2 * jitter * pitch) * (rng.random(points.shape, np.float32) - np.float32(0.5))
        yield points


def _within(organ: _Organ, deform: _Deformation, points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The points that lie in the organ: on the slide, in the organ's frame, and their domain."""
    place = deform(points)
    inside = organ.reach(place) < 1
    place = place[inside]
    return points[inside], place, organ.label(place)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1))


def _shares(n: int, parts: int) -> list[int]:
    return np.diff(np.arange(parts + 1) * n // parts).tolist()


# ------------------------------------------------------------------------------------------- expression


def _mixtures(n_domains: int, mixing: float, rng: np.random.Generator) -> np.ndarray:
    """The share of every cell type in every domain."""
    own = np.zeros((n_domains, n_domains + COMMON_TYPES))
    first = rng.uniform(0.6, 0.85, n_domains)
    domain = np.arange(n_domains)
    own[domain, domain] += first
    own[domain, (domain + 1) % n_domains] += 1 - first  # layers share cells with the next one
    anywhere = rng.dirichlet(np.full(own.shape[1], 2.0))
    return (1 - mixing) * own + mixing * anywhere


def _categorical(codes: Any, names: Any) -> Any:
    return pd.Categorical.from_codes(codes, names)


class _Profiles(NamedTuple):
    """What a gene's mean is made of."""

    types: np.ndarray  # (types, genes), rows sum to one
    regional: np.ndarray  # (domains, genes), factors
    batch: np.ndarray  # (samples, genes), factors
    responding: np.ndarray  # genes with a gradient
    response: np.ndarray  # (ligands, responding genes), in logs
    shape: np.ndarray  # of the gamma in each gene's negative binomial


def _profiles(n_genes: int, mixtures: np.ndarray, n_samples: int, rng: np.random.Generator) -> _Profiles:
    n_domains, n_types = mixtures.shape
    base = rng.normal(0, 1, n_genes)
    markers = _sparse_normal(rng, (n_types, n_genes), 0.08, 1.2, 0.4)
    types = np.exp(base + markers)
    types /= types.sum(1, keepdims=True)
    regional = np.exp(_sparse_normal(rng, (n_domains, n_genes), 0.08, 0.0, 0.5))
    batch = np.exp(rng.normal(0, 0.15, (n_samples, n_genes)) * (np.arange(n_samples) > 0)[:, None])
    response = _sparse_normal(rng, (LIGANDS, n_genes), 0.05, 1.0, 0.3)
    responding = np.flatnonzero(response.any(0))
    shape = rng.uniform(1, 6, n_genes)
    types, regional, batch = (table.astype(np.float32) for table in (types, regional, batch))
    return _Profiles(
        types, regional, batch, responding, response[:, responding].astype(np.float32), shape.astype(np.float32)
    )


def _sparse_normal(
    rng: np.random.Generator, shape: tuple[int, int], share: float, mean: float, spread: float
) -> np.ndarray:
    return rng.normal(mean, spread, shape) * (rng.random(shape) < share)


class _Block(NamedTuple):
    """What the expression of some consecutive spots is drawn from."""

    begin: int
    cells: np.ndarray  # (spots, types), shares
    domain: np.ndarray
    sample: np.ndarray
    ligand: np.ndarray  # (spots, ligands)
    library: np.ndarray
    rng: np.random.Generator


def _simulate(
    slides: _Slides,
    organ: _Organ,
    mixtures: np.ndarray,
    cells_per_spot: int,
    fill: _Counts | _Features,
    seed: int,
) -> np.ndarray:
    """Give ``fill`` every block, in parallel; returns each spot's most frequent cell type."""
    n = len(slides.domain)
    begins = np.arange(0, n, fill.rows)
    general, *seeds = np.random.SeedSequence(int(seed)).spawn(1 + len(begins))  # the threads cannot change a draw
    rng = np.random.default_rng(general)
    sources = organ.sites[rng.integers(len(organ.sites), size=LIGANDS)] + rng.normal(0, 0.3, (LIGANDS, 2))
    reach = rng.uniform(0.3, 0.6, LIGANDS)
    cumulative = np.cumsum(mixtures, 1).astype(np.float32)
    cumulative[:, -1] = 2  # above any draw
    kind = np.empty(n, np.int16)

    def work(begin: int, seed: np.random.SeedSequence) -> None:
        rows = slice(begin, begin + fill.rows)
        rng = np.random.default_rng(seed)
        domain, place = slides.domain[rows], slides.place[rows]
        drawn = rng.random((len(domain), cells_per_spot), np.float32)
        types = (drawn[..., None] >= cumulative[domain][:, None]).sum(-1)
        at = np.arange(len(domain))[:, None] * mixtures.shape[1] + types
        counted = np.bincount(at.ravel(), minlength=len(domain) * mixtures.shape[1])
        cells = counted.reshape(len(domain), -1).astype(np.float32) / cells_per_spot
        kind[rows] = cells.argmax(1)
        ligand = np.exp(-np.linalg.norm(place[:, None] - sources, axis=-1) / reach).astype(np.float32)
        library = np.exp(rng.normal(0, 0.4, len(domain)) - 0.08).astype(np.float32)
        fill(_Block(begin, cells, domain, slides.sample[rows], ligand, library, rng))

    with _threads() as pool:
        for done in [pool.submit(work, int(begin), block_seed) for begin, block_seed in zip(begins, seeds)]:
            done.result()
    return kind


class _Counts:
    """Collects sparse counts, block by block."""

    def __init__(self, profiles: _Profiles, depth: float, dropout: float):
        self.profiles, self.depth, self.dropout = profiles, depth, dropout
        self.rows = max(1, ENTRIES // len(profiles.shape))
        self.blocks: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def __call__(self, block: _Block) -> None:
        p = self.profiles
        mean = block.cells @ p.types
        mean *= p.regional[block.domain]
        if len(p.batch) > 1:
            mean *= p.batch[block.sample]
        mean[:, p.responding] *= np.exp(block.ligand @ p.response)
        mean *= (np.float32(self.depth) * block.library)[:, None]
        row, column, value = negative_binomial(mean, p.shape, self.dropout, block.rng)
        self.blocks[block.begin] = np.bincount(row, minlength=len(mean)), column, value

    def parts(self) -> dict[str, Any]:
        """What AnnData takes. The blocks are given up while they are copied."""
        sizes, columns, values = zip(*(self.blocks.pop(begin) for begin in sorted(self.blocks)))
        starts = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
        small = starts[-1] < 2**31
        starts = starts.astype(np.int32 if small else np.int64)
        indices = np.concatenate(columns, dtype=starts.dtype)
        del columns
        data = np.concatenate(values)
        n_genes = len(self.profiles.shape)
        names = pd.RangeIndex(1, n_genes + 1).astype(str)
        var = pd.DataFrame({"gradient": np.isin(np.arange(n_genes), self.profiles.responding)}, index="gene" + names)
        return {"X": sp.csr_matrix((data, indices, starts), shape=(len(starts) - 1, n_genes)), "var": var}


def negative_binomial(
    mean: np.ndarray, shape: np.ndarray, dropout: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The positive entries (row, column, value) of negative binomial counts with variance mean + mean^2 / shape.

    Most entries are zero, so one uniform number decides that first; only for the others is the rest of the
    distribution looked up.
    """
    zero = np.exp(-shape * np.log1p(mean / shape))
    kept = np.float32(1 - dropout)
    uniform = 1 - rng.random(mean.shape, np.float32)  # in (0, 1]
    positive = (1 - zero) * kept
    row, column = np.nonzero(uniform <= positive)
    at = row * mean.shape[1] + column
    m, r = mean.ravel()[at].astype(float), shape[column].astype(float)
    value = np.ones(len(at), np.float32)
    large = m > DIRECT
    value[large] = np.maximum(rng.poisson(rng.gamma(r[large]) * m[large] / r[large]), 1)
    # the tail probability of what was drawn, to be compared with P(count > x)
    left = np.flatnonzero(~large)
    m, r, tail = m[left], r[left], uniform.ravel()[at[left]] / float(kept)
    q = m / (r + m)
    probability = (r / (r + m)) ** r * r * q
    above = -np.expm1(r * np.log1p(-q)) - probability
    x = 1.0
    while True:
        more = (tail <= above) & (probability > 1e-12)
        left, r, q, tail, probability, above = (v[more] for v in (left, r, q, tail, probability, above))
        if not len(left):
            break
        probability *= q * (x + r) / (x + 1)
        above -= probability
        x += 1
        value[left] = x
    return row, column.astype(np.int32), value


class _Features:
    """Collects features like principal components, without counts."""

    def __init__(self, n: int, n_features: int, mixtures: np.ndarray, n_samples: int, rng: np.random.Generator):
        spread = np.linspace(1.6, 0.3, n_features)
        n_domains, n_types = mixtures.shape
        tables = [rng.standard_normal((k, n_features)) * spread for k in (n_types, n_domains, n_samples, LIGANDS)]
        self.types, self.regional, self.batch, self.ligands = (table.astype(np.float32) for table in tables)
        self.batch[0] = 0
        self.X = np.empty((n, n_features), np.float32)
        self.rows = max(1, ENTRIES // n_features)

    def __call__(self, block: _Block) -> None:
        out = self.X[block.begin : block.begin + self.rows]
        block.rng.standard_normal(out=out, dtype=np.float32)
        out += block.cells @ self.types
        out += np.float32(0.3) * (self.regional[block.domain] + self.batch[block.sample])
        out += block.ligand @ self.ligands

    def parts(self) -> dict[str, Any]:
        """What AnnData takes."""
        return {"obsm": {"X_pca": self.X}}
