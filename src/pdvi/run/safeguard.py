"""What to do when a run goes wrong all the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass
class Safeguard:
    """Watches the objective: non-finite, rising, or far above its best for several epochs, means D was too small.

    ``fit`` then restores the last good state and asks the solver to go on from there more carefully
    (`recover`: D times 4, h rebuilt from the duals), at most ``tries`` times.
    """

    factor: ClassVar[float] = 4.0
    tries: ClassVar[int] = 5
    rises: ClassVar[int] = 4  # log points in a row, and at least as many epochs
    slack: ClassVar[float] = 1e-6  # of the objective, plus 1e-12 of the first: smaller rises are rounding

    streak: int = 0  # of log points that rose, or lost what was gained
    good_epoch: float = 0.0
    first: float = np.inf
    best: float = np.inf
    previous: float = np.inf

    def judge(self, epoch: float, objective: float) -> str | None:
        """The reason to go back, or None."""
        if not np.isfinite(objective):
            return "the objective is not finite"
        if np.isinf(self.first):
            self.first = objective
        self.best = min(self.best, objective)
        rounding = self.slack * abs(self.previous) + 1e-12 * abs(self.first)
        rising = objective > self.previous + rounding
        lost = objective > self.best + 0.5 * (self.first - self.best) + 1e-3 * abs(self.best)
        self.previous = objective
        if not (rising or lost):
            self.streak, self.good_epoch = 0, epoch
            return None
        self.streak += 1
        if self.streak >= self.rises and epoch - self.good_epoch >= self.rises:
            return f"the objective rose, or lost half of what was gained, for {epoch - self.good_epoch:g} epochs"
        return None
