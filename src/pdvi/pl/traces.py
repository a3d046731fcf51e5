"""A plot of how a fit went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from pdvi._anndata.checks import MAKES_DOMAINS, check_adata
from pdvi._anndata.keys import DOMAIN
from pdvi._base.checks import one_of
from pdvi.pl.canvas import plain

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes

PANELS = {"objective": "objective (negative ELBO)", "grad_norm": "gradient norm"}
UNITS = {"epoch": "epoch", "seconds": "seconds", "step": "step"}


def trace(adata: AnnData, *, key: str = DOMAIN, against: str = "epoch", ax: np.ndarray | None = None) -> np.ndarray:
    """Draw the objective and the norm of its gradient during the fit; dotted lines are events, such as new noise.

    A start far above the rest is left out of sight, or nothing else would be seen.

    Parameters
    ----------
    key
        of the fit in uns.
    against
        "epoch", "seconds" or "step".
    ax
        two axes to draw into; by default a new figure.

    Returns
    -------
    Array of two Axes.
    """
    fit = check_adata(adata).uns.get(key)
    if not isinstance(fit, Mapping) or "trace" not in fit:
        msg = f"adata.uns[{key!r}] has no trace; {MAKES_DOMAINS}."
        raise ValueError(msg)
    one_of("against", against, UNITS)
    record = {name: np.asarray(values) for name, values in fit["trace"].items()}
    axes = plain(len(PANELS), ax)
    marker = "o" if len(record[against]) <= 60 else ""
    events = record[against][record["event"] != ""] if "event" in record else ()
    for each, (name, title) in zip(axes, PANELS.items()):
        values = record[name].astype(float)
        good = np.isfinite(values) & ((values > 0) | (name == "objective"))
        each.plot(record[against][good], values[good], marker=marker, markersize=3, linewidth=1.2, color="#0072B2")
        for at in events:
            each.axvline(at, color="#999999", linewidth=0.8, linestyle=":")
        each.set_xlabel(UNITS[against])
        each.set_title(title, fontsize="medium", loc="left")
    if (record["grad_norm"] > 0).any():
        axes[1].set_yscale("log")
    axes[0].ticklabel_format(axis="y", useOffset=False)
    _look_past_the_start(axes[0])
    return axes


def _look_past_the_start(ax: Axes) -> None:
    drawn = np.asarray(ax.lines[0].get_ydata(), float)
    start, *later = drawn if len(drawn) else [0.0]
    room = np.ptp(later) if len(later) > 1 else 0.0
    if room > 0 and start > max(later) + 5 * room:
        ax.set_ylim(min(later) - 0.1 * room, max(later) + 0.5 * room)
