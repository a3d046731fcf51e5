"""Cutting rows into shards of equal size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pdvi._base.checks import whole
from pdvi.shards.buckets import bucket
from pdvi.shards.stacking import mask_name

LEAF = 64  # rows of a patch are ordered along space down to groups of this size


def median_cuts(coordinates: np.ndarray, n_patches: int) -> np.ndarray:
    """Return the patch of every row: balanced recursive cuts across the longer side, sizes equal to one row."""
    patch = np.empty(len(coordinates), int)
    patch[_order(coordinates, n_patches)] = consecutive(len(coordinates), n_patches)
    return patch


def grid(coordinates: np.ndarray, nx: int, ny: int) -> np.ndarray:
    """Return the patch of every row on the paper's nx-by-ny grid of equal cells; empty cells get no number."""
    low, high = coordinates.min(0), coordinates.max(0)
    cell = np.floor((coordinates - low) / np.maximum(high - low, 1e-300) * [nx, ny]).astype(int)
    cell = np.clip(cell, 0, [nx - 1, ny - 1])
    return np.unique(cell[:, 0] * ny + cell[:, 1], return_inverse=True)[1]


def consecutive(n_rows: int, n_patches: int) -> np.ndarray:
    """Return the patch of every row, cut in the order in which the rows come."""
    return np.repeat(np.arange(n_patches), _sizes(n_rows, n_patches))


class Layout(NamedTuple):
    """Where each row lies: ``rows[b, s]`` is the row in slot s of shard b, -1 where there is none.

    ``bucketed``: arrays made of it are padded to a few sizes, and always have a mask.
    """

    rows: np.ndarray
    bucketed: bool = False

    def in_buckets(self) -> Layout:
        """Return the same with slots padded to a bucket: what is compiled for it serves similar sizes too."""
        missing = bucket(self.rows.shape[1]) - self.rows.shape[1]
        return Layout(np.pad(self.rows, ((0, 0), (0, missing)), constant_values=-1), bucketed=True)

    @property
    def mask(self) -> np.ndarray:
        """Return whether a slot holds a row."""
        return self.rows >= 0

    @property
    def fraction(self) -> np.ndarray:
        """Return each shard's share of all rows."""
        return self.mask.sum(1) / self.mask.sum()

    @property
    def slots(self) -> np.ndarray:
        """Return the flat slot of every row."""
        flat = self.rows.ravel()
        slots = np.empty(int(self.mask.sum()), np.int64)
        slots[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
        return slots

    def shard(self, values: np.ndarray) -> np.ndarray:
        """Return row-wise values as (shards, slots, ...); empty slots repeat row 0."""
        return values[np.maximum(self.rows, 0)]

    def unshard(self, stacked: np.ndarray) -> np.ndarray:
        """Return the inverse of `shard`."""
        stacked = np.asarray(stacked)
        return stacked.reshape(-1, *stacked.shape[2:])[self.slots]


def layout(patch: np.ndarray, order: np.ndarray | None = None) -> Layout:
    """Return rows grouped by patch (numbered from 0), in the given ``order`` within each."""
    order = np.arange(len(patch)) if order is None else order
    grouped = order[np.argsort(patch[order], kind="stable")]
    sizes = np.bincount(patch)
    rows = np.full((len(sizes), sizes.max()), -1)
    rows[np.arange(sizes.max()) < sizes[:, None]] = grouped
    return Layout(rows)


def nested(columns: Mapping[str, np.ndarray], by: Any, *, n_shards: int | None = None) -> dict[str, np.ndarray]:
    """Return a long table as shards of groups of rows, or of groups of groups of rows, however many each has.

    Every level is padded to its longest group, and ``mask`` (groups), ``mask2`` (what is in them), ``mask3``, ... are 1
    where there is something and 0 where there is padding, which repeats a row of the data. Groups of the first level
    are sorted by their ids and dealt out to the shards in equal numbers: ``values[shards["mask"] > 0]`` has one value
    for each, in that order, and ``values[shards["mask2"] > 0]`` one for each group within. What is the same for all
    rows of a group is its first entry, ``shard["x"][:, 0]``.

    Parameters
    ----------
    columns
        arrays with a row for each observation, by name.
    by
        the group of every row, or a list of such from the outermost to the innermost: ``[school, room]``. Rooms of
        different schools are different, even if they have the same id.
    n_shards
        by default 100, or as many as there are groups.
    """
    columns = {name: np.asarray(column) for name, column in columns.items()}
    by = [np.asarray(ids) for ids in (by if isinstance(by, list | tuple) else [by])]
    n = _rows_alike({**columns, **{f"by[{level}]": ids for level, ids in enumerate(by)}})
    place = _places(by, n)
    n_groups = int(place[0].max()) + 1
    wanted = min(100, n_groups) if n_shards is None else n_shards
    n_shards = whole("n_shards", wanted, least=1, most=n_groups, of="the number of groups")
    first = layout(consecutive(n_groups, n_shards))
    shard, slot = np.divmod(first.slots[place[0]], first.rows.shape[1])
    where = (shard, slot, *place[1:])
    rows = np.full([int(index.max()) + 1 for index in where], -1)
    rows[where] = np.arange(n)
    real = rows >= 0
    masks = [real.any(axis=tuple(range(level + 1, real.ndim))) for level in range(1, real.ndim)]
    flat = rows.ravel()
    padded = flat[np.maximum.accumulate(np.where(flat >= 0, np.arange(flat.size), 0))].reshape(rows.shape)
    return {
        **{name: column[padded] for name, column in columns.items()},
        **{mask_name(level): mask.astype(float) for level, mask in enumerate(masks, 1)},
    }


def _places(by: list[np.ndarray], n: int) -> list[np.ndarray]:
    """The number of every row's group, of its group within that group, ..., and of the row within the last."""
    place, parent = [], np.zeros(n, int)
    for ids in [*by, np.arange(n)]:
        code = np.unique(ids, return_inverse=True)[1]
        pair, group = np.unique(np.stack([parent, code]), axis=1, return_inverse=True)
        first = np.searchsorted(pair[0], pair[0])  # of all groups with this parent
        place.append((np.arange(pair.shape[1]) - first)[group])
        parent = group
    return place


def _rows_alike(columns: Mapping[str, np.ndarray]) -> int:
    lengths = {name: column.shape[0] if column.ndim else 0 for name, column in columns.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        msg = f"`columns` and `by` must be arrays with one row for each observation, got {lengths} rows."
        raise ValueError(msg)
    return next(iter(lengths.values()))


def along_space(coordinates: np.ndarray) -> np.ndarray:
    """Return an order of the rows in which neighbours in space are mostly neighbours in memory."""
    return _order(coordinates, max(1, len(coordinates) // LEAF))


def along_curve(coordinates: np.ndarray) -> np.ndarray:
    """Return the rows along a Z-shaped curve through space: a few that follow each other lie close together."""
    bits = min(16, 62 // coordinates.shape[1])
    low, width = coordinates.min(0), np.ptp(coordinates, axis=0).max()
    cell = ((coordinates - low) / max(width, 1e-300) * (2**bits - 1)).astype(np.int64)
    code = np.zeros(len(coordinates), np.int64)
    for bit in range(bits):
        for axis, values in enumerate(cell.T):
            code |= (values >> bit & 1) << bit * cell.shape[1] + axis
    return np.argsort(code, kind="stable")


def _sizes(n_rows: int, n_patches: int) -> np.ndarray:
    if not 1 <= n_patches <= n_rows:
        msg = f"`n_patches` must be between 1 and the number of rows ({n_rows}), got {n_patches!r}."
        raise ValueError(msg)
    bounds = np.arange(n_patches + 1) * n_rows // n_patches
    return np.diff(bounds)


def _order(coordinates: np.ndarray, n_patches: int) -> np.ndarray:
    """Rows in the order of the recursive cuts: the patches are consecutive pieces of it."""
    coordinates = np.asarray(coordinates, np.float32)
    bounds = np.concatenate([[0], np.cumsum(_sizes(len(coordinates), n_patches))])
    order = np.arange(len(coordinates))
    pieces = [(0, n_patches)]
    while pieces:
        first, last = pieces.pop()
        if last - first < 2:
            continue
        middle = (first + last) // 2
        a, m, b = bounds[first], bounds[middle], bounds[last]
        part = order[a:b]
        points = coordinates[part]
        axis = int(np.argmax(np.ptp(points, axis=0)))
        order[a:b] = part[np.argpartition(points[:, axis], m - a)]
        pieces += [(first, middle), (middle, last)]
    return order
