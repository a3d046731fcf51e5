"""Names beside a target for what is not whole yet, and the removal of what killed processes left under such names.

A name says which process works under it: its machine (boot, and namespace of process numbers), number and start, so
that a later process can tell whether it still lives. What came from another machine, boot or container is left alone.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

LONGEST = 40  # characters of the target's name, and of its ending: names have at most 255 bytes
UNKNOWN = "0"  # when a process started, where the system does not tell


def fresh_name(target: Path, kind: str = "tmp", suffix: str = "") -> Path:
    """Return a name beside ``target`` that is nobody's."""
    pid = os.getpid()
    owner = f"{_place()}-{pid}-{_started(pid)}-{secrets.token_hex(8)}"
    return target.with_name(f".{kind}-{target.name[:LONGEST]}-{owner}{suffix if len(suffix) <= LONGEST else ''}")


def find(target: Path, kind: str = "tmp", *, abandoned: bool) -> list[Path]:
    """Return what is beside ``target`` under such names, newest last; ``abandoned``: only if the owner is gone."""
    owner = r"([0-9a-f]{8})-(\d{1,9})-(\d{1,20})-[0-9a-f]{16}(\..*)?"
    pattern = re.compile(re.escape(f".{kind}-{target.name[:LONGEST]}-") + owner)
    place, found = _place(), []
    with suppress(OSError), os.scandir(target.parent) as entries:  # a folder may be writable and yet hide its names
        for entry in entries:
            match = pattern.fullmatch(entry.name)
            if match and (not abandoned or (match[1] == place and _is_gone(int(match[2]), match[3]))):
                found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
    return [target.with_name(name) for _, name in sorted(found)]


def remove_abandoned(target: Path, kind: str = "tmp") -> None:
    """Remove what processes that no longer exist left beside ``target``, as far as this one may."""
    for path in find(target, kind, abandoned=True):
        remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link (not what it points to) or a folder, if possible."""
    try:
        path.unlink()
    except OSError:
        shutil.rmtree(path, ignore_errors=True)  # follows no links


def _place() -> str:
    """What process numbers are valid in: this boot of this machine, this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = platform.node()
    return hashlib.sha256(boot.encode()).hexdigest()[:8]


def _started(pid: int) -> str | None:
    """When a process began, in the system's ticks; None if there is no such process."""
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return None
    except OSError:
        pass  # it is there, and not ours
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError, UnicodeDecodeError):
        return UNKNOWN


def _is_gone(pid: int, started: str) -> bool:
    now = _started(pid)
    return now is None or (UNKNOWN not in (now, started) and now != started)
