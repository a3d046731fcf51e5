"""The numbers of a report's charts, which `static/page.html` draws as SVG: lengths are shares of an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

MOST_POINTS = 600


def line_chart(
    x: np.ndarray, y: np.ndarray, title: str, *, log: bool, events: Sequence[float]
) -> dict[str, Any] | None:
    """Return a line of ``y`` over ``x``, the ticks of both axes, and where events were; None without two points."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    good = np.isfinite(x) & np.isfinite(y) & ((y > 0) | (not log))
    x, y = x[good], y[good]
    if len(x) < 2:
        return None
    if len(x) > MOST_POINTS:
        some = np.unique(np.linspace(0, len(x) - 1, MOST_POINTS).astype(int))
        x, y = x[some], y[some]
    height = np.log10(y) if log else y
    low, high = _range(height, past_start=not log)
    right, left = (float(x.max()), float(x.min())) if np.ptp(x) > 0 else (float(x[0]) + 1, float(x[0]))
    inside = np.clip(height, low, high)  # a start far above the rest leaves at the top
    ticks = _log_ticks(low, high) if log else _ticks(low, high, 4)
    names = [f"1e{tick:g}" if log else _number(tick, high - low) for tick in ticks]
    return {
        "title": title,
        "up": [((tick - low) / (high - low), name) for tick, name in zip(ticks, names)],
        "across": [((tick - left) / (right - left), _number(tick, right - left)) for tick in _ticks(left, right, 5)],
        "events": [(value - left) / (right - left) for value in events],
        "points": [*zip(((x - left) / (right - left)).tolist(), ((inside - low) / (high - low)).tolist())],
    }


def _range(values: np.ndarray, *, past_start: bool) -> tuple[float, float]:
    """Limits of an axis; with ``past_start``, a start far above the rest is left out of sight."""
    low, high = float(values.min()), float(values.max())
    if past_start and len(values) > 2:
        room = float(np.ptp(values[1:]))
        if room > 0 and values[0] > values[1:].max() + 5 * room:
            high = float(values[1:].max()) + 0.5 * room
    pad = 0.06 * (high - low) or 0.5
    return low - pad, high + pad


def _ticks(low: float, high: float, about: int) -> list[float]:
    rough = (high - low) / about
    power = 10 ** np.floor(np.log10(rough))
    step = float(min(power * np.array([1, 2, 5, 10]), key=lambda each: abs(each - rough)))
    return [float(value) for value in np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step]


def _log_ticks(low: float, high: float) -> list[float]:
    whole = np.arange(np.ceil(low), np.floor(high) + 1)
    return [float(value) for value in whole[:: max(1, len(whole) // 4)]]


def _number(value: float, room: float) -> str:
    digits = int(np.clip(np.ceil(-np.log10(max(room, 1e-12))) + 1, 0, 6))
    return f"{value + 0.0:,.{digits}f}"
