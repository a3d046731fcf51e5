"""Which worker gets which shards: as many to each, and those that touch to the same.

Shards are numbered along a curve through space where a store was written from coordinates, so a run of them is a
compact piece of tissue; what a worker has already tells where a run goes on.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Touching = list[dict[int, int]]  # by shard: the others whose rows it reads, and how many


def touching(halo: np.ndarray | None, n_rows: int, n_shards: int) -> Touching:
    """Return how many rows every shard reads of which others."""
    if halo is None:
        return [{} for _ in range(n_shards)]
    found = []
    for b, slots in enumerate(halo):
        others, counts = np.unique(np.unique(slots) // n_rows, return_counts=True)
        found.append({c: n for c, n in zip(others.tolist(), counts.tolist()) if c != b})
    return found


def shares(shards: Iterable[int], owned: dict[str, list[int]], touch: Touching) -> dict[str, list[int]]:
    """Return who takes which of some shards; ``owned`` has what all workers have, those with least first.

    A shard goes where most of the rows are that it reads, or else to whom the one before it went, as long as there is
    room: nobody gets more than an equal share.
    """
    shards = sorted(shards)
    room = _room(len(shards), [len(own) for own in owned.values()])
    free = dict(zip(owned, room))
    where = {b: address for address, own in owned.items() for b in own}
    given: dict[str, list[int]] = {}
    before = next(iter(owned))
    for b in shards:
        rows = dict.fromkeys(owned, 0)
        for c, count in touch[b].items():
            if c in where:
                rows[where[c]] += count
        open_ = [address for address, places in free.items() if places]
        before = max(open_, key=lambda address: (rows[address], address == before))
        given.setdefault(before, []).append(b)
        where[b] = before
        free[before] -= 1
    return given


def _room(new: int, owned: list[int]) -> list[int]:
    """Return how many each may take so that all have as equal a number as what they have allows."""
    level = np.array(owned)
    for _ in range(new):
        level[level.argmin()] += 1
    return (level - owned).tolist()
