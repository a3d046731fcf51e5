"""Draw spots on axes: as discs in units of the coordinates, or, when there are many, binned into an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.spatial import cKDTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import EllipseCollection
    from matplotlib.colors import Colormap, Normalize

RASTER_ABOVE = 100_000  # spots; more are drawn as an image (a tenth of that in small panels)
PIXELS = 1_200  # along the longer side of such an image, at most


def panels(
    n: int,
    xy: np.ndarray,
    *,
    ax: Axes | np.ndarray | None = None,
    extra: float = 0.0,
    ncols: int = 4,
    height: float = 4.5,
) -> np.ndarray:
    """Return an array of ``n`` axes: those given, or new ones that follow the data's shape, ``extra`` inches wider."""
    if ax is not None:
        return _given(ax, n)
    import matplotlib.pyplot as plt

    across, down = np.ptp(xy, axis=0)
    width = height * float(np.clip(across / down if down > 0 else 1.0, 0.4, 2.5))
    ncols = min(n, ncols)
    nrows = -(-n // ncols)
    figure = plt.figure(figsize=(ncols * width + extra, nrows * height), layout="constrained")
    return np.array([figure.add_subplot(nrows, ncols, i + 1) for i in range(n)], dtype=object)


def frame(ax: Axes, xy: np.ndarray, *, flip: bool) -> None:
    """Give the axes equal aspect and no ticks, and the y axis downwards (``flip``) as on an image."""
    low, high = xy.min(0), xy.max(0)
    margin = (0.03 if (high > low).any() else 0.5) * _span(xy)
    ax.set_xlim(low[0] - margin, high[0] + margin)
    ax.set_ylim(*((high[1] + margin, low[1] - margin) if flip else (low[1] - margin, high[1] + margin)))
    ax.set(aspect="equal", xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


class Spots:
    """Spots of a panel, or of several ``small`` ones: discs in units of the data, or pixels when they are many."""

    def __init__(self, xy: np.ndarray, size: float | None = None, *, small: bool = False):
        self.xy = xy
        self.grid = None
        if len(xy) > RASTER_ABOVE // (10 if small else 1):
            self.grid = _Grid(xy, size, PIXELS // (3 if small else 1))
        elif size is None:
            # where discs are about a pixel, gaps between them would only make the colors pale
            self.size = spacing(xy) * (1.2 if len(xy) < 20_000 else 1.7)
        else:
            self.size = size

    def labels(self, ax: Axes, codes: np.ndarray, colors: Sequence[str]) -> None:
        """Draw every spot in the color of its code (-1: the last color), a pixel in that of the most frequent one."""
        from matplotlib.colors import to_rgba_array

        rgba = to_rgba_array(colors)
        if self.grid is None:
            self._discs(ax, facecolors=rgba[codes])
            return
        image = np.zeros((*self.grid.shape, 4))
        most = np.zeros(self.grid.shape)
        for code in np.unique(codes):
            count = self.grid.sums(codes == code)
            wins = count > most
            most[wins] = count[wins]
            image[wins] = rgba[code]
        self.grid.show(ax, self.grid.closed(image) * self.grid.filled[..., None])

    def values(self, ax: Axes, numbers: np.ndarray, *, cmap: Colormap, norm: Normalize) -> ScalarMappable:
        """Draw every spot in the color of its number, a pixel in that of the mean; return what a color bar needs."""
        if self.grid is None:
            discs = self._discs(ax, cmap=cmap, norm=norm)
            discs.set_array(np.asarray(numbers, float))
            return discs
        means = self.grid.sums(np.asarray(numbers, float)) / np.maximum(self.grid.count, 1)
        image = np.ma.masked_where(~self.grid.filled, self.grid.closed(means))
        return self.grid.show(ax, image, cmap=cmap, norm=norm)

    def _discs(self, ax: Axes, **looks: Any) -> EllipseCollection:
        from matplotlib.collections import EllipseCollection

        discs = EllipseCollection(
            *([self.size], [self.size], [0.0]),
            units="xy",  # of the data, so that discs touch at any size of the figure
            offsets=self.xy,
            offset_transform=ax.transData,
            linewidths=0,
            rasterized=True,
            **looks,
        )
        ax.add_collection(discs, autolim=False)
        return discs


def spacing(xy: np.ndarray) -> float:
    """Estimate the distance between neighbors from the sixth-nearest of a few hundred spots.

    At most a tenth of the longer side, so that a handful of spots is a handful of discs.
    """
    n = len(xy)
    if n > RASTER_ABOVE:
        return _coarse_spacing(xy)
    some = xy[:: max(1, n // 500)]
    k = min(7, n)
    distance = np.asarray(cKDTree(xy).query(some, k=[k])[0])[:, 0]
    typical = float(np.median(distance)) * np.sqrt(np.pi / max(k - 1, 1))  # a disc of so many spots
    return min(typical if typical > 0 else _span(xy) / np.sqrt(n), _span(xy) / 10)


class _Grid:
    """Pixels that hold about a spot or more each; holes are closed from the nearest pixels."""

    def __init__(self, xy: np.ndarray, size: float | None, most: int):
        from scipy.ndimage import binary_closing, distance_transform_edt

        low, high = xy.min(0), xy.max(0)
        pixel = max(_span(xy) / most, _coarse_spacing(xy) if size is None else size)
        columns, rows = np.floor((high - low) / pixel).astype(int) + 1
        self.shape = int(rows), int(columns)
        column, row = np.floor((xy - low) / pixel).astype(np.int64).T
        self.at = row * columns + column
        self.extent = (low[0], low[0] + columns * pixel, low[1], low[1] + rows * pixel)
        self.count = self.sums(None)
        occupied = np.pad(self.count > 0, 2)
        self.filled = binary_closing(occupied, np.ones((3, 3), bool), iterations=2)[2:-2, 2:-2]
        self.nearest = distance_transform_edt(self.count == 0, return_distances=False, return_indices=True)

    def sums(self, weights: np.ndarray | None) -> np.ndarray:
        """Return the sum of weights of the spots in every pixel, or their number."""
        return np.bincount(self.at, weights, minlength=self.shape[0] * self.shape[1]).reshape(self.shape)

    def closed(self, image: np.ndarray) -> np.ndarray:
        """Return an image in which empty pixels are as the nearest that is not."""
        return image[tuple(self.nearest)]

    def show(self, ax: Axes, image: np.ndarray, **colors: Any) -> ScalarMappable:
        """Show an image in the units of the data."""
        return ax.imshow(image, extent=self.extent, origin="lower", interpolation="nearest", **colors)


def _span(xy: np.ndarray) -> float:
    """The longer side; 1 where all spots are in one place."""
    return float(np.ptp(xy, axis=0).max()) or 1.0


def _coarse_spacing(xy: np.ndarray) -> float:
    """As `spacing`, from how much of a coarse grid is occupied: a tree of millions of spots would take seconds."""
    bins = int(np.clip(np.sqrt(len(xy) / 30), 10, 400))
    column, row = np.minimum((xy - xy.min(0)) / _span(xy) * bins, bins - 1).astype(int).T
    occupied = int(np.count_nonzero(np.bincount(row * bins + column, minlength=bins * bins) > 2))
    return _span(xy) / bins * float(np.sqrt(max(occupied, 1) / len(xy)))


def plain(n: int, ax: np.ndarray | None) -> np.ndarray:
    """Return ``n`` plain panels side by side: those given, or a new figure's."""
    if ax is None:
        import matplotlib.pyplot as plt

        axes = plt.subplots(1, n, figsize=(0.5 + 4.25 * n, 3.2), layout="constrained", squeeze=False)[1][0]
    else:
        axes = _given(ax, n)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return axes


def _given(ax: Axes | np.ndarray, n: int) -> np.ndarray:
    axes = np.atleast_1d(np.asarray(ax, dtype=object)).ravel()
    if len(axes) != n:
        msg = f"`ax` must be {n} axes, one for each panel, got {len(axes)}."
        raise ValueError(msg)
    return axes
