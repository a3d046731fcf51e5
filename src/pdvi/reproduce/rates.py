"""Measure how fast a trace falls: linearly, as a power of T, or not at all any more."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import linregress

ARRIVED = 1e-11  # of the way from the start: below it is rounding
STALLED = 0.15  # decades by which a run that has reached a floor falls from the second quarter to the last
FEWEST = 5  # log points that a line is fitted to
BEGUN = 0.1  # a gap above it is on its way, however slow, and not at a floor


class Rate(NamedTuple):
    """Straight lines through a trace, from a quarter of the way to where the gap has arrived, or to its end."""

    per_epoch: float  # slope of log10(gap) against T, in decades per epoch
    straight: float  # its R^2
    slope: float  # of log(gap) against log(T)
    bent: float  # its R^2
    level: float  # median gap of the last quarter of the run
    fall: float  # how many decades that is below the second quarter's

    @property
    def arrived(self) -> bool:
        """Return whether nothing but rounding is left."""
        return self.level <= ARRIVED

    @property
    def floor(self) -> bool:
        """Return whether the run went some way and then stopped short."""
        return ARRIVED < self.level < BEGUN and self.fall < STALLED

    @property
    def linear(self) -> bool:
        """Return whether the fall is straighter against T than against log(T), and goes on."""
        return self.straight > self.bent and (self.arrived or self.fall > 1)

    @property
    def reading(self) -> str:
        """Return the rate in words."""
        if self.linear:
            return "linear"
        if np.isnan(self.slope):
            return "diverged"
        return f"floor at {self.level:.1g}" if self.floor else f"T^{self.slope:.2f}"


def rate(epoch: np.ndarray, gap: np.ndarray) -> Rate:
    """Fit the rate of a gap that begins at 1; the first point is at epoch 0."""
    if len(gap) < FEWEST:  # the run diverged
        return Rate(np.nan, 0.0, np.nan, 0.0, 1.0, 0.0)
    gap = np.where(np.isfinite(gap), gap, np.inf)
    below = np.flatnonzero(gap <= ARRIVED)
    end = max(int(below[0]) + 1 if len(below) else len(gap), 4)
    chosen = slice(max(1, end // 4), end)
    late, decades = epoch[chosen], np.log10(np.clip(gap[chosen], 1e-300, 1e300))
    linear, power_law = linregress(late, decades), linregress(np.log10(late), decades)
    quarter = max(1, len(gap) // 4)
    level, before = (float(np.median(part)) for part in (gap[-quarter:], gap[quarter : 2 * quarter]))
    fall = float(np.log10(max(before, 1e-300) / max(level, 1e-300))) if np.isfinite([before, level]).all() else 0.0
    return Rate(linear.slope, linear.rvalue**2, power_law.slope, power_law.rvalue**2, level, fall)


def squared_gradients(trace: pd.DataFrame) -> np.ndarray:
    """Return the mean squared gradient norm of the iterates between T/2 and T, relative to the start.

    There is one value for every log point. The nonconvex theorems bound the mean up to T, which the first few steps
    dominate for as long as one can wait; a bound of it by c/T is one of this by 2c/T.
    """
    squares = trace["grad_norm"].to_numpy(float) ** 2
    sums = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(squares), squares, 0.0))])
    last = np.arange(1, len(squares) + 1)
    first = last // 2
    return (sums[last] - sums[first]) / (last - first) / squares[0]


def power(epoch: np.ndarray, values: np.ndarray) -> float:
    """Return the slope of log(values) against log(T) from a tenth of the run on, until nothing but rounding is left."""
    chosen = (epoch >= 0.1 * epoch[-1]) & (epoch > 0) & (values > ARRIVED**2)
    if chosen.sum() < 3:
        chosen = epoch > 0
    if chosen.sum() < 3:
        return np.nan
    return linregress(np.log10(epoch[chosen]), np.log10(np.maximum(values[chosen], 1e-300))).slope
