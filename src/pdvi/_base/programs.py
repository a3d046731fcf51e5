"""Programs as JAX has traced them, kept for the next process beside what XLA has compiled (`keep_compiled`).

To trace and lower a program takes longer than to run it. So the traced program is kept under a name made of all that it
depends on: this library's source, the versions of JAX and of what it is built with, shapes, types, settings.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp

from pdvi._base.atomic import replacing
from pdvi._base.compiled import TRACED, own_folder
from pdvi._base.types import PyTree

MOST = 200  # files; those that were not used for longest go
MARK = b"pdvi traced 1\n"
BUILT_WITH = ("jax", "jaxlib", "equinox", "numpy")

_ready: dict[Hashable, Callable[..., PyTree]] = {}
_lock = Lock()


def run(
    function: Callable[[Any, Any], PyTree],
    fixed: Hashable,
    arguments: PyTree,
    options: dict[str, Any],
    *,
    keep: bool = True,
) -> PyTree:
    """Return ``function(fixed, arguments)``, compiled with ``options`` of `jax.jit`.

    All leaves of the arguments are arrays. What is returned is made of tuples, lists, dicts and arrays: nothing else is
    known to a process that has not traced the function. ``fixed`` is told apart by its ``repr``, from file to file.
    ``keep`` False: for this process only, since it depends on source that is not this library's.
    """
    leaves, structure = jax.tree.flatten(arguments)
    shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    working = str(jnp.result_type(float))  # single precision, or double
    folder = own_folder() if keep else None
    key = function, fixed, structure, shapes, working, folder, repr(options)
    # results of kept programs carry a mesh: given back as they are, they would compile the next one again
    leaves = jax.device_put(leaves, jax.local_devices()[0])
    with _lock:  # tracing and lowering is Python's work: two threads would only be in each other's way
        call = _ready.get(key)
        if call is None:

            def flat(*leaves: Any) -> PyTree:
                return function(fixed, jax.tree.unflatten(structure, leaves))

            told = (function.__module__, function.__qualname__, fixed, str(structure), shapes, working)
            traced = flat if folder is None else _kept(flat, leaves, folder / TRACED / _name(told))
            call = _ready[key] = _CompiledOnce(jax.jit(traced, **options).lower(*leaves))
    return call(*leaves)


class _CompiledOnce:
    """A lowered function that is compiled by the first thread that calls it, while others may lower theirs."""

    def __init__(self, lowered: Any):
        self._lowered, self._lock = lowered, Lock()

    def __call__(self, *leaves: Any) -> PyTree:
        """Return what the function returns."""
        with self._lock:
            if self._lowered is not None:
                self._compiled, self._lowered = self._lowered.compile(), None
        return self._compiled(*leaves)


def _kept(flat: Callable[..., PyTree], leaves: list[Any], path: Path) -> Callable[..., PyTree]:
    """Return the function as it was traced by an earlier process, or else keep it for a later one."""
    from jax import export

    try:
        payload = _read(path)
        if payload is None:
            payload = bytes(export.export(jax.jit(flat))(*leaves).serialize())
            with suppress(OSError, ValueError):  # a folder that cannot be written
                _write(path, payload)
        return export.deserialize(bytearray(payload)).call
    except Exception:  # whatever a version of JAX raises: this is about time alone
        return flat


def _name(told: object) -> str:
    return hashlib.sha256(repr((_built(), told)).encode()).hexdigest()


@cache
def _built() -> str:
    """A checksum of this library's source and of the versions that it is run with."""
    code = hashlib.sha256(repr([version(name) for name in BUILT_WITH]).encode())
    code.update(jax.default_backend().encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(path.read_bytes())
    return code.hexdigest()


def _read(path: Path) -> bytes | None:
    with suppress(OSError):
        found = path.read_bytes()
        head = len(MARK) + hashlib.sha256().digest_size
        if found[:head] == MARK + hashlib.sha256(found[head:]).digest():
            os.utime(path)
            return found[head:]
    return None


def _write(path: Path, payload: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(MARK + hashlib.sha256(payload).digest() + payload)
    files = sorted(path.parent.iterdir(), key=lambda file: -file.stat().st_mtime)
    for old in files[MOST:]:
        old.unlink(missing_ok=True)
