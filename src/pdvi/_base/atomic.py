"""Places to write to: checked before any work, and written whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pdvi._base.temporary import fresh_name, remove, remove_abandoned

KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
}


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` if it may be that of a file: nothing but a regular file is there, and its folder exists."""
    path = Path(path)
    target = resolved(path)
    with suppress(FileNotFoundError, NotADirectoryError):
        kind = KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
        if kind:
            msg = f"cannot write {str(path)!r}: it is {kind}; give a file name."
            raise ValueError(msg)
    if not target.parent.is_dir():
        shown = target.parent if path.is_symlink() else path.parent
        msg = f"cannot write {str(path)!r}: the folder {str(shown)!r} does not exist; create it first."
        raise ValueError(msg)
    return path


def check_writable(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` if a file can be written there: found out by trying."""
    path = check_path(path)
    temporary = fresh_name(resolved(path))
    try:
        create(temporary)
        temporary.unlink()
    except OSError as error:
        msg = f"cannot write {str(path)!r}: {error.strerror}; choose another place."
        raise ValueError(msg) from error
    return path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a name to write to, which takes the place of ``path`` at the end; what is there is removed on failure.

    The name has the ending of ``path``, since that tells the format. A link is followed: what it points to is
    replaced, not the link. A file that is replaced leaves its mode to the new one.
    """
    path = check_path(path)
    target = resolved(path)
    remove_abandoned(target)
    temporary = fresh_name(target, suffix=path.suffix)
    try:
        # what others may not read yet they may not read half-written either
        create(temporary, 0o666 if mode_of(target) is None else 0o600)
        yield temporary
        _settle(temporary, target)
    except BaseException:
        remove(temporary)
        raise


def resolved(path: Path) -> Path:
    """Return where ``path`` leads, through all links; also if nothing is there yet."""
    try:
        return Path(os.path.realpath(path, strict=True))
    except (FileNotFoundError, NotADirectoryError):
        return Path(os.path.realpath(path))
    except OSError as error:  # links that go round in circles; folders that may not be entered
        msg = f"cannot write {str(path)!r}: {error.strerror}; choose another place."
        raise ValueError(msg) from error


def create(path: Path, mode: int = 0o666) -> None:
    """Make an empty file that was not there: neither a file nor a link that somebody planted is opened."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY, mode))


def mode_of(path: Path) -> int | None:
    """Return the permissions of the file or folder that is there, None if there is none (a link has no own)."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    return None if stat.S_ISLNK(mode) else mode & 0o777


def sync(path: Path) -> None:
    """Wait until a file is on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk, where the file system can."""
    with suppress(OSError):  # some network file systems cannot; every name leads to something whole all the same
        sync(folder)


def _settle(temporary: Path, target: Path) -> None:
    """Give a file its name once its content is on disk."""
    descriptor = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        written = os.fstat(descriptor)
        if not stat.S_ISREG(written.st_mode) or written.st_nlink != 1:
            msg = f"cannot write {str(target)!r}: somebody exchanged the temporary file."
            raise ValueError(msg)
        mode = mode_of(check_path(target))  # again: hours may have passed
        if mode is not None:
            os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, target)
    sync_folder(target.parent)
