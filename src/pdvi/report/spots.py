"""Pack the spots of a report's map, a few bytes each, into one text.

Coordinates are laid out with samples side by side, and rounded to 65,536 steps along the longer side. Spots come in the
order of a grid of cells, so that the page finds those in sight without a search, and successive spots differ by little.
Certainties and genes are one byte each. Genes of more than `BINNED_ABOVE` spots are averaged over a grid of 256 by 256
bins: they would be most of the file.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pdvi.pl.canvas import spacing

STEPS = 65_536
MOST = 2_000_000  # spots on the map; of more, so many are drawn at random
BINNED_ABOVE = 60_000
BIN_SHIFT = 8  # bins are 256 steps wide
PER_CELL = 6  # spots, on average
GAP = 0.06  # between samples


class Measure(NamedTuple):
    """Numbers of all spots that can be a color."""

    name: str
    values: np.ndarray
    low: float
    high: float


def pack(
    xy: np.ndarray, codes: np.ndarray, samples: np.ndarray, measures: Sequence[Measure], genes: Sequence[Measure]
) -> tuple[str, dict[str, Any]]:
    """Return coordinates, domain, sample, measures and genes of every spot as a text, and what reading it takes."""
    kept = np.arange(len(xy))
    if len(xy) > MOST:
        kept = np.sort(np.random.default_rng(0).choice(len(xy), MOST, replace=False))
    plane, boxes, step, size = _laid_out(xy[kept], samples[kept])
    n = len(kept)
    shift = int(np.clip(16 - np.round(np.log2(max(np.sqrt(n / PER_CELL), 1))), 7, 15))
    side = STEPS >> shift
    cell = (plane[:, 1] >> shift) * side + (plane[:, 0] >> shift)
    order = np.lexsort((plane[:, 0], cell))
    plane, kept = plane[order], kept[order]
    parts = {
        "x": _two_bytes(np.diff(plane[:, 0], prepend=0) % STEPS),
        "y": _two_bytes(np.diff(plane[:, 1], prepend=0) % STEPS),
        "domain": _narrow(codes[kept]),
        "sample": _narrow(samples[kept]),
    }
    binned = n > BINNED_ABOVE
    shown: dict[str, list[dict[str, Any]]] = {"measure": [], "gene": []}
    for kind, several in (("measure", measures), ("gene", genes)):
        for number, each in enumerate(several):
            name, numbers = f"{kind}{number}", _bytes(each, kept)
            parts[name] = _bin_means(numbers, plane) if kind == "gene" and binned else numbers
            shown[kind].append({"name": each.name, "part": name, "low": float(each.low), "high": float(each.high)})
    places, begin = {}, 0
    for name, part in parts.items():
        places[name] = [begin, len(part)]
        begin += len(part)
    packed = gzip.compress(b"".join(part.tobytes() for part in parts.values()), 6, mtime=0)
    meta = {
        "n": n,
        "left_out": len(xy) - n,
        "shift": shift,
        "bin_shift": BIN_SHIFT if binned else 0,
        "size": size,
        "step": step,
        "extent": [float(value) for value in plane.max(0)],
        "boxes": boxes,
        "parts": places,
        "measures": shown["measure"],
        "genes": shown["gene"],
    }
    return base64.b64encode(packed).decode(), meta


def _laid_out(xy: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, list[list[float]], float, float]:
    """Whole coordinates with samples in rows of a square, the box of each, the width of a step, and a spot's size."""
    n_samples = int(samples.max()) + 1
    per_row = int(np.ceil(np.sqrt(n_samples)))
    parts = [xy[samples == k] if (samples == k).any() else np.zeros((1, 2)) for k in range(n_samples)]
    low, high = np.array([part.min(0) for part in parts]), np.array([part.max(0) for part in parts])
    pitch = (high - low).max(0) + GAP * max(float((high - low).max()), 1e-12) * (n_samples > 1)
    corner = np.array([[k % per_row, k // per_row] for k in range(n_samples)]) * pitch
    moved = xy - low[samples] + corner[samples]
    span = float(moved.max()) or 1.0
    step = span / (STEPS - 1)
    size = float(np.median([spacing(moved[samples == k]) for k in np.unique(samples)])) / step
    size *= 1.2 if len(xy) < 20_000 else 1.5  # where spots are about a pixel, gaps would only make colors pale
    boxes = np.concatenate([corner, corner + high - low], axis=1) / step
    return np.round(moved / step).astype(np.int64), boxes.tolist(), step, size


def _two_bytes(numbers: np.ndarray) -> np.ndarray:
    """Low bytes before high bytes."""
    return np.concatenate([numbers & 255, numbers >> 8]).astype(np.uint8)


def _narrow(codes: np.ndarray) -> np.ndarray:
    """One byte a code, or two."""
    return codes.astype(np.uint8) if codes.max(initial=0) < 256 else _two_bytes(codes)


def _bytes(measure: Measure, kept: np.ndarray) -> np.ndarray:
    room = max(measure.high - measure.low, 1e-12)
    values = np.nan_to_num(np.asarray(measure.values, float)[kept], nan=measure.low)
    return np.round(255 * np.clip((values - measure.low) / room, 0, 1)).astype(np.uint8)


def _bin_means(numbers: np.ndarray, plane: np.ndarray) -> np.ndarray:
    side = STEPS >> BIN_SHIFT
    at = (plane[:, 1] >> BIN_SHIFT) * side + (plane[:, 0] >> BIN_SHIFT)
    count = np.bincount(at, minlength=side * side)
    return np.round(np.bincount(at, numbers, side * side) / np.maximum(count, 1)).astype(np.uint8)
