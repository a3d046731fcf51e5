"""How a result is kept: one file, a zip archive that zarr can open, with a checksum over every byte of it.

    zarr.json                     the group; its attribute "pdvi" says in JSON what the arrays are
    global/0/zarr.json, .../c/0   an array: zarr's description, and the numbers as they are, in one piece
    ...
    the archive's comment         "pdvi result 2 sha256 ", and 64 digits: the checksum of all bytes before them

Nothing in the file is code. It is read without trust: first the checksum, then the sizes (an array takes no more
memory than it has bytes in the file), then the content; whatever is wrong is one ValueError.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
import pandas as pd

from pdvi._base.atomic import check_path, replacing
from pdvi._base.checks import instance, one_of
from pdvi._base.types import PyTree

FORMAT = 2
DIGITS = 64  # of the checksum
COMMENT = b"pdvi result %d sha256 "
WHOLE = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
TYPES = ["bool", *WHOLE, "float16", "float32", "float64", "complex64", "complex128"]  # named alike by zarr and numpy
Arrays = dict[str, np.ndarray]
Fields = dict[str, Any]  # those of `pdvi.Result`, the status by its name


def write_result(result: Fields, path: str | os.PathLike[str]) -> None:
    """Write the fields of a result, whole or not at all."""
    path = check_path(path)
    structure, leaves = _describe(result["local_params"])
    numbers = result["trace"].drop(columns="event")
    parts: dict[str, Iterable[Any]] = {
        "global": result["global_params"].values(),
        "local": leaves,
        "state": result["state"].values(),
        "trace": [numbers[name].to_numpy() for name in numbers],
    }
    arrays = {f"{part}/{i}": _plain(part, value) for part, values in parts.items() for i, value in enumerate(values)}
    meta = {
        "format": FORMAT,
        "arrays": {name: [array.dtype.name, array.shape] for name, array in arrays.items()},
        "blocks": list(result["global_params"]),
        "local": structure,
        "state": list(result["state"]),
        "columns": list(numbers),
        "events": result["trace"]["event"].tolist(),
        "status": result["status"],
        "n_steps": result["n_steps"],
        "seed": result["seed"],
        "batch_size": result["batch_size"],
        "solver": result["solver"],
        "data": result["data"],
    }
    try:
        text = json.dumps(meta)
    except (TypeError, ValueError) as error:
        msg = f"a result must be described by JSON to be saved ({error}); give plain numbers, texts, lists and dicts."
        raise ValueError(msg) from None
    with replacing(path) as temporary:
        _write(temporary, list(parts), arrays, text)


def read_result(path: str | os.PathLike[str], statuses: Collection[str]) -> Fields:
    """Read what `write_result` wrote; the status must be one of ``statuses``."""
    path = Path(path)
    if not path.is_file():
        msg = f"no result file at {str(path)!r}; give the path that was saved."
        raise FileNotFoundError(msg)
    try:
        with open(path, "rb") as file:
            found = _format(file)
            if found == FORMAT:
                return _read(file, statuses)
    except MemoryError:
        raise
    except Exception as error:  # a file that somebody made can make a parser raise anything
        msg = f"{str(path)!r} is not a pdvi result file, or it is damaged ({error}); save it again."
        raise ValueError(msg) from error
    age = "an older" if found < FORMAT else "a newer"
    msg = f"{str(path)!r} has format {found}, written by {age} pdvi, this version reads {FORMAT}; run it again."
    raise ValueError(msg)


def _write(path: Path, groups: list[str], arrays: Arrays, meta: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        _add(archive, "zarr.json", {**_GROUP, "attributes": {"pdvi": meta}})
        for group in groups:
            _add(archive, f"{group}/zarr.json", _GROUP)
        for name, array in arrays.items():
            _add(archive, f"{name}/zarr.json", _zarr_array(array))
            if array.size:  # zarr, too, has no chunk where there is nothing
                _add(archive, _chunk(name, array.ndim), array.reshape(-1).view(np.uint8).data)
        archive.comment = COMMENT % FORMAT + b"0" * DIGITS
    with open(path, "r+b") as file:
        digest = _digest(file)
        file.seek(-DIGITS, os.SEEK_END)
        file.write(digest)


def _add(archive: zipfile.ZipFile, name: str, content: dict[str, Any] | memoryview) -> None:
    member = zipfile.ZipInfo(name)  # without the time: the same result is the same bytes
    member.external_attr = 0o644 << 16
    archive.writestr(member, json.dumps(content) if isinstance(content, dict) else content)


def _read(file: BinaryIO, statuses: Collection[str]) -> Fields:
    with zipfile.ZipFile(file) as archive:
        meta = _meta(archive)
        claimed = {name: (_known(dtype), tuple(map(_whole, shape))) for name, (dtype, shape) in meta["arrays"].items()}
        _check_sizes(archive, claimed, os.fstat(file.fileno()).st_size)
        arrays = {
            name: np.frombuffer(archive.read(_chunk(name, len(shape))), dtype).reshape(shape).copy()
            if math.prod(shape)
            else np.empty(shape, dtype)
            for name, (dtype, shape) in claimed.items()
        }
    return {
        "global_params": _named("global", meta, "blocks", arrays),
        "local_params": _rebuild(meta["local"], arrays),
        "trace": _trace(meta, arrays),
        "status": one_of("status", meta["status"], statuses),
        "n_steps": _whole(meta["n_steps"]),
        "seed": _whole(meta["seed"]),
        "batch_size": _whole(meta["batch_size"]),
        "solver": instance("solver", meta["solver"], (dict, str), "settings"),
        "state": _named("state", meta, "state", arrays),
        "data": instance("data", meta["data"], str, "a text"),
    }


def _trace(meta: dict[str, Any], arrays: Arrays) -> pd.DataFrame:
    trace = pd.DataFrame(_named("trace", meta, "columns", arrays))
    events = meta["events"]
    if not (isinstance(events, list) and len(events) == len(trace) and all(isinstance(text, str) for text in events)):
        msg = f"`events` must be {len(trace)} texts"
        raise ValueError(msg)
    trace["event"] = pd.Series(events, dtype=object)
    return trace


def _named(part: str, meta: dict[str, Any], key: str, arrays: Arrays) -> Arrays:
    """Return the arrays of one part by their names, which the description lists under ``key``."""
    names = meta[key]
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names) and len(set(names)) == len(names)):
        msg = f"`{key}` must be texts, each once"
        raise ValueError(msg)
    found = [name for name in arrays if name.startswith(f"{part}/")]
    if len(found) != len(names):
        msg = f"{part} has {len(found)} arrays for {names}"
        raise ValueError(msg)
    return {name: arrays[f"{part}/{i}"] for i, name in enumerate(names)}


def _check_sizes(
    archive: zipfile.ZipFile, claimed: dict[str, tuple[np.dtype, tuple[int, ...]]], available: int
) -> None:
    """Compare what the arrays claim with what is there, before memory is taken; members might overlap."""
    total = 0
    for name, (dtype, shape) in claimed.items():
        size = math.prod(shape) * dtype.itemsize
        total += size
        if size:
            member = archive.getinfo(_chunk(name, len(shape)))
            if member.compress_type != zipfile.ZIP_STORED or not member.file_size == member.compress_size == size:
                msg = f"{name} has {member.compress_size} bytes instead of {size}"
                raise ValueError(msg)
    if total > available:
        msg = f"its arrays claim {total} bytes, the file has {available}"
        raise ValueError(msg)


def _format(file: BinaryIO) -> int:
    """Return the format of a result file, its checksum compared if it has one."""
    tail = len(COMMENT % FORMAT) + 8 + DIGITS  # formats of up to nine digits
    file.seek(max(0, file.seek(0, os.SEEK_END) - tail))
    match = re.search(rb"pdvi result (\d{1,9}) sha256 ([0-9a-f]{64})\Z", file.read())
    if match is None:  # format 1 had no checksum
        with zipfile.ZipFile(file) as archive:
            if _meta(archive)["format"] == 1:
                return 1
        msg = "it has no checksum"
        raise ValueError(msg)
    if _digest(file) != match[2]:
        msg = "its checksum does not match"
        raise ValueError(msg)
    return int(match[1])


def _digest(file: BinaryIO) -> bytes:
    """Return the checksum of all bytes but the last ones, where it stands."""
    left = file.seek(0, os.SEEK_END) - DIGITS
    file.seek(0)
    found = hashlib.sha256()
    while left > 0 and (piece := file.read(min(left, 1 << 20))):
        found.update(piece)
        left -= len(piece)
    return found.hexdigest().encode()


def _meta(archive: zipfile.ZipFile) -> dict[str, Any]:
    member = archive.getinfo("zarr.json")
    if member.compress_type != zipfile.ZIP_STORED:
        msg = "its description is compressed"
        raise ValueError(msg)
    return json.loads(json.loads(archive.read(member))["attributes"]["pdvi"])


_GROUP: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {}}


def _zarr_array(array: np.ndarray) -> dict[str, Any]:
    """Return zarr's description of an array in one uncompressed chunk."""
    zero: Any = {"b": False, "c": [0.0, 0.0], "f": 0.0}.get(array.dtype.kind, 0)
    endian = {} if array.dtype.itemsize == 1 else {"configuration": {"endian": "little"}}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": array.shape,
        "data_type": array.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(1, n) for n in array.shape]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": zero,
        "codecs": [{"name": "bytes", **endian}],
        "attributes": {},
    }


def _chunk(name: str, dimensions: int) -> str:
    return "/".join([name, "c", *["0"] * dimensions])


def _plain(part: str, value: Any) -> np.ndarray:
    """Return an array as it is stored: C order, the lowest byte first."""
    array = np.asarray(value, order="C")
    if array.dtype.name not in TYPES:
        msg = f"arrays must be of numbers to be saved, got one of {array.dtype} in {part!r}; convert it."
        raise ValueError(msg)
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _known(dtype: Any) -> np.dtype:
    if dtype not in TYPES:
        msg = f"an array has the type {dtype!r:.40}"
        raise ValueError(msg)
    return np.dtype(dtype).newbyteorder("<")


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        msg = f"a whole number is {value!r:.40}"
        raise ValueError(msg)
    return value


def _describe(tree: PyTree) -> tuple[Any, list[np.ndarray]]:
    """A pytree as JSON with leaf numbers, and its leaves. A NamedTuple is kept as a plain tuple."""
    leaves: list[np.ndarray] = []

    def visit(node: Any) -> Any:
        if isinstance(node, dict):
            if not all(isinstance(key, str) for key in node):
                msg = f"local variables in a dict must have text keys to be saved, got {list(node)}."
                raise ValueError(msg)
            return {"dict": {key: visit(value) for key, value in node.items()}}
        if isinstance(node, list | tuple):
            return {"list" if isinstance(node, list) else "tuple": [visit(value) for value in node]}
        if node is None:
            return None
        if not isinstance(node, np.ndarray | jax.Array | np.generic):
            msg = f"local variables must be dicts, lists, tuples and arrays to be saved, got {type(node)}."
            raise ValueError(msg)
        leaves.append(np.asarray(node))
        return len(leaves) - 1

    return visit(tree), leaves


def _rebuild(structure: Any, arrays: Arrays) -> PyTree:
    if structure is None or isinstance(structure, int):
        return None if structure is None else arrays[f"local/{structure}"]
    (kind, content), *_ = structure.items()
    if kind == "dict":
        return {key: _rebuild(value, arrays) for key, value in content.items()}
    items = [_rebuild(value, arrays) for value in content]
    return items if kind == "list" else tuple(items)
