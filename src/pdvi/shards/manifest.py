"""The manifest of a store: what a shard looks like, and the checksums of everything, its own included.

The file may be damaged or made by somebody else, so every field is checked before it is used; what is wrong is a
ValueError that names the field.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

FORMAT = 2
ALIGNMENT = 64  # bytes, at which arrays can be used where they were read to
NUMBERS = "biufc"  # kinds of types that a shard may hold: numbers, never objects


class OtherFormat(ValueError):
    """The store was written by another version."""


@dataclass(frozen=True)
class Leaf:
    """Where in a shard's file an array is, and what it is."""

    offset: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json. ``halo``, ``rows`` and ``checksums`` are CRC-32 of files, None for no file."""

    shard_bytes: int
    leaves: dict[str, Leaf]
    model: dict[str, Any] | None
    halo: int | None
    rows: int | None
    checksums: list[int]

    def encode(self) -> bytes:
        """Return the file's content."""
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({**content, "manifest": _digest(content)}).encode()


def decode(file: bytes) -> Manifest:
    """Return what `Manifest.encode` wrote; a ValueError says what is wrong with it."""
    try:
        content = json.loads(file)
    except (ValueError, RecursionError) as error:
        msg = f"it is not JSON ({error})"
        raise ValueError(msg) from None
    _require(isinstance(content, dict), "it is not an object")
    found = content.pop("format", None)
    if found != FORMAT:  # before the checksum: another format may have another one
        msg = f"has format {found!r:.40}, this version reads {FORMAT}"
        raise OtherFormat(msg)
    expected = content.pop("manifest", None)
    _require(expected == _digest({"format": FORMAT, **content}), "its checksum does not match")
    names = {"shard_bytes", "leaves", "model", "halo", "rows", "checksums"}
    _require(set(content) == names, f"it must have the fields {sorted(names)}")
    _require(_whole(content["shard_bytes"]), "`shard_bytes` must be a whole number")
    _require(isinstance(content["leaves"], dict), "`leaves` must be an object")
    leaves = {name: _leaf(name, leaf, content["shard_bytes"]) for name, leaf in content["leaves"].items()}
    _check_model(content["model"])
    for name in ("halo", "rows"):
        _require(content[name] is None or _whole(content[name], 2**32), f"`{name}` must be a checksum or null")
    checksums = content["checksums"]
    _require(isinstance(checksums, list) and len(checksums) > 0, "`checksums` must have one entry per shard")
    _require(all(_whole(value, 2**32) for value in checksums), "`checksums` must be checksums")
    return Manifest(**{**content, "leaves": leaves})


def is_number(dtype: Any) -> bool:
    """Return whether this names a type of numbers."""
    try:
        return isinstance(dtype, str) and np.dtype(dtype).kind in NUMBERS
    except (TypeError, ValueError, SyntaxError):  # numpy parses what it does not know
        return False


def _leaf(name: str, leaf: Any, shard_bytes: int) -> Leaf:
    wanted = {"offset", "bytes", "dtype", "shape"}
    _require(isinstance(leaf, dict) and set(leaf) == wanted, f"leaf {name!r} must have {sorted(wanted)}")
    _require(_whole(leaf["offset"]) and _whole(leaf["bytes"]), f"leaf {name!r} must have whole offset and bytes")
    _require(is_number(leaf["dtype"]), f"leaf {name!r} must be of numbers, not {leaf['dtype']!r:.40}")
    shape = leaf["shape"]
    _require(isinstance(shape, list) and all(map(_whole, shape)), f"leaf {name!r} must have a shape of whole numbers")
    _require(math.prod(shape) * np.dtype(leaf["dtype"]).itemsize == leaf["bytes"], f"leaf {name!r} has another size")
    _require(leaf["offset"] % ALIGNMENT == 0, f"leaf {name!r} must begin at a multiple of {ALIGNMENT}")
    _require(leaf["offset"] + leaf["bytes"] <= shard_bytes, f"leaf {name!r} must lie within its shard")
    return Leaf(**{**leaf, "shape": tuple(shape)})


def _check_model(model: Any) -> None:
    if model is None:
        return
    _require(isinstance(model, dict) and set(model) == {"class", "fields"}, "`model` must have class and fields")
    name, fields = model["class"], model["fields"]
    public = isinstance(name, str) and name.isidentifier() and not name.startswith("_")
    _require(public, "`model` must name a class")
    _require(isinstance(fields, dict), "the fields of `model` must be an object")
    for field, value in fields.items():
        if isinstance(value, dict):
            array = set(value) == {"dtype", "values"} and is_number(value["dtype"])
            _require(array, f"{field!r} of `model` must be an array of numbers")


def _whole(value: Any, below: int = 2**63) -> bool:
    return type(value) is int and 0 <= value < below


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)


def _digest(content: dict[str, Any]) -> str:
    """Of what is read from the text, so that no other text with another meaning has it."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
