"""Shards: a list of pytrees, or one pytree stacked on axis 0, made into equal, checked, stacked arrays.

Leaves whose leading size differs between shards are *rows*. They are padded to the longest shard by
repeating the last row (so that a logarithm or a division of a padded row stays finite), and the shard gets
the key ``"mask"``: 1 for a real row, 0 for a padded one. Equal shards are stacked as they are.

Shards that are dicts get the key ``"fraction"`` if they have none: each one's share of all rows, which is its share of
what counts once for the whole data.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
MASK = "mask"
FRACTION = "fraction"


def mask_name(level: int) -> str:
    """Return the key of the mask of rows (level 1), of rows within rows (level 2), and so on."""
    return MASK if level == 1 else f"{MASK}{level}"


def stack(shards: PyTree) -> tuple[PyTree, np.ndarray | None]:
    """Stacked float arrays, and the number of rows of each shard if the library padded them."""
    rows = None
    if isinstance(shards, list):
        shards, rows = _stack_list(shards)
    leaves = jax.tree_util.tree_leaves_with_path(shards)
    if not leaves:
        msg = "`shards` must hold at least one array, got an empty pytree."
        raise ValueError(msg)
    sizes = {_name(path): np.shape(leaf)[:1] for path, leaf in leaves}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        found = {name: size[0] if size else "a scalar" for name, size in sizes.items()}
        msg = f"every leaf of `shards` must have the number of shards as leading size, got {found}."
        raise ValueError(msg)
    if 0 in next(iter(sizes.values())):
        msg = "`shards` must hold at least one shard, got 0."
        raise ValueError(msg)
    for path, leaf in leaves:
        _check_leaf(_name(path), np.asarray(leaf))
    if isinstance(shards, dict) and FRACTION not in shards:
        shards = {**shards, FRACTION: _fractions(shards)}
    return jax.tree.map(to_device, shards), rows


def take(shards: PyTree, index: Any) -> PyTree:
    """Return the shard or the batch of shards at ``index``."""
    if np.shape(index) == (1,):  # a slice, where a gather of one large row would crawl
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index[0], 1), shards)
    return jax.tree.map(lambda leaf: leaf[index], shards)


def put(shards: PyTree, index: Any, values: PyTree) -> PyTree:
    """Return ``shards`` with those at ``index`` replaced."""
    if np.shape(index) == (1,):
        return jax.tree.map(
            lambda leaf, value: jax.lax.dynamic_update_slice_in_dim(leaf, value, index[0], 0), shards, values
        )
    return jax.tree.map(lambda leaf, value: leaf.at[index].set(value), shards, values)


def _stack_list(shards: list[PyTree]) -> tuple[PyTree, np.ndarray | None]:
    if not shards:
        msg = "`shards` must hold at least one shard, got 0."
        raise ValueError(msg)
    structure: Any = jax.tree.structure(shards[0])
    for index, shard in enumerate(shards):
        if jax.tree.structure(shard) != structure:
            msg = (
                f"all `shards` must have the same structure: shards[{index}] has "
                f"{jax.tree.structure(shard)}, shards[0] has {structure}."
            )
            raise ValueError(msg)
    paths = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(shards[0])]
    columns = [[np.asarray(leaf) for leaf in column] for column in zip(*map(jax.tree.leaves, shards))]
    row_sizes: dict[str, np.ndarray] = {}
    for name, column in zip(paths, columns):
        if len({leaf.shape[1:] for leaf in column}) != 1 or len({leaf.ndim for leaf in column}) != 1:
            shapes = sorted({leaf.shape for leaf in column})
            msg = f"`shards` may differ in their leading size only: {name} has shapes {shapes}."
            raise ValueError(msg)
        sizes = np.array([leaf.shape[0] if leaf.ndim else 1 for leaf in column])
        if (sizes == 0).any():
            msg = f"no shard may be empty: {name} of shards[{int(sizes.argmin())}] has 0 rows; leave it out."
            raise ValueError(msg)
        if len(set(sizes.tolist())) > 1:
            row_sizes[name] = sizes
    if not row_sizes:
        return jax.tree.unflatten(structure, [np.stack(column) for column in columns]), None
    rows = next(iter(row_sizes.values()))
    for name, sizes in row_sizes.items():
        if not np.array_equal(sizes, rows):
            index = int(np.argmax(sizes != rows))
            msg = (
                f"the row-wise leaves of a shard must have the same number of rows: in shards[{index}] "
                f"{next(iter(row_sizes))} has {rows[index]} and {name} has {sizes[index]}."
            )
            raise ValueError(msg)
    if not isinstance(shards[0], dict) or MASK in shards[0]:
        msg = (
            f"`shards` of unequal size ({rows.min()} to {rows.max()} rows) must be dicts without the key "
            f"{MASK!r}, which is added to tell real rows from padded ones, got {type(shards[0]).__name__}."
        )
        raise ValueError(msg)
    longest = int(rows.max())
    padded = [
        np.stack([leaf[np.minimum(np.arange(longest), len(leaf) - 1)] for leaf in column])
        if name in row_sizes
        else np.stack(column)
        for name, column in zip(paths, columns)
    ]
    stacked = jax.tree.unflatten(structure, padded)
    return {**stacked, MASK: (np.arange(longest) < rows[:, None]).astype(float)}, rows


def _fractions(shards: dict[str, Any]) -> np.ndarray:
    """Each shard's share of the rows that are real."""
    n_shards = np.shape(jax.tree.leaves(shards)[0])[0]
    rows = np.asarray(shards[MASK], float).reshape(n_shards, -1).sum(1) if MASK in shards else np.ones(n_shards)
    if not (rows > 0).all():
        msg = f"no shard may be empty: {MASK!r} of shard {int(rows.argmin())} is 0 for all rows; leave it out."
        raise ValueError(msg)
    return rows / rows.sum()


def _check_leaf(name: str, leaf: np.ndarray) -> None:
    if leaf.dtype.kind not in "fiub":
        msg = f"`shards` must hold numbers: {name} has dtype {leaf.dtype}."
        raise ValueError(msg)
    if leaf.size == 0:
        msg = f"no shard may be empty: {name} has shape {leaf.shape}."
        raise ValueError(msg)
    if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
        bad = ~np.isfinite(leaf)
        first = int(np.argmax(bad.reshape(len(leaf), -1).any(1)))
        msg = (
            f"`shards` must be finite: {name} has {int(bad.sum())} NaN or infinite values, the first in "
            f"shard {first}; remove or impute them."
        )
        raise ValueError(msg)


def to_device(leaf: Any) -> jax.Array:
    """Return floats in JAX's working precision; integers and booleans as they are (tables of indices)."""
    working = np.dtype(jnp.result_type(float))
    if isinstance(leaf, jax.Array):
        return jnp.asarray(leaf, working if leaf.dtype.kind == "f" else None)
    leaf = np.asarray(leaf)  # converted here: on the device it would be compiled, shape by shape
    return jax.device_put(leaf.astype(working, copy=False) if leaf.dtype.kind == "f" else leaf)


def _name(path: tuple) -> str:
    return f"leaf {jax.tree_util.keystr(path)}" if path else "the array"
