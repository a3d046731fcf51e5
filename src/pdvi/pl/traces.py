"""How a fit went."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdvi.pl.canvas import two_axes

PANELS = {"objective": "objective (negative ELBO)", "grad_norm": "gradient norm"}
UNITS = {"epoch": "epoch", "seconds": "seconds", "step": "step"}


def trace(adata: Any, *, key: str = "domain", against: str = "epoch", ax: Any = None) -> Any:
    """The objective and the norm of its gradient during the fit; dotted lines are events, such as new noise.

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
    axes = two_axes(ax)
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
    return axes
