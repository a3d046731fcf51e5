"""Charts as SVG in the page: sharp at any size, in the colors of the theme, and without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup, escape

WIDE, HIGH = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 78, 12, 26, 34
BELOW = HIGH - BOTTOM + 16  # where the numbers of the axis stand
MOST_POINTS = 600


def line_chart(x: np.ndarray, y: np.ndarray, title: str, label: str, *, log: bool, events: Sequence[float] = ()) -> str:
    """Return a line of ``y`` over ``x``, with dotted lines where something happened; '' if there is nothing to draw."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    good = np.isfinite(x) & np.isfinite(y) & ((y > 0) | (not log))
    x, y = x[good], y[good]
    if len(x) < 2:
        return Markup()
    if len(x) > MOST_POINTS:
        some = np.unique(np.linspace(0, len(x) - 1, MOST_POINTS).astype(int))
        x, y = x[some], y[some]
    height = np.log10(y) if log else y
    low, high = _range(height, past_start=not log)
    right, left = (float(x.max()), float(x.min())) if np.ptp(x) > 0 else (float(x[0]) + 1, float(x[0]))

    def at(value: float) -> float:
        return LEFT + (value - left) / (right - left) * (WIDE - LEFT - RIGHT)

    def up(value: float) -> float:
        return HIGH - BOTTOM - (value - low) / (high - low) * (HIGH - TOP - BOTTOM)

    marks = []
    for tick in _log_ticks(low, high) if log else _ticks(low, high, 4):
        name = f"1e{tick:g}" if log else _number(tick, high - low)
        marks.append(f'<path class="axis" d="M{LEFT} {up(tick):.1f}H{WIDE - RIGHT}"/>')
        marks.append(_text(LEFT - 6, f"{up(tick) + 4:.1f}", "end", name))
    marks += [_text(f"{at(tick):.1f}", BELOW, "middle", _number(tick, right - left)) for tick in _ticks(left, right, 5)]
    marks += [f'<path class="event" d="M{at(value):.1f} {TOP}V{HIGH - BOTTOM}"/>' for value in events]
    inside = np.clip(height, low, high)  # a start far above the rest leaves at the top
    path = "M" + "L".join(f"{at(a):.1f} {up(b):.1f}" for a, b in zip(x, inside))
    return _chart(title, [*marks, f'<path class="line" d="{path}"/>'], label)


def histogram(values: np.ndarray, title: str, label: str) -> str:
    """Return how many spots have which value between 0 and 1."""
    bins = 20
    counts = np.histogram(np.clip(values, 0, 1), bins, (0.0, 1.0))[0]
    top = max(int(counts.max(initial=0)), 1)
    width = (WIDE - LEFT - RIGHT) / bins
    marks = []
    for k, count in enumerate(counts):
        tall = count / top * (HIGH - TOP - BOTTOM)
        if count:
            marks.append(
                f'<rect class="fill" x="{LEFT + k * width + 1:.1f}" y="{HIGH - BOTTOM - max(tall, 1):.1f}" '
                f'width="{width - 2:.1f}" height="{max(tall, 1):.1f}"><title>{k / bins:.2f} to '
                f"{(k + 1) / bins:.2f}: {count:,} spots</title></rect>"
            )
    for tick in (0, 0.25, 0.5, 0.75, 1):
        marks.append(_text(f"{LEFT + tick * (WIDE - LEFT - RIGHT):.0f}", BELOW, "middle", f"{tick:g}"))
    marks.append(f'<path class="axis" d="M{LEFT} {HIGH - BOTTOM}H{WIDE - RIGHT}"/>')
    marks.append(_text(LEFT - 6, TOP + 4, "end", f"{top:,}"))
    return _chart(title, marks, label)


def dot_plot(
    shares: np.ndarray, levels: np.ndarray, rows: Sequence[str], columns: Sequence[str], colors: Sequence[str]
) -> str:
    """Return discs: their size is the share of spots that express a gene, their strength the level (0 to 1)."""
    step, reach = 24, 10
    left = 30 + round(7.2 * max(map(len, rows), default=0))
    top = 20 + round(6.2 * max(map(len, columns), default=0))
    marks = []
    for j, name in enumerate(columns):
        x = left + step * j + step / 2
        marks.append(f'<text transform="translate({x + 4:.0f} {top - 8}) rotate(-60)">{escape(name)}</text>')
    for i, (name, color) in enumerate(zip(rows, colors)):
        y = top + step * i + step / 2
        marks.append(f'<circle cx="10" cy="{y:.0f}" r="5" fill="{escape(color)}"/>')
        marks.append(f'<text x="22" y="{y + 4:.0f}">{escape(name)}</text>')
        for j, gene in enumerate(columns):
            share, level = float(shares[i, j]), float(levels[i, j])
            marks.append(
                f'<circle class="fill" cx="{left + step * j + step / 2:.0f}" cy="{y:.0f}" '
                f'r="{reach * np.sqrt(share):.1f}" fill-opacity="{0.12 + 0.88 * level:.2f}">'
                f"<title>{escape(gene)} in domain {escape(name)}: {100 * share:.0f} % of spots</title></circle>"
            )
    wide, high = left + step * len(columns) + 60, top + step * len(rows) + 34
    y = high - 14
    for k, share in enumerate((0.25, 0.5, 1.0)):
        x = 14 + 72 * k
        marks.append(f'<circle class="fill" cx="{x}" cy="{y}" r="{reach * np.sqrt(share):.1f}"/>')
        marks.append(f'<text class="soft" x="{x + 14}" y="{y + 4}">{100 * share:.0f} %</text>')
    return _svg("".join(marks), max(wide, 240), high, "marker genes", fixed=True)


def _text(x: object, y: object, anchor: str, text: str) -> str:
    return f'<text class="soft" x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


def _chart(title: str, marks: Sequence[str], label: str) -> str:
    """A chart with its title, and the label of its axis below."""
    below = _text(WIDE - RIGHT, HIGH - 2, "end", escape(label))
    return _svg(f'<text x="{LEFT}" y="14">{escape(title)}</text>{"".join(marks)}{below}', WIDE, HIGH, title)


def _svg(inner: str, wide: int, high: int, label: str, *, fixed: bool = False) -> str:
    size = f' width="{wide}" height="{high}"' if fixed else ""
    return Markup(f'<svg viewBox="0 0 {wide} {high}"{size} role="img" aria-label="{escape(label)}">{inner}</svg>')


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
