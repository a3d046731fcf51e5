"""What stands beside or on a map: the legend, a scale bar, the image of the tissue beneath it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.legend import Legend

    from pdvi._anndata.image import TissueImage


def legend(ax: Axes, entries: Sequence[tuple[str, str]], height: float) -> Legend:
    """Draw names and colors on the right of the axes, in as many columns as fit into this height in inches."""
    from matplotlib.lines import Line2D

    lines = int(np.clip((height - 0.3) / 0.29, 4, 24))
    handles = [Line2D([], [], linestyle="", marker="o", markersize=7, color=color) for _, color in entries]
    made = ax.legend(
        handles,
        [name for name, _ in entries],
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        ncols=-(-len(entries) // lines),
        handletextpad=0.2,
        columnspacing=0.8,
        fontsize="medium",
    )
    for each in made.get_texts():
        each.set_parse_math(False)  # dollars are no mathematics in a label
    return made


def make_room(made: Legend, width: float, height: float) -> None:
    """Make the figure as wide as its maps and their legend, measured, and at least as high as the legend."""
    figure = made.axes.figure.canvas.figure  # the whole one, also from within a part
    box = made.get_window_extent()
    figure.set_size_inches(width + box.width / figure.dpi + 0.25, max(height, box.height / figure.dpi + 0.25))


def scale_bar(ax: Axes, microns_per_unit: float) -> None:
    """Draw a bar of a round length in micrometres or millimetres in the lower left corner."""
    left, right = ax.get_xlim()
    low, high = ax.get_ylim()  # the lower edge first, whichever way the axis points
    most = 0.25 * abs(right - left) * microns_per_unit
    lengths = np.array([1.0, 2.0, 5.0]) * 10.0 ** np.floor(np.log10(most))
    length = float(lengths[lengths <= most * (1 + 1e-9)].max())
    units = length / microns_per_unit
    x, y = left + 0.03 * (right - left), low + 0.03 * (high - low)
    ax.plot([x, x + units], [y, y], color="black", linewidth=2.5, solid_capstyle="butt", zorder=5, label="_scale bar")
    name = f"{length / 1000:g} mm" if length >= 1000 else f"{length:g} µm"
    ax.text(x + units / 2, y + 0.015 * (high - low), name, ha="center", va="bottom", fontsize="small", zorder=5)


def tissue(ax: Axes, image: TissueImage) -> None:
    """Show the image below all else, in units of the coordinates."""
    high, wide = image.pixels.shape[:2]
    extent = (-0.5 / image.scale, (wide - 0.5) / image.scale, (high - 0.5) / image.scale, -0.5 / image.scale)
    ax.imshow(image.pixels, extent=extent, origin="upper", zorder=-1, cmap="gray" if image.pixels.ndim == 2 else None)
