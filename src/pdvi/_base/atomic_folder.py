"""Folders that appear under their name only when they are whole.

No call exchanges two folders everywhere, so one that is replaced is first set aside. A process that is killed between
the two renames leaves the name empty and both folders whole: `set_aside` finds the old one.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from pdvi._base.atomic import mode_of, sync, sync_folder
from pdvi._base.temporary import find, fresh_name, remove, remove_abandoned

OLD = "old"
TRIES = 100  # to be between the renames of other writers


def begin_folder(target: Path) -> Path:
    """Make an empty folder beside ``target``, to be filled and then given its name by `settle_folder`."""
    remove_abandoned(target)
    temporary = fresh_name(target)
    os.mkdir(temporary, 0o777 if mode_of(target) is None else 0o700)
    return temporary


def settle_folder(temporary: Path, target: Path, *, replace: bool) -> None:
    """Give a folder its name once the files in it are on disk; with ``replace``, one that has the name is removed."""
    for file in temporary.iterdir():
        sync(file)
    sync_folder(temporary)
    for last in [False] * TRIES + [True]:
        try:
            _rename(temporary, target, replace)
            break
        except OSError as error:
            others = error.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)
            if last or not replace or not others:
                raise
    sync_folder(target.parent)
    remove_abandoned(target, OLD)  # by a process that was killed; the name has a whole folder again


def set_aside(target: Path) -> Path | None:
    """Return the folder that had this name when a process was killed while it replaced it; None if there is none."""
    found = find(target, OLD, abandoned=False)
    return found[-1] if found else None


def _rename(temporary: Path, target: Path, replace: bool) -> None:
    mode = mode_of(target) if replace else None
    if mode is None:
        os.rename(temporary, target)
        return
    os.chmod(temporary, mode)
    aside = fresh_name(target, OLD)
    try:
        os.rename(target, aside)
        os.rename(temporary, target)
    except BaseException:
        if aside.exists() and not target.exists():
            os.rename(aside, target)
        raise
    finally:
        if target.exists():
            remove(aside)
