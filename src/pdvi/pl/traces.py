"""How a fit went."""

from __future__ import annotations

from typing import Any

import numpy as np

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
    if ax is None:
        import matplotlib.pyplot as plt

        figure = plt.figure(figsize=(9, 3.2), layout="constrained")
        axes = np.array([figure.add_subplot(1, 2, i + 1) for i in range(2)], dtype=object)
    else:
        axes = np.atleast_1d(np.asarray(ax, dtype=object)).ravel()
        if len(axes) != 2:
            msg = f"`ax` must be 2 axes, got {len(axes)}."
            raise ValueError(msg)
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
        for side in ("top", "right"):
            each.spines[side].set_visible(False)
    if (record["grad_norm"] > 0).any():
        axes[1].set_yscale("log")
    axes[0].ticklabel_format(axis="y", useOffset=False)
    return axes
