"""The threads that blocks of spots are drawn in."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor


def threads() -> ThreadPoolExecutor:
    """Return a pool for work that releases the lock, as numpy does."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1))
