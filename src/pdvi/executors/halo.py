"""The rows that shards read of each other, and their latest values."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from pdvi._base.types import PyTree
from pdvi.core.problem import Problem

Halos = dict[int, PyTree]  # the latest halo rows of each shard; None where there are none


class Seam(NamedTuple):
    """What one shard reads: each row once, those of one source together.

    ``sources`` has for each of them where its rows go, and which of those that it exports they are; ``order`` makes a
    halo of them.
    """

    size: int
    sources: dict[int, tuple[slice, np.ndarray]]
    order: np.ndarray


class Exports:
    """Which rows of a shard other shards read: rows sorted through all shards, so those of a shard lie together."""

    def __init__(self, halo: np.ndarray, n_rows: int):
        n_shards = len(halo)
        self.halo, self.n_rows = halo, n_rows
        self.slots = np.unique(halo)
        self.first = np.searchsorted(self.slots, np.arange(n_shards + 1) * n_rows)
        self._seams: dict[int, Seam] = {}

    def rows(self, b: int) -> np.ndarray:
        """Return the rows of shard ``b`` that others read."""
        return self.slots[self.first[b] : self.first[b + 1]] - b * self.n_rows

    def sources(self, b: int) -> set[int]:
        """Return the shards whose rows shard ``b`` reads."""
        return set(np.unique(self.halo[b] // self.n_rows).tolist())

    def seam(self, b: int) -> Seam:
        """Return what shard ``b`` reads; it is found out once."""
        if b not in self._seams:
            slots, order = np.unique(self.halo[b], return_inverse=True)
            shards, begins = np.unique(slots // self.n_rows, return_index=True)
            sources = {}
            for c, begin, end in zip(shards.tolist(), begins, [*begins[1:], len(slots)]):
                offered = self.slots[self.first[c] : self.first[c + 1]]
                sources[c] = slice(begin, end), np.searchsorted(offered, slots[begin:end])
            self._seams[b] = Seam(len(slots), sources, order)
        return self._seams[b]


def exports_of(problem: Problem) -> Exports | None:
    """Return the rows that others read of each shard; None if shards do not touch."""
    assert problem.store is not None
    halo = problem.store.halo
    return None if halo is None else Exports(halo, jax.tree.leaves(problem.local_shape())[0].shape[0])
