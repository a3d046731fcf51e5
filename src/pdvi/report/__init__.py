"""Reports of a fit: one HTML file with the figures inside, to be opened or sent as it is."""

from pdvi.report.html import page, write

__all__ = ["page", "write"]
