"""The rows nearest to every row in space, looked up once for all who ask within `asked_once`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
from scipy.spatial import cKDTree

REMEMBERED = 400_000  # rows whose neighbours are remembered: those of more would take too much memory

_Key = tuple[tuple[int, ...], str, int]
_asked: ContextVar[tuple[int, dict[_Key, np.ndarray]] | None] = ContextVar("asked", default=None)


def nearest_rows(coordinates: np.ndarray, k: int) -> np.ndarray:
    """Return the k nearest rows of every row, (rows, k), nearest first; the row itself is mostly the first."""
    k = min(k, len(coordinates))
    remembered = _asked.get()
    if remembered is None or len(coordinates) > REMEMBERED:
        return _looked_up(coordinates, k)
    most, found = remembered
    key = (coordinates.shape, coordinates.dtype.str, zlib.crc32(np.ascontiguousarray(coordinates)))
    if key not in found or found[key].shape[1] < k:
        found[key] = _looked_up(coordinates, max(k, min(most, len(coordinates)))).astype(np.int32)
    return found[key][:, :k]


def other_rows(coordinates: np.ndarray, k: int) -> np.ndarray:
    """Return the k nearest other rows of every row, at most all of them."""
    n = len(coordinates)
    k = min(k, n - 1)
    found = nearest_rows(coordinates, k + 1)
    others = found != np.arange(n)[:, None]
    others[others.all(1), -1] = False  # among duplicates a row need not find itself
    return found[others].reshape(n, k)


@contextmanager
def asked_once(most: int) -> Iterator[None]:
    """Remember what is looked up within, ``most`` neighbours at once: graph, averages and components ask the same."""
    token = _asked.set((most, {}))
    try:
        yield
    finally:
        _asked.reset(token)


def _looked_up(coordinates: np.ndarray, k: int) -> np.ndarray:
    return np.asarray(cKDTree(coordinates).query(coordinates, k=[*range(1, k + 1)], workers=-1)[1])
