"""Arrays of all shards in files without a name: their space is free again when they are, however the process ends."""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from typing import Any

import jax
import numpy as np

from pdvi._base.types import PyTree


class Scratch:
    """A pytree per shard, all of one shape, on disk; read and written by number as in a dict."""

    def __init__(self, template: PyTree, n_shards: int, folder: str | os.PathLike[str] | None = None):
        leaves, self._structure = jax.tree.flatten(template)
        self._shapes = [(tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves]
        self._files = [tempfile.TemporaryFile(dir=None if folder is None else str(folder)) for _ in leaves]  # noqa: SIM115
        weakref.finalize(self, _close, self._files)
        self._n_shards, self._folder = n_shards, folder or tempfile.gettempdir()
        for file, (shape, dtype) in zip(self._files, self._shapes):
            file.truncate(n_shards * _size(shape, dtype))

    def get(self, b: int) -> PyTree:
        """Return what is kept of shard ``b``."""
        return self[b]

    def __getitem__(self, b: int) -> PyTree:
        leaves = []
        for file, (shape, dtype) in zip(self._files, self._shapes):
            file.seek(b * _size(shape, dtype))
            leaves.append(np.fromfile(file, dtype, math.prod(shape)).reshape(shape))
        return jax.tree.unflatten(self._structure, leaves)

    def __setitem__(self, b: int, tree: PyTree) -> None:
        for file, leaf in zip(self._files, jax.tree.leaves(tree)):
            array = np.ascontiguousarray(leaf)
            try:
                file.seek(b * array.nbytes)
                file.write(array)
                file.flush()
            except OSError as error:
                msg = (
                    f"cannot keep shard {b} in {str(self._folder)!r}: {error.strerror}; give `scratch` another folder."
                )
                raise OSError(error.errno, msg) from error

    def stacked(self) -> PyTree:
        """Return all shards as memory-mapped arrays, (shards, ...); they outlive this object."""
        leaves = [
            np.memmap(file, dtype, "r+", shape=(self._n_shards, *shape))
            if _size(shape, dtype)
            else np.empty((self._n_shards, *shape), dtype)
            for file, (shape, dtype) in zip(self._files, self._shapes)
        ]
        return jax.tree.unflatten(self._structure, leaves)


def _close(files: list[Any]) -> None:
    for file in files:
        file.close()


def _size(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
