"""What becomes of memory that was freed: given back to the system, or kept for the next array."""

from __future__ import annotations

import ctypes
from contextlib import suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
MUCH = 2**30  # bytes


def give_back() -> None:
    """Let go of what was freed: glibc keeps it for the next array, and a limit on memory counts it."""
    with suppress(OSError, AttributeError):  # on another system, whose allocator has its own mind
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def keep_freed() -> None:
    """Keep what was freed, up to a gigabyte, for the next array.

    Dask tells the allocator of its workers to give back everything at once. Arrays of a shard, which every visit makes
    anew, then consist of new pages, which the system has to clear: visits took 1.6 times as long.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for threshold in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            libc.mallopt(threshold, MUCH)
