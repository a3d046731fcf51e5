"""A plot of what `tl.choose_n_domains` found: how many domains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdvi._anndata.checks import check_adata
from pdvi._anndata.keys import N_DOMAINS
from pdvi.pl.canvas import plain

if TYPE_CHECKING:
    from anndata import AnnData

PANELS = {
    "stability": "agreement between fits (ARI)",
    "held_out": "log density of a held-out spot",
    "elbo": "ELBO",
}


def n_domains(adata: AnnData, *, key: str = N_DOMAINS, ax: np.ndarray | None = None) -> np.ndarray:
    """Draw stability, held-out score and ELBO of every candidate; the dashed line is the recommended number.

    Parameters
    ----------
    key
        of the table in uns.
    ax
        three axes to draw into, or two if there is no held-out score; by default a new figure.

    Returns
    -------
    Array of Axes.
    """
    table = check_adata(adata).uns.get(key)
    if not isinstance(table, dict) or "recommended" not in table:
        msg = f"adata.uns[{key!r}] has no candidates; run pdvi.tl.choose_n_domains(adata, candidates) first."
        raise ValueError(msg)
    panels = {name: title for name, title in PANELS.items() if name in table}
    axes = plain(len(panels), ax)
    candidates = np.asarray(table["n_domains"])
    for each, (name, title) in zip(axes, panels.items()):
        each.plot(candidates, np.asarray(table[name]), marker="o", markersize=4, linewidth=1.2, color="#0072B2")
        each.axvline(table["recommended"], color="#999999", linewidth=1, linestyle="--")
        each.set_xticks(candidates if len(candidates) <= 15 else candidates[:: len(candidates) // 10])
        each.set_xlabel("domains")
        each.set_title(title, fontsize="medium", loc="left")
    axes[0].set_ylim(top=1.02)
    for each in axes[1:]:
        each.ticklabel_format(axis="y", useOffset=False)
    return axes
