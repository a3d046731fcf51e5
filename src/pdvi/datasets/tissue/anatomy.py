"""The organ: its outline, and where its domains are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

PROBE = 20_000  # points that shares and quantiles are measured on


class Waves(NamedTuple):
    """A smooth random field: a sum of sines."""

    frequency: np.ndarray
    phase: np.ndarray
    amplitude: np.ndarray

    @staticmethod
    def draw(rng: np.random.Generator, *, scale: float, size: float, dim: int, n: int = 8) -> Waves:
        """Draw ``dim`` fields of standard deviation ``size`` that change over lengths of about ``scale``."""
        amplitude = rng.standard_normal((n, dim)) * size * np.sqrt(2 / n)
        frequency, phase = rng.standard_normal((2, n)) / scale, rng.uniform(0, 2 * np.pi, n)
        return Waves(*(part.astype(np.float32) for part in (frequency, phase, amplitude)))

    def __call__(self, points: np.ndarray) -> np.ndarray:
        """Return the fields at points, (n, dim)."""
        return np.sin(points @ self.frequency + self.phase) @ self.amplitude


class Organ(NamedTuple):
    """Where the domains are, in the frame of a disc of radius about one. Points are float32: many are asked for."""

    outline: np.ndarray  # cosine and sine parts of the radius, from the second harmonic on
    top: float  # the angle the layers are thickest at
    rough: Waves
    edges: np.ndarray  # of the layers, in scaled depth
    sites: np.ndarray
    pull: np.ndarray
    bend: Waves
    nucleus: np.ndarray  # for each site the radius of its nucleus, 0 where there is none
    names: list[str]

    def reach(self, points: np.ndarray) -> np.ndarray:
        """Return the distance from the centre as a share of the outline's: below 1 inside."""
        angle = np.arctan2(points[:, 1], points[:, 0])
        turns = angle[:, None] * np.arange(2, 2 + len(self.outline), dtype=np.float32)
        # Not by `@`: OpenBLAS looks at five columns with what the stack holds beside them, and may warn of it.
        cosine, sine = self.outline.T
        waves = np.einsum("nk,k->n", np.cos(turns), cosine) + np.einsum("nk,k->n", np.sin(turns), sine)
        return np.hypot(points[:, 0], points[:, 1]) / (1 + waves)

    def depth(self, points: np.ndarray) -> np.ndarray:
        """Return the depth below the surface, in units that are small where layers are thin, so that they pinch out."""
        angle = np.arctan2(points[:, 1], points[:, 0]) - self.top
        thick = 1 / (1 + np.exp(-5 * (np.cos(angle) - np.float32(0.1))))
        beneath = 1 - self.reach(points) + self.rough(points)[:, 0]
        return (beneath + 0.2 * (1 - thick)) / (thick + 0.02)

    def distances(self, points: np.ndarray) -> np.ndarray:
        """Return the distances of points from all sites, bent and weighted."""
        bent = points + self.bend(points)
        squares = (bent**2).sum(1)[:, None] - 2 * bent @ self.sites.T + (self.sites**2).sum(1)
        return np.sqrt(np.maximum(squares, 0)) * self.pull

    def label(self, points: np.ndarray) -> np.ndarray:
        """Return the domain of each point inside."""
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


def draw_organ(n_domains: int, rng: np.random.Generator) -> Organ:
    """Draw organs until one has no tiny domain."""
    tried = []
    for _ in range(20):
        organ, probe = _attempt(n_domains, rng)
        tried.append((np.bincount(organ.label(probe), minlength=n_domains).min() / len(probe), organ))
        if tried[-1][0] > 0.3 / n_domains:
            break
    return max(tried, key=lambda each: each[0])[1]


def _attempt(n_domains: int, rng: np.random.Generator) -> tuple[Organ, np.ndarray]:
    n_layers, n_nuclei = n_domains // 3, n_domains // 6
    n_sites = n_domains - n_layers - n_nuclei
    order = np.arange(2, 7)
    kinds = {"layer": n_layers, "region": n_sites, "nucleus": n_nuclei}
    blank = Organ(
        outline=(rng.standard_normal((len(order), 2)) * 0.22 / order[:, None]).astype(np.float32),
        top=rng.uniform(0, 2 * np.pi),
        rough=Waves.draw(rng, scale=0.15, size=0.02, dim=1),
        edges=np.empty(0),
        sites=np.zeros((n_sites, 2), np.float32),
        pull=rng.uniform(0.8, 1.2, n_sites).astype(np.float32),
        bend=Waves.draw(rng, scale=0.25, size=0.06, dim=2),
        nucleus=np.zeros(n_sites, np.float32),
        names=[f"{kind} {i + 1}" for kind, n in kinds.items() for i in range(n)],
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


def _spread_sites(points: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """A few rounds of Lloyd's: sites apart from each other, but not a lattice."""
    sites = points[rng.choice(len(points), n, replace=False)]
    for _ in range(4):
        nearest = ((points**2).sum(1)[:, None] - 2 * points @ sites.T + (sites**2).sum(1)).argmin(1)
        sizes = np.bincount(nearest, minlength=n)
        sums = np.stack([np.bincount(nearest, points[:, axis], minlength=n) for axis in (0, 1)], 1)
        sites = np.where(sizes[:, None] > 0, sums / np.maximum(sizes, 1)[:, None], sites).astype(np.float32)
    return sites
