"""Figures on disk: the ending is checked before any work, and a figure that was written is closed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pdvi._base.atomic import check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_figure(path: str | os.PathLike) -> Path:
    """Return ``path`` if a figure can be written there: a writable place, and an ending that matplotlib can draw."""
    from matplotlib.backend_bases import FigureCanvasBase

    path = Path(path)
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in formats:
        msg = f"cannot draw {str(path)!r}: the ending must be one of {', '.join(formats)}."
        raise ValueError(msg)
    return check_writable(path)


def write_figure(axes: Axes | np.ndarray, path: Path) -> None:
    """Write the figure of some axes to a file, and close it."""
    import matplotlib.pyplot as plt

    figure = np.ravel(np.asarray(axes, dtype=object))[0].figure
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight")  # nothing that sticks out is lost
    finally:
        plt.close(figure)
