"""How many shards: enough that a step is small, and so few that what is kept for each of them fits."""

from __future__ import annotations

from pdvi._base.checks import whole

BUDGET = 2**29  # bytes for copies of the globals: a fixed number, so that no result depends on the machine
COPIES = 3  # of the globals that a shard may keep: its copy, its dual, and what its local variables know of them
NUMBER = 4  # bytes


def shards_for(n_rows: int, n_global: int, *, most: int, least_rows: int = 1) -> int:
    """Return into how many shards to group rows: at most ``most``, and fewer where there are many globals.

    Copies of the globals take at most half a gigabyte, and every shard has at least ``least_rows`` rows.
    """
    whole("n_rows", n_rows, least=1)
    affordable = BUDGET // (COPIES * NUMBER * max(1, n_global))
    return int(max(1, min(most, affordable, n_rows // least_rows)))
