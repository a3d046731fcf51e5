"""Shards on disk: a folder with one file per shard, a manifest, and a checksum of each.

    slide.pdvi/
      manifest.json      the leaves of a shard (where in the file, type, shape), the model, all checksums (manifest.py)
      halo.npy           the rows of other shards that each shard reads, if shards touch
      rows.npy           which row of the original data lies in which slot, if the writer told
      shard-00000.bin    all leaves of shard 0, one after the other
      ...

All shards have the same shapes, so one description serves all and a shard is one read. A store appears under its
name only when it is whole. Nothing in it is code.
"""

from __future__ import annotations

import os
import stat
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from pdvi._base.atomic import create, resolved
from pdvi._base.atomic_folder import begin_folder, set_aside, settle_folder
from pdvi._base.temporary import remove
from pdvi._base.types import PyTree
from pdvi.shards.manifest import ALIGNMENT, Leaf, Manifest, OtherFormat, decode, is_number

MANIFEST, HALO, ROWS = "manifest.json", "halo.npy", "rows.npy"


class Store:
    """A store that is there. Shards are dicts of arrays; `read` gives one of them.

    The sizes of all files are compared when it is opened, their content too with ``verify``.
    """

    def __init__(self, path: str | os.PathLike, *, verify: bool = True):
        self.path = Path(path)
        self._manifest = self._read_manifest()
        self.model: dict[str, Any] | None = self._manifest.model
        self.shard_bytes: int = self._manifest.shard_bytes
        self.checksums: list[int] = self._manifest.checksums
        for b in range(self.n_shards):  # before anything of a size that the manifest claims is made
            self._check_size(b)
        self.halo = self._numbers(HALO, self._manifest.halo)
        self._numbers(ROWS, self._manifest.rows)
        if verify:
            self.verify()

    @property
    def n_shards(self) -> int:
        """Return B, the number of shards."""
        return len(self.checksums)

    @property
    def rows(self) -> np.ndarray | None:
        """Return the row of the original data in each slot, (shards, slots), -1 where there is none."""
        return self._numbers(ROWS, self._manifest.rows)

    def read(self, b: int, *, check: bool = False) -> PyTree:
        """Return shard ``b``; with ``check``, its checksum is compared."""
        file = self._check_size(b)
        buffer = _aligned(self.shard_bytes)
        with open(file, "rb") as stream:
            size = stream.readinto(buffer)
        if size != self.shard_bytes:
            raise self._damage(file.name, f"it has {size} bytes instead of {self.shard_bytes}")
        if check and zlib.crc32(buffer) != self.checksums[b]:
            raise self._damage(file.name, "its checksum does not match")
        return {
            name: buffer[leaf.offset : leaf.offset + leaf.bytes].view(leaf.dtype).reshape(leaf.shape)
            for name, leaf in self._manifest.leaves.items()
        }

    def verify(self) -> None:
        """Compare every checksum: a damaged shard is named now, not felt as NaN after an hour."""
        for b in range(self.n_shards):
            self.read(b, check=True)

    def load(self) -> PyTree:
        """Return all shards in memory, stacked."""
        first = self.read(0)
        stacked = {name: np.empty((self.n_shards, *leaf.shape), leaf.dtype) for name, leaf in first.items()}
        for b in range(self.n_shards):
            for name, leaf in self.read(b).items():
                stacked[name][b] = leaf
        return stacked

    def _read_manifest(self) -> Manifest:
        if not (self.path / MANIFEST).exists():
            msg = f"no store at {str(self.path)!r}; give the path that pdvi.write_store wrote."
            aside = None if self.path.exists() else set_aside(resolved(self.path))
            if aside:
                msg = (
                    f"no store at {str(self.path)!r}: a process was killed while it replaced it; "
                    f"the one before is whole at {str(aside)!r}: rename it back, or write the store again."
                )
            raise FileNotFoundError(msg)
        self._size(MANIFEST)
        try:
            return decode((self.path / MANIFEST).read_bytes())
        except OtherFormat as error:
            msg = f"the store {str(self.path)!r} {error}; write it again."
            raise ValueError(msg) from None
        except ValueError as error:
            raise self._damage(MANIFEST, str(error)) from None

    def _check_size(self, b: int) -> Path:
        name = f"shard-{b:05d}.bin"
        size = self._size(name)
        if size != self.shard_bytes:
            raise self._damage(name, f"it has {size} bytes instead of {self.shard_bytes}")
        return self.path / name

    def _size(self, name: str) -> int:
        """Return the bytes of a file; a fifo or a device would be read for ever."""
        try:
            found = os.stat(self.path / name)
        except FileNotFoundError:
            raise self._damage(name, "it is missing") from None
        if not stat.S_ISREG(found.st_mode):
            raise self._damage(name, "it is not a regular file")
        return found.st_size

    def _numbers(self, name: str, checksum: int | None) -> np.ndarray | None:
        """Return the array in a file, a row of whole numbers per shard; None if there is no such file."""
        if checksum is None:
            return None
        self._size(name)
        if zlib.crc32((self.path / name).read_bytes()) != checksum:
            raise self._damage(name, "its checksum does not match")
        try:  # mapped, since that compares the claimed shape with the size of the file
            array = np.array(np.lib.format.open_memmap(self.path / name, mode="r"))
        except Exception as error:
            raise self._damage(name, f"it is not an array ({error})") from None
        if array.dtype.kind not in "iu" or array.ndim != 2 or len(array) != self.n_shards:
            raise self._damage(name, f"it has shape {array.shape} of {array.dtype}, not a row of integers per shard")
        return array

    def _damage(self, name: str, what: str) -> ValueError:
        msg = f"the store {str(self.path)!r} is damaged in {name!r}: {what}; write the store again."
        return ValueError(msg)


class StoreWriter:
    """Writes a store shard by shard, under a temporary name until it is whole.

    Files that end in ``.tmp`` are the caller's scratch, and not kept.

    with StoreWriter(path) as writer:
        for shard in shards:
            writer.add(shard)
        writer.finish(halo=halo, rows=rows, model=described(model))
    """

    def __init__(self, path: str | os.PathLike, *, overwrite: bool = False):
        self.path = Path(path)
        self._target = resolved(self.path)  # through links: where a link points to, there the store will be
        self._overwrite = overwrite
        self._check_free()
        if not self._target.parent.is_dir():
            folder = self._target.parent if self.path.is_symlink() else self.path.parent
            msg = f"`path` must be in a folder that exists, but {str(folder)!r} does not; create it first."
            raise ValueError(msg)
        if self.path.exists() and not (self.path / MANIFEST).exists():
            msg = f"`path` must be a store to be overwritten, but {str(self.path)!r} is none; choose another name."
            raise ValueError(msg)
        self.folder: Path
        self._checksums: list[int] = []
        self._leaves: dict[str, Leaf] = {}
        self._shard_bytes = 0

    def __enter__(self) -> StoreWriter:
        self.folder = begin_folder(self._target)
        return self

    def __exit__(self, *_: object) -> None:
        remove(self.folder)

    def add(self, shard: dict[str, Any]) -> None:
        """Write the next shard: a dict of arrays, of the same shapes as those before."""
        arrays = {name: np.asarray(leaf, order="C") for name, leaf in shard.items()}
        if not self._leaves:
            self._describe(arrays)
        number = len(self._checksums)
        found = {name: (leaf.dtype.str, list(leaf.shape)) for name, leaf in arrays.items()}
        wanted = {name: (leaf.dtype, list(leaf.shape)) for name, leaf in self._leaves.items()}
        if found != wanted:
            msg = f"all shards of a store must have the same arrays: shard {number} has {found}, shard 0 {wanted}."
            raise ValueError(msg)
        buffer = np.zeros(self._shard_bytes, np.uint8)
        for name, leaf in arrays.items():
            if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
                msg = f"`shards` must be finite: {name!r} of shard {number} has NaN or infinite values; impute them."
                raise ValueError(msg)
            place = self._leaves[name]
            buffer[place.offset : place.offset + place.bytes] = leaf.reshape(-1).view(np.uint8)
        buffer.tofile(self._new_file(f"shard-{number:05d}.bin"))
        self._checksums.append(zlib.crc32(buffer))

    def finish(self, *, halo: np.ndarray | None = None, rows: np.ndarray | None = None, model: Any = None) -> None:
        """Write the manifest, and give the store its name."""
        if not self._checksums:
            msg = "a store must have at least one shard, got none; add one first."
            raise ValueError(msg)
        manifest = Manifest(
            shard_bytes=self._shard_bytes,
            leaves=self._leaves,
            model=model,
            halo=self._save(HALO, halo),
            rows=self._save(ROWS, rows),
            checksums=self._checksums,
        )
        self._new_file(MANIFEST).write_bytes(manifest.encode())
        for scratch in self.folder.glob("*.tmp"):
            scratch.unlink()
        self._check_free()  # again: hours may have passed
        settle_folder(self.folder, self._target, replace=self._overwrite)

    def _check_free(self) -> None:
        if self.path.exists() and not self._overwrite:
            msg = f"`path` must not exist yet, but {str(self.path)!r} does; remove it, or give overwrite=True."
            raise ValueError(msg)

    def _describe(self, arrays: dict[str, np.ndarray]) -> None:
        for name, leaf in arrays.items():
            if not is_number(leaf.dtype.str):
                msg = f"`shards` must be of numbers, but {name!r} has type {leaf.dtype}; convert it."
                raise ValueError(msg)
            self._leaves[name] = Leaf(self._shard_bytes, leaf.nbytes, leaf.dtype.str, leaf.shape)
            self._shard_bytes += -(-leaf.nbytes // ALIGNMENT) * ALIGNMENT

    def _save(self, name: str, array: np.ndarray | None) -> int | None:
        if array is None:
            return None
        np.save(self._new_file(name), array)
        return zlib.crc32((self.folder / name).read_bytes())

    def _new_file(self, name: str) -> Path:
        create(self.folder / name)
        return self.folder / name


def _aligned(size: int) -> np.ndarray:
    """Bytes that begin at a multiple of the alignment."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    shift = -raw.ctypes.data % ALIGNMENT
    return raw[shift : shift + size]
