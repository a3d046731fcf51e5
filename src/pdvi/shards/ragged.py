"""Units of unequal size (documents, groups) as shards: their entries in strips of one width, next to each other.

A long unit takes several strips, so one unit of a thousand entries does not make all others a thousand wide.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pdvi._base.checks import whole

STRIP = 2  # entries that a strip costs besides its own


class Strips(NamedTuple):
    """Where everything lies: B shards of R strips of W entries, and U units."""

    entries: np.ndarray  # (B, R, W): which entry lies there; -1 where there is none
    owner: np.ndarray  # (B, R): the unit of the shard that a strip belongs to
    units: np.ndarray  # (B, U): which unit lies there; -1 where there is none

    @property
    def unit_mask(self) -> np.ndarray:
        """Return whether there is a unit."""
        return self.units >= 0

    @property
    def entry_mask(self) -> np.ndarray:
        """Return whether there is an entry."""
        return self.entries >= 0

    def spread(self, values: Any) -> np.ndarray:
        """Return values of entries as (B, R, W, ...), 0 where there is none."""
        values = np.asarray(values)
        mask = self.entry_mask.reshape(*self.entries.shape, *[1] * (values.ndim - 1))
        return np.where(mask, values[np.maximum(self.entries, 0)], np.zeros((), values.dtype))

    def gathered(self, stacked: Any) -> np.ndarray:
        """Return what is stacked over shards and units, (B, U, ...), in the order of the units."""
        stacked = np.asarray(stacked)
        found = np.empty((int(self.unit_mask.sum()), *stacked.shape[2:]), stacked.dtype)
        found[self.units[self.unit_mask]] = stacked[self.unit_mask]
        return found


def strips(lengths: Any, n_shards: int, width: int | None = None) -> Strips:
    """Return units of these lengths, whose entries follow each other, cut into shards of about equally many strips.

    ``width`` is chosen so that little is padded.
    """
    lengths = np.asarray(lengths, np.int64)
    whole("n_shards", n_shards, least=1, most=len(lengths), of="the number of units")
    width = best_width(lengths) if width is None else whole("width", width, least=1)
    first = np.cumsum(lengths) - lengths
    per_unit = -(-lengths // width)
    shard = _balanced(per_unit, n_shards)
    sizes = np.bincount(shard, minlength=n_shards)
    slot = np.arange(len(lengths)) - (np.cumsum(sizes) - sizes)[shard]
    units = np.full((n_shards, sizes.max()), -1)
    units[shard, slot] = np.arange(len(lengths))
    unit = np.repeat(np.arange(len(lengths)), per_unit)  # of every strip
    nth = np.arange(len(unit)) - np.repeat(np.cumsum(per_unit) - per_unit, per_unit)
    filled = np.bincount(shard[unit], minlength=n_shards)
    place = np.arange(len(unit)) - (np.cumsum(filled) - filled)[shard[unit]]
    entries = np.full((n_shards, max(1, filled.max(initial=0)), width), -1)
    within = nth[:, None] * width + np.arange(width)
    entries[shard[unit], place] = np.where(within < lengths[unit][:, None], first[unit][:, None] + within, -1)
    owner = np.zeros(entries.shape[:2], np.int32)
    owner[shard[unit], place] = slot[unit]
    return Strips(entries, owner, units)


def best_width(lengths: np.ndarray) -> int:
    """Return the width that costs least: wide strips are padded, narrow ones are many."""
    longest = int(lengths.max(initial=1))
    candidates = np.unique(np.r_[2 ** np.arange(1, max(2, longest.bit_length())), longest, np.percentile(lengths, 99)])
    candidates = candidates[(candidates >= 1) & (candidates <= max(1, longest))].astype(int)
    costs = [int((-(-lengths // width)).sum()) * (int(width) + STRIP) for width in candidates]
    return int(candidates[int(np.argmin(costs))]) if len(candidates) else max(1, longest)


def _balanced(work: np.ndarray, n_shards: int) -> np.ndarray:
    """Return the shard of every unit: consecutive ones, each shard with a share of the work and at least one unit."""
    done = np.cumsum(work + 1e-3) - 0.5 * (work + 1e-3)
    shard = np.minimum((done / (work + 1e-3).sum() * n_shards).astype(int), n_shards - 1)
    index = np.arange(len(work))
    shard = np.minimum(np.maximum.accumulate(shard), index)  # no shard is skipped from the front
    shard = np.cumsum(np.minimum(np.diff(shard, prepend=0), 1))  # nor one in between
    return np.maximum(shard, n_shards - (len(work) - index))
