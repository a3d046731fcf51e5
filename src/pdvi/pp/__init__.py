"""Preparation of a slide: from counts to features."""

from pdvi.pp.neighborhood import neighborhood
from pdvi.pp.prepare import prepare
from pdvi.pp.spatial_components import spatial_components

__all__ = ["neighborhood", "prepare", "spatial_components"]
