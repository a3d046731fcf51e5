"""Simulate a tissue: each step from the organ to its counts is one file."""

from pdvi.datasets.tissue.simulate import embryo, tissue

__all__ = ["embryo", "tissue"]
