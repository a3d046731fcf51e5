"""How a fit went."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdvi.pl.canvas import plain

PANELS = {"objective": "objective (negative ELBO)", "grad_norm": "gradient norm"}
UNITS = {"epoch": "epoch", "seconds": "seconds", "step": "step"}


def trace(adata: Any, *, key: str = "domain", against: str = "epoch", ax: Any = None) -> Any:
    """The objective and the norm of its gradient during the fit; dotted lines are events, such as new noise.

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
    if key not in adata.uns or "trace" not in adata.uns[key]:
        msg = f"adata.uns[{key!r}] has no trace; run pdvi.tl.domains(adata, n_domains) first."
        raise ValueError(msg)
    if against not in UNITS:
        msg = f"`against` must be one of {tuple(UNITS)}, got {against!r}."
        raise ValueError(msg)
    record = {name: np.asarray(values) for name, values in adata.uns[key]["trace"].items()}
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


def _look_past_the_start(ax: Any) -> None:
    start, *later = ax.lines[0].get_ydata() if len(ax.lines[0].get_ydata()) else [0.0]
    room = np.ptp(later) if len(later) > 1 else 0.0
    if room > 0 and start > max(later) + 5 * room:
        ax.set_ylim(min(later) - 0.1 * room, max(later) + 0.5 * room)
