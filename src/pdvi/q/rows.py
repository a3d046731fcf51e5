"""Rows of a shard, and rows within rows: how many there are, and which of them are padding.

A shard's ``mask`` is (rows,): 1 for a real row. Where rows hold rows of their own, ``mask2`` is (rows, rows of a row),
and so on (see `pdvi.partition.nested`). Shards of one size have none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pdvi._base.types import Array, PyTree
from pdvi.shards.stacking import FRACTION, mask_name


def masks(shard: Mapping[str, Any]) -> list[Array]:
    """Return the masks of a shard, the outermost rows first."""
    found: list[Array] = []
    while mask_name(len(found) + 1) in shard:
        found.append(shard[mask_name(len(found) + 1)])
    return found


def sizes(shard: Mapping[str, Any], levels: int) -> tuple[int, ...]:
    """Return how many rows a shard has, how many rows each of these, and so on for so many levels.

    Told by masks, and where there are none by the leading axes that all arrays of the shard share.
    """
    known = masks(shard)
    if len(known) >= levels:
        return known[levels - 1].shape
    leaves = [leaf for name, part in shard.items() if name != FRACTION for leaf in jax.tree.leaves(part)]
    shapes = {leaf.shape[:levels] for leaf in leaves if leaf.ndim}
    if len(shapes) != 1 or len(next(iter(shapes))) != levels:
        told = {name: tuple(jnp.shape(part)) for name, part in shard.items() if name != FRACTION}
        msg = (
            f"every array of a shard must begin with its rows, for {levels} level(s) of local variables, got the "
            f"shapes {told}; override `sizes` to say how many rows a shard has."
        )
        raise ValueError(msg)
    return next(iter(shapes))


def total(what: str, terms: PyTree, shard: Mapping[str, Any], *, all_levels: bool = False) -> Array:
    """Return the sum of terms over real rows: each array times the deepest mask whose shape it begins with.

    ``all_levels``: one of them must reach the innermost rows, since a sum over padded ones would go unnoticed.
    """
    known = masks(shard)
    arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(terms)]
    fitting = [[d for d, mask in enumerate(known, 1) if array.shape[:d] == mask.shape] for array in arrays]
    depths = [max(fits, default=0) for fits in fitting]  # of the deepest mask whose shape an array begins with
    deepest = len(known) if all_levels else min(1, len(known))
    if known and arrays and (min(depths) < 1 or max(depths) < deepest):
        wanted = known[deepest - 1].shape
        msg = (
            f"`{what}` must return a term for each row, of shape {wanted} or with more axes, since rows were padded, "
            f"got {[array.shape for array in arrays]}; leave the sum over rows to pdvi."
        )
        raise ValueError(msg)
    summed = jnp.asarray(0.0)
    for array, depth in zip(arrays, depths):
        mask = known[depth - 1] if depth else jnp.asarray(1.0)
        summed += jnp.sum(array * mask.reshape(*mask.shape, *[1] * (array.ndim - mask.ndim)))
    return summed
