"""What domains are made of: the shares of cell types that a view of types found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdvi._anndata.checks import fit_of
from pdvi._anndata.keys import DOMAIN

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes


def composition(adata: AnnData, *, key: str = DOMAIN, ax: Axes | None = None) -> Axes:
    """Draw the share of every type in every domain; types are sorted by the domain that has most of them.

    Types are numbered by how many spots they have; ``uns[key]["types"]["of_spot"]`` says which spots these are.

    Parameters
    ----------
    key
        of the domains.
    ax
        axes to draw into; by default a new figure.
    """
    from matplotlib import pyplot as plt

    types = fit_of(adata, key).get("types")
    if types is None:
        msg = f"adata.uns[{key!r}] has no types: no view of types was fitted; run pdvi.tl.domains with views=3 or more."
        raise ValueError(msg)
    shares = np.asarray(types["composition"])
    order = np.lexsort((-shares.max(0), shares.argmax(0)))
    if ax is None:
        _, ax = plt.subplots(figsize=(1.5 + 0.3 * shares.shape[1], 1.2 + 0.3 * len(shares)), layout="constrained")
    image = ax.imshow(shares[:, order], cmap="Blues", vmin=0, aspect="auto")
    ax.set_xticks(range(shares.shape[1]), [str(k + 1) for k in order], fontsize="small")
    ax.set_yticks(range(len(shares)), [str(name) for name in adata.obs[key].astype("category").cat.categories])
    ax.set_xlabel("cell type")
    ax.set_ylabel("domain")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    bar = ax.figure.colorbar(image, ax=ax, label="share", shrink=0.8)
    bar.outline.set_visible(False)
    return ax
