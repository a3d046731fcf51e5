"""The tissue image of a slide and the size of its pixels, where ``uns["spatial"]`` has them as scanpy's readers do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdvi._anndata.keys import SPATIAL

if TYPE_CHECKING:
    from anndata import AnnData

SPOT = 65.0  # micrometres: what Space Ranger's "spot_diameter_fullres" is the diameter of
RESOLUTIONS = ("hires", "lowres")


class TissueImage(NamedTuple):
    """An image, and how many of its pixels one unit of the coordinates is."""

    pixels: np.ndarray
    scale: float


def libraries(adata: AnnData) -> dict[str, Mapping[str, Any]]:
    """Return the entries of ``uns["spatial"]`` by name; none where it is something else."""
    found = adata.uns.get(SPATIAL)
    if not isinstance(found, Mapping):
        return {}
    return {str(name): entry for name, entry in found.items() if isinstance(entry, Mapping)}


def tissue_image(adata: AnnData, library: str | None = None) -> TissueImage | None:
    """Return the image of a library (by default the only one), the finer one first; None if there is none."""
    found = libraries(adata)
    if library is None and len(found) == 1:
        library = next(iter(found))
    if library not in found:
        return None
    images, factors = found[library].get("images", {}), found[library].get("scalefactors", {})
    for name in RESOLUTIONS:
        scale = factors.get(f"tissue_{name}_scalef")
        if name in images and scale:
            return TissueImage(np.asarray(images[name]), float(scale))
    return None


def microns_per_unit(adata: AnnData) -> float | None:
    """Return how many micrometres one unit of the coordinates is, if all libraries that tell say the same."""
    found = set()
    for entry in libraries(adata).values():
        factors = entry.get("scalefactors", {})
        if factors.get("microns_per_pixel"):
            found.add(round(float(factors["microns_per_pixel"]), 4))
        elif factors.get("spot_diameter_fullres"):
            found.add(round(SPOT / float(factors["spot_diameter_fullres"]), 4))
    close = found and max(found) < 1.02 * min(found)
    return sum(found) / len(found) if close else None
