"""Shards on disk: a folder with one file per shard, a manifest, and a checksum of each.

    slide.pdvi/
      manifest.json      the leaves of a shard (where in the file, type, shape), the model, the checksums
      halo.npy           the rows of other shards that each shard reads, if shards touch
      rows.npy           which row of the original data lies in which slot, if the writer told
      shard-00000.bin    all leaves of shard 0, one after the other
      ...

All shards have the same shapes, so one description serves all and a shard is one read. A store appears under its
name only when it is whole. Nothing in it is code.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

PyTree = Any
FORMAT = 1
ALIGNMENT = 64  # bytes, at which arrays can be used where they were read to
MANIFEST, HALO, ROWS = "manifest.json", "halo.npy", "rows.npy"


class Store:
    """A store that is there. Shards are dicts of arrays; `read` gives one of them."""

    def __init__(self, path: str | os.PathLike, *, verify: bool = True):
        self.path = Path(path)
        try:
            manifest = json.loads((self.path / MANIFEST).read_text())
        except FileNotFoundError:
            msg = f"no store at {str(self.path)!r}; give the path that pdvi.write_store wrote."
            raise FileNotFoundError(msg) from None
        except json.JSONDecodeError as error:
            msg = f"the store {str(self.path)!r} is damaged: {MANIFEST} is not JSON ({error.msg}); write it again."
            raise ValueError(msg) from error
        if manifest.get("format") != FORMAT:
            msg = f"the store {str(self.path)!r} has format {manifest.get('format')}, this version reads {FORMAT}."
            raise ValueError(msg)
        self.checksums: list[int] = manifest["checksums"]
        self.model: dict[str, Any] | None = manifest["model"]
        self.shard_bytes: int = manifest["shard_bytes"]
        self._leaves: dict[str, dict[str, Any]] = manifest["leaves"]
        self._check_file(HALO, manifest["halo"])
        self._check_file(ROWS, manifest["rows"])
        self.halo = np.load(self.path / HALO) if manifest["halo"] is not None else None
        if verify:
            self.verify()

    @property
    def n_shards(self) -> int:
        """B, the number of shards."""
        return len(self.checksums)

    @property
    def rows(self) -> np.ndarray | None:
        """The row of the original data in each slot, (shards, slots), -1 where there is none."""
        return np.load(self.path / ROWS) if (self.path / ROWS).exists() else None

    def read(self, b: int, *, check: bool = False) -> PyTree:
        """Shard ``b``; with ``check``, its checksum is compared."""
        buffer = _aligned(self.shard_bytes)
        file = self._file(b)
        try:
            with open(file, "rb", buffering=0) as stream:
                size = _fill(stream, buffer)
        except FileNotFoundError:
            raise self._damage(file.name, "it is missing") from None
        if size != self.shard_bytes or file.stat().st_size != self.shard_bytes:
            raise self._damage(file.name, f"it has {file.stat().st_size} bytes instead of {self.shard_bytes}")
        if check and zlib.crc32(buffer) != self.checksums[b]:
            raise self._damage(file.name, "its checksum does not match")
        return {
            name: buffer[leaf["offset"] : leaf["offset"] + leaf["bytes"]].view(leaf["dtype"]).reshape(leaf["shape"])
            for name, leaf in self._leaves.items()
        }

    def verify(self) -> None:
        """Compare every checksum: a damaged shard is named now, not felt as NaN after an hour."""
        for b in range(self.n_shards):
            self.read(b, check=True)

    def load(self) -> PyTree:
        """All shards in memory, stacked."""
        first = self.read(0)
        stacked = {name: np.empty((self.n_shards, *leaf.shape), leaf.dtype) for name, leaf in first.items()}
        for b in range(self.n_shards):
            for name, leaf in self.read(b).items():
                stacked[name][b] = leaf
        return stacked

    def _file(self, b: int) -> Path:
        return self.path / f"shard-{b:05d}.bin"

    def _check_file(self, name: str, checksum: int | None) -> None:
        if checksum is None:
            return
        if not (self.path / name).exists():
            raise self._damage(name, "it is missing")
        if zlib.crc32((self.path / name).read_bytes()) != checksum:
            raise self._damage(name, "its checksum does not match")

    def _damage(self, name: str, what: str) -> ValueError:
        msg = f"the store {str(self.path)!r} is damaged in {name!r}: {what}; write the store again."
        return ValueError(msg)


class StoreWriter:
    """Writes a store shard by shard, under a temporary name until it is whole.

    with StoreWriter(path) as writer:
        for shard in shards:
            writer.add(shard)
        writer.finish(halo=halo, rows=rows, model=describe_model(model))
    """

    def __init__(self, path: str | os.PathLike, *, overwrite: bool = False):
        self.path = Path(path)
        if self.path.exists() and not overwrite:
            msg = f"`path` must not exist yet, but {str(self.path)!r} does; remove it, or give overwrite=True."
            raise ValueError(msg)
        if not self.path.parent.is_dir():
            msg = f"`path` must be in a folder that exists, but {str(self.path.parent)!r} does not; create it first."
            raise ValueError(msg)
        if self.path.exists() and not (self.path / MANIFEST).exists():
            msg = f"`path` must be a store to be overwritten, but {str(self.path)!r} is none; choose another name."
            raise ValueError(msg)
        self.folder = self.path.with_name(f".tmp-{self.path.name}")  # one name: a killed writer leaves at most one
        self._checksums: list[int] = []
        self._leaves: dict[str, dict[str, Any]] = {}
        self._shard_bytes = 0

    def __enter__(self) -> StoreWriter:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, shard: dict[str, Any]) -> None:
        """Write the next shard: a dict of arrays, of the same shapes as those before."""
        arrays = {name: np.asarray(leaf, order="C") for name, leaf in shard.items()}
        if not self._leaves:
            self._describe(arrays)
        number = len(self._checksums)
        found = {name: (leaf.dtype.str, list(leaf.shape)) for name, leaf in arrays.items()}
        wanted = {name: (leaf["dtype"], leaf["shape"]) for name, leaf in self._leaves.items()}
        if found != wanted:
            msg = f"all shards of a store must have the same arrays: shard {number} has {found}, shard 0 {wanted}."
            raise ValueError(msg)
        buffer = np.zeros(self._shard_bytes, np.uint8)
        for name, leaf in arrays.items():
            if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
                msg = f"`shards` must be finite: {name!r} of shard {number} has NaN or infinite values; impute them."
                raise ValueError(msg)
            place = self._leaves[name]
            buffer[place["offset"] : place["offset"] + place["bytes"]] = leaf.reshape(-1).view(np.uint8)
        buffer.tofile(self.folder / f"shard-{number:05d}.bin")
        self._checksums.append(zlib.crc32(buffer))

    def finish(self, *, halo: np.ndarray | None = None, rows: np.ndarray | None = None, model: Any = None) -> None:
        """Write the manifest, and give the store its name."""
        manifest = {
            "format": FORMAT,
            "shard_bytes": self._shard_bytes,
            "leaves": self._leaves,
            "model": model,
            "halo": self._save(HALO, halo),
            "rows": self._save(ROWS, rows),
            "checksums": self._checksums,
        }
        (self.folder / MANIFEST).write_text(json.dumps(manifest))
        shutil.rmtree(self.path, ignore_errors=True)
        os.replace(self.folder, self.path)

    def _describe(self, arrays: dict[str, np.ndarray]) -> None:
        for name, leaf in arrays.items():
            place = {"offset": self._shard_bytes, "bytes": leaf.nbytes, "dtype": leaf.dtype.str}
            self._leaves[name] = {**place, "shape": list(leaf.shape)}
            self._shard_bytes += -(-leaf.nbytes // ALIGNMENT) * ALIGNMENT

    def _save(self, name: str, array: np.ndarray | None) -> int | None:
        if array is None:
            return None
        np.save(self.folder / name, array)
        return zlib.crc32((self.folder / name).read_bytes())


def describe_model(model: Any) -> dict[str, Any] | None:
    """A model of this library as JSON; None for any other, which has to be given again when the store is opened."""
    kind = type(model)
    if not kind.__module__.startswith("pdvi.models"):
        return None
    fields = {}
    for name, value in vars(model).items():
        if isinstance(value, jax.Array | np.ndarray):
            fields[name] = {"dtype": np.asarray(value).dtype.str, "values": np.asarray(value).tolist()}
        else:
            fields[name] = value
    return {"class": kind.__name__, "fields": fields}


def rebuild_fields(described: dict[str, Any]) -> dict[str, Any]:
    """The arguments that make a described model."""
    return {
        name: np.asarray(value["values"], value["dtype"]) if isinstance(value, dict) else value
        for name, value in described["fields"].items()
    }


def _aligned(size: int) -> np.ndarray:
    """Bytes that begin at a multiple of the alignment."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    shift = -raw.ctypes.data % ALIGNMENT
    return raw[shift : shift + size]


def _fill(stream: Any, buffer: np.ndarray) -> int:
    """Read until the buffer is full or the file ends (one call reads at most 2 GB)."""
    view, done = memoryview(buffer), 0
    while done < len(buffer) and (got := stream.readinto(view[done:])):
        done += got
    return done
