"""Preparation of a slide: from counts to features."""

from pdvi.pp.neighborhood import neighborhood
from pdvi.pp.prepare import prepare

__all__ = ["neighborhood", "prepare"]
