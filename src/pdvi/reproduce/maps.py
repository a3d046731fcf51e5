"""Draw the row of domain maps: the truth and every method, each with a part enlarged below it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.spatial import cKDTree

from pdvi.pl import canvas, palette
from pdvi.pl.colors import MISSING, matching_colors
from pdvi.reproduce.slide import Slide

WINDOW = 0.2  # of the longer side of the slide
PLACES = 300  # that are tried for the window


def draw(slide: Slide, found: dict[str, np.ndarray]) -> Any:
    """Draw a map of the truth and of each labelling under its title, in the colors of the true domains most like it."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    xy = slide.coordinates
    center, side = window(slide)
    inside = np.flatnonzero((np.abs(xy - center) <= side / 2).all(1))
    shown = {"truth": slide.truth, **found}
    columns = min(6, len(shown))
    rows = -(-len(shown) // columns)
    across, down = np.ptp(xy, axis=0)
    height = 2.3 * float(np.clip(down / max(across, 1e-12), 0.4, 2.5))
    figure = plt.figure(figsize=(2.3 * columns, rows * (height + 2.1)), layout="constrained")
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=[height, 1.8] * rows)
    whole = canvas.Spots(xy, small=True)
    part = canvas.Spots(xy[inside])
    for number, (title, labels) in enumerate(shown.items()):
        row, column = divmod(number, columns)
        colors = [*_colors(slide, labels), MISSING]
        ax, zoom = (figure.add_subplot(grid[2 * row + below, column]) for below in (0, 1))
        canvas.frame(ax, xy, flip=True)
        whole.labels(ax, labels, colors)
        ax.add_patch(Rectangle(tuple(center - side / 2), side, side, fill=False, color="black", linewidth=0.9))
        ax.set_title(title, fontsize="small")
        canvas.frame(zoom, np.stack([center - side / 2, center + side / 2]), flip=True)
        part.labels(zoom, labels[inside], colors)
        zoom.patch.set_visible(False)
        zoom.spines[:].set_visible(True)
    return figure


def window(slide: Slide) -> tuple[np.ndarray, float]:
    """Return the center and the side of the square with the most true domains in it, among some places."""
    xy = slide.coordinates
    side = WINDOW * float(np.ptp(xy, axis=0).max())
    places = xy[:: max(1, len(xy) // PLACES)]
    inside = cKDTree(xy).query_ball_point(places, side / 2, p=np.inf)
    counts = [(len(np.unique(slide.truth[rows])), len(rows)) for rows in inside]
    return places[counts.index(max(counts))], side


def _colors(slide: Slide, labels: np.ndarray) -> list[str]:
    domains = pd.RangeIndex(slide.n_domains)
    truth, found = (pd.Series(pd.Categorical.from_codes(codes.astype(int), domains)) for codes in (slide.truth, labels))
    return matching_colors(found, truth, palette(slide.n_domains))
