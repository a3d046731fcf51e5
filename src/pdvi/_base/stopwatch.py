"""Where the time goes."""

from __future__ import annotations

from time import perf_counter


class Stopwatch:
    """Laps by name; those of a name are added up."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._began = perf_counter()

    def lap(self, name: str) -> None:
        """Count the time since the last lap, or since the beginning, under a name."""
        now = perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._began
        self._began = now
