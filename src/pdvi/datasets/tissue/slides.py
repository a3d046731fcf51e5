"""Draw the slides: spots on deformations of the organ."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from pdvi.datasets.tissue.anatomy import PROBE, Organ, Waves

CELL = 10.0  # micrometers: one cell in each square of this side
POINTS = 100_000  # of a block of coordinates
Deformation = Callable[[np.ndarray], np.ndarray]


def threads() -> ThreadPoolExecutor:
    """Return a pool for work that releases the lock, as numpy does."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1))


class Slides(NamedTuple):
    """All spots: where they are on their slide, where that is in the organ, and in which domain."""

    position: np.ndarray
    place: np.ndarray
    domain: np.ndarray
    sample: np.ndarray


def draw_slides(organ: Organ, sizes: list[int], cells_per_spot: int, seeds: list[np.random.SeedSequence]) -> Slides:
    """Draw one slide for each size, side by side."""
    parts, left = [], 0.0
    for number, (size, seed) in enumerate(zip(sizes, seeds)):
        rng = np.random.default_rng(seed)
        position, place, domain = _slide(organ, size, cells_per_spot, _deformation(number, rng), rng)
        position -= position.min(0)
        position[:, 0] += left
        left = float(position[:, 0].max()) * 1.05  # side by side, also for those who plot them all at once
        parts.append(Slides(position, place, domain, np.full(size, number, np.int16)))
    return Slides(*(np.concatenate(field) for field in zip(*parts)))


def _slide(
    organ: Organ, n: int, cells_per_spot: int, deform: Deformation, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    probe = rng.uniform(-2.4, 2.4, (6 * PROBE, 2)).astype(np.float32)
    inside = probe[organ.reach(deform(probe)) < 1]
    area = 4.8**2 * len(inside) / len(probe)
    low, high = inside.min(0) - 0.05, inside.max(0) + 0.05
    single = cells_per_spot == 1
    density = rng.uniform(0.5, 1, len(organ.names)) if single else np.ones(len(organ.names))
    mean_density = density[organ.label(deform(inside))].mean()
    wanted = 1.01 * n / mean_density

    def within(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The points that lie in the organ: on the slide, in the organ's frame, and their domain."""
        place = deform(points)
        inside = organ.reach(place) < 1
        return points[inside], place[inside], organ.label(place[inside])

    while True:
        pitch = np.sqrt(area / wanted * 2 / np.sqrt(3))
        blocks = _lattice(low, high, pitch, 0.35 if single else 0.0, rng)
        with threads() as pool:
            found = list(pool.map(within, blocks))
        spot, place, domain = (np.concatenate(part) for part in zip(*found))
        if len(spot) >= n / mean_density:
            break
        wanted *= 1.01
    # a weighted sample without replacement: the smallest of exponential waiting times
    waiting = rng.standard_exponential(len(spot), np.float32) / density.astype(np.float32)[domain]
    keep = np.sort(np.argpartition(waiting, n - 1)[:n])
    scale = CELL * np.sqrt(cells_per_spot) / (pitch / np.sqrt(mean_density))
    return spot[keep] * np.float32(scale), place[keep], domain[keep]


def _deformation(number: int, rng: np.random.Generator) -> Deformation:
    """From the frame of a slide to that of the organ: all but the first are turned, stretched and bent."""
    size = 0.0 if number == 0 else 1.0
    angle = rng.uniform(-0.35, 0.35) * size
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    stretch = np.exp(rng.uniform(-0.12, 0.12, 2) * size)
    matrix, bend = (turn * stretch).astype(np.float32), Waves.draw(rng, scale=0.6, size=0.06 * size, dim=2)
    return lambda points: points @ matrix + bend(points)


def _lattice(
    low: np.ndarray, high: np.ndarray, pitch: float, jitter: float, rng: np.random.Generator
) -> Iterable[np.ndarray]:
    """A hexagonal grid over a box, some rows at a time."""
    x = np.arange(low[0], high[0], pitch)
    y = np.arange(low[1], high[1], pitch * np.sqrt(3) / 2)
    rows = max(1, POINTS // len(x))
    for begin in range(0, len(y), rows):
        row = np.arange(begin, min(begin + rows, len(y)))[:, None]
        across = x + row % 2 * pitch / 2
        points = np.stack([across, np.broadcast_to(y[row], across.shape)], -1).reshape(-1, 2).astype(np.float32)
        if jitter:
            points += np.float32(2 * jitter * pitch) * (rng.random(points.shape, np.float32) - np.float32(0.5))
        yield points
