"""Sizes in buckets: arrays padded to a few sizes, so that what is compiled for one data set serves the next."""

from __future__ import annotations

FINEST = 3  # bits after the leading one that a size may have: eight buckets per doubling, at most an eighth of padding
DEGREE = 8  # columns of a neighbour table come in such steps: as many are worked on at once


def bucket(size: int) -> int:
    """Return the smallest bucket that holds ``size``: at most 12.5 % larger."""
    step = 1 << max(0, size.bit_length() - 1 - FINEST)
    return -(-size // step) * step


def degree_bucket(degree: int) -> int:
    """Return the number of columns for tables whose rows have at most so many neighbours."""
    return -(-max(degree, 1) // DEGREE) * DEGREE
