"""Spatial domains from arrays: views of a tissue, their consensus, other slides, and the number of domains."""
