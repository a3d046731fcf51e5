"""Places to write to: checked before any work, and written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_path(path: str | os.PathLike[str]) -> Path:
    """A path that may be that of a file: no directory, and in one that exists."""
    path = Path(path)
    if path.is_dir():
        msg = f"cannot write {str(path)!r}: it is a directory; give a file name."
        raise ValueError(msg)
    if not path.parent.is_dir():
        msg = f"cannot write {str(path)!r}: the folder {str(path.parent)!r} does not exist; create it first."
        raise ValueError(msg)
    return path


def check_writable(path: str | os.PathLike[str]) -> Path:
    """A path that a file can be written to: found out by trying."""
    path = check_path(path)
    temporary = _temporary(path)
    try:
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        msg = f"cannot write {str(path)!r}: {error.strerror}; choose another place."
        raise ValueError(msg) from error
    return path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary name beside ``path``, which takes its place at the end; removed if something fails."""
    path = Path(path)
    temporary = _temporary(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _temporary(path: Path) -> Path:
    """One name, so that a killed run leaves at most one; with the same ending, since that tells the format."""
    return path.with_name(f".tmp-{path.name}")
