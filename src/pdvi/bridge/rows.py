"""The data of a NumPyro model, cut into shards of equal size: which arguments have rows, in which order, how padded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array


class Arguments(NamedTuple):
    """What the model is called with: every argument in one of three places."""

    rows: dict[str, np.ndarray]  # the data: arrays with an axis for the rows of the plate
    constants: dict[str, Array]  # arrays that are the same for all rows
    plain: dict[str, Any]  # what is no array, and decides about shapes perhaps
    axes: dict[str, int]  # of ``rows``
    lengths: np.ndarray | None  # of ragged groups

    def data(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the data of some rows."""
        return {name: np.take(value, rows, axis=self.axes[name]) for name, value in self.rows.items()}

    def mask(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return which entries of ragged groups are there, as the part of a shard that it is."""
        if self.lengths is None:
            return {}
        return {"mask": (np.arange(self.lengths.max()) < self.lengths[rows][:, None]).astype(float)}


def padded(data: Mapping[str, Any]) -> tuple[dict[str, Any], np.ndarray | None]:
    """Return the arguments as arrays, lists of groups of unequal size padded on axis 1, and the groups' sizes."""
    found: dict[str, Any] = {}
    lengths: dict[str, np.ndarray] = {}
    for name, value in data.items():
        if value is None or isinstance(value, str | bool | int | float):
            found[name] = value
        elif isinstance(value, list | tuple) and len({np.shape(group) for group in value}) > 1:
            groups = [np.asarray(group) for group in value]
            if any(group.ndim == 0 or group.shape[0] == 0 for group in groups):
                msg = f"`data` must have at least one entry in every group, {name!r} has a group of none; leave it out."
                raise ValueError(msg)
            lengths[name] = np.array([len(group) for group in groups])
            longest = int(lengths[name].max())
            found[name] = np.stack([group[np.minimum(np.arange(longest), len(group) - 1)] for group in groups])
        else:
            found[name] = value if isinstance(value, jax.Array) else np.asarray(value)
    if len({tuple(sizes) for sizes in lengths.values()}) > 1:
        msg = (
            f"`data` must have groups of the same sizes in all its lists, {sorted(lengths)} differ; check their order."
        )
        raise ValueError(msg)
    return found, next(iter(lengths.values()), None)


def sorted_out(
    data: Mapping[str, Any], lengths: np.ndarray | None, n: int, plate: str, axes: Mapping[str, int | None]
) -> Arguments:
    """Return every argument in its place, given the number of rows."""
    rows, same, plain, of = {}, {}, {}, {}
    for name, value in data.items():
        if not isinstance(value, np.ndarray | jax.Array) or value.dtype.kind not in "fiub":
            plain[name] = value
            continue
        axis = axes.get(name, 0 if value.shape[:1] == (n,) else None)
        if axis is None:
            same[name] = value
            continue
        if not 0 <= axis < value.ndim or value.shape[axis] != n:
            msg = (
                f"`axes` must name the axis of {name!r} that has the {n} rows of plate {plate!r}, got {axis!r} "
                f"for shape {value.shape}."
            )
            raise ValueError(msg)
        rows[name], of[name] = np.asarray(value), axis
    if not rows:
        shapes = {name: np.shape(value) for name, value in data.items()}
        msg = (
            f"`data` must have an array with the {n} rows of plate {plate!r} on its first axis, got shapes {shapes}; "
            "name another axis by `axes`."
        )
        raise ValueError(msg)
    working = jnp.result_type(float)  # integers stay integers: they may be indices
    constants = {k: jnp.asarray(v, working if v.dtype.kind == "f" else None) for k, v in same.items()}
    return Arguments(rows, constants, plain, of, lengths)
