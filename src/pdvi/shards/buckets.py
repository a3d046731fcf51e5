"""Sizes in buckets: arrays padded to a few sizes, so that what is compiled for one data set serves the next."""

from __future__ import annotations

FINEST = 3  # bits after the leading one that a size may have: eight buckets per doubling, at most an eighth of padding
DEGREE = 8  # columns of a neighbour table come in such steps
AT_ONCE = 12  # of them that are worked on at once, at most


def bucket(size: int, finest: int = FINEST) -> int:
    """Return the smallest bucket that holds ``size``: at most 12.5 % larger, or twice as large with ``finest`` 0."""
    step = 1 << max(0, size.bit_length() - 1 - finest)
    return -(-size // step) * step


def degree_bucket(degree: int) -> int:
    """Return the number of columns for tables whose rows have at most so many neighbours."""
    return -(-max(degree, 1) // DEGREE) * DEGREE


def columns_at_once(columns: int) -> int:
    """Return how many columns of a table the body of a loop over them should have.

    The more the better, as long as there is a loop: without one XLA makes one kernel of all gathers, which took two to
    three times as long with 6 to 24 columns.
    """
    return max(size for size in range(1, AT_ONCE + 1) if columns % size == 0 and (size == 1 or columns > size))
