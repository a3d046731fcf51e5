"""Colours for many categories."""

from __future__ import annotations

# Okabe and Ito's seven, then what a maximin search in CIELAB added: each colour as far as can be from all before it,
# from white and from the grey of missing labels, in normal vision and as a deuteranope and a protanope see it, with
# chroma at most 75. The least distance between any two is 22, and 13 and 11 as the colour-blind see them.
COLORS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#691E0F"),
    *("#1E3CB4", "#87F078", "#69005A", "#B4E1A5", "#F0D2FF", "#694B5A", "#784B00", "#B4A54B"),
    *("#1E3C87", "#0F3C2D", "#0078F0", "#E1A5A5", "#784B87", "#B487FF", "#008787", "#69873C"),
    *("#785A3C", "#E1A578", "#A5D24B", "#A587C3", "#870F3C", "#87C3D2", "#4B961E", "#D26969"),
)
MISSING = "#D4D4D4"


def palette(n: int) -> list[str]:
    """``n`` colours as hex, the same first ones for every n, safe for the colour-blind; after 32 they repeat."""
    if n < 0:
        msg = f"`n` must be at least 0, got {n!r}."
        raise ValueError(msg)
    return [COLORS[i % len(COLORS)] for i in range(n)]
