"""Folders in which a long command keeps its intermediate files, and removes them, and nothing else.

The folder has a list of the files that this library wrote there. A name is added to the list before its file is
created, and only files on the list are ever overwritten or deleted. A folder without a list belongs to somebody else.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from pdvi._base.atomic import create
from pdvi._base.atomic_folder import begin_folder
from pdvi._base.temporary import remove, remove_abandoned

FILE_LIST, LOCK = "pdvi-files.txt", "lock"


class WorkDir:
    """A folder of intermediate files that this library owns; it is created if it does not exist, an empty one is taken.

    A link, a file, or a folder with files but without the list of this library is a ValueError.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        check_work_dir(self.path)
        if not _has_list(self.path):
            _create(self.path)
        self._names = set(self._read())

    def new_file(self, name: str) -> Path:
        """Return the path for a new file or folder of this library; an older one of the same name is removed."""
        path = self.file(name)
        self.remove(name)
        return path

    def file(self, name: str) -> Path:
        """Return the path of a file or folder of this library, which may exist; its name is put on the list."""
        path = self.path / name
        if name not in self._names:
            if os.path.lexists(path):
                msg = f"{str(path)!r} was not written by pdvi; move it elsewhere, or give another output."
                raise ValueError(msg)
            with open(self.path / FILE_LIST, "a") as file:
                file.write(json.dumps(name) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self._names.add(name)
        return path

    def names(self) -> set[str]:
        """Return the names on the list, of files that exist or did."""
        return set(self._names)

    def remove(self, name: str) -> None:
        """Remove a file of this library, if it exists; files that are not on the list stay."""
        if name in self._names:
            remove_abandoned(self.path / name)
            remove(self.path / name)

    def remove_all(self) -> None:
        """Remove all files of this library, and the folder if nothing else is in it."""
        for name in self._names:
            self.remove(name)
        remove(self.path / FILE_LIST)
        with suppress(OSError):  # it has files of somebody else, which stay
            self.path.rmdir()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for this process alone; a second process gets an error."""
        try:
            with FileLock(self.path / LOCK, blocking=False):
                yield
        except Timeout:
            msg = f"another process works in {str(self.path)!r}; wait for it, or give another output."
            raise ValueError(msg) from None

    def _read(self) -> Iterator[str]:
        for line in (self.path / FILE_LIST).read_text().splitlines():
            with suppress(ValueError):  # the last line, if the process was killed while it wrote it
                name = json.loads(line)
                if isinstance(name, str) and name not in (".", "..") and Path(name).name == name:
                    yield name


def check_work_dir(path: Path) -> None:
    """Refuse a folder that is not this library's: a link, a file, or a folder with files and without a list."""
    if path.is_symlink():
        why = "it is a link"
    elif not path.exists() or _has_list(path):
        return
    elif not path.is_dir():
        why = "it is not a folder"
    elif any(path.iterdir()):
        why = "it is a folder with files that pdvi did not write"
    else:
        return
    msg = f"cannot keep intermediate files in {str(path)!r}: {why}; move it elsewhere, or give another output."
    raise ValueError(msg)


def _has_list(path: Path) -> bool:
    return (path / FILE_LIST).is_file() and not (path / FILE_LIST).is_symlink()


def _create(path: Path) -> None:
    """Make the folder with its list in one step: it takes the place of an empty folder, and of no other."""
    temporary = begin_folder(path)
    try:
        create(temporary / FILE_LIST)
        (temporary / FILE_LIST).write_text(json.dumps(LOCK) + "\n")
        os.rename(temporary, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        check_work_dir(path)  # another process may have made the same folder meanwhile
    finally:
        remove(temporary)
