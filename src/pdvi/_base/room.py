"""Memory that is free, said before it is taken."""

from __future__ import annotations

import math
from pathlib import Path

UNITS = ("bytes", "kB", "MB", "GB", "TB")
MEMINFO = Path("/proc/meminfo")


def available() -> float:
    """Return the bytes that the system can still give; infinity where it does not tell."""
    try:
        (line,) = (line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        return 1024.0 * int(line.split()[1])
    except (OSError, ValueError, IndexError):
        return math.inf


def in_words(size: float) -> str:
    """Return bytes as a person says them: "3.2 GB"."""
    power = min(len(UNITS) - 1, int(math.log10(max(size, 1)) / 3))
    return f"{size / 1000**power:.3g} {UNITS[power]}"
