"""Draw what the spots consist of: their cells, and what surrounds these."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pdvi.datasets.tissue.anatomy import Organ
from pdvi.datasets.tissue.slides import Slides, threads

COMMON_TYPES = 3  # cell types that belong to no domain: vessels, immune cells, ...
LIGANDS = 3
ENTRIES = 500_000  # of a block of counts or features: what stays in cache


def draw_mixtures(n_domains: int, mixing: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the share of every cell type in every domain."""
    own = np.zeros((n_domains, n_domains + COMMON_TYPES))
    first = rng.uniform(0.6, 0.85, n_domains)
    domain = np.arange(n_domains)
    own[domain, domain] += first
    own[domain, (domain + 1) % n_domains] += 1 - first  # layers share cells with the next one
    anywhere = rng.dirichlet(np.full(own.shape[1], 2.0))
    return (1 - mixing) * own + mixing * anywhere


class Block(NamedTuple):
    """What the expression of some consecutive spots is drawn from."""

    begin: int
    cells: np.ndarray  # (spots, types), shares
    domain: np.ndarray
    sample: np.ndarray
    ligand: np.ndarray  # (spots, ligands)
    library: np.ndarray
    rng: np.random.Generator


def draw_cells(
    slides: Slides,
    organ: Organ,
    mixtures: np.ndarray,
    cells_per_spot: int,
    fill: Callable[[Block], None],
    n_rows: int,
    seed: int,
) -> np.ndarray:
    """Give ``fill`` every block of ``n_rows`` spots, from several threads; return each spot's most frequent type."""
    n = len(slides.domain)
    begins = np.arange(0, n, n_rows)
    general, *seeds = np.random.SeedSequence(seed).spawn(1 + len(begins))  # the threads cannot change a draw
    rng = np.random.default_rng(general)
    sources = organ.sites[rng.integers(len(organ.sites), size=LIGANDS)] + rng.normal(0, 0.3, (LIGANDS, 2))
    reach = rng.uniform(0.3, 0.6, LIGANDS)
    cumulative = np.cumsum(mixtures, 1).astype(np.float32)
    cumulative[:, -1] = 2  # above any draw
    kind = np.empty(n, np.int16)

    def work(begin: int, seed: np.random.SeedSequence) -> None:
        rows = slice(begin, begin + n_rows)
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
        fill(Block(begin, cells, domain, slides.sample[rows], ligand, library, rng))

    with threads() as pool:
        list(pool.map(work, begins.tolist(), seeds))
    return kind
