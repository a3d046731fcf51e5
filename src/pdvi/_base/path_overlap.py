"""One rule for the paths of a command: no file that is written may be one that is read, or another that is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from pdvi._base.atomic import resolved


class PathRole(NamedTuple):
    """A path of a command: the argument that gave it, and whether it is written.

    ``replaces`` is an input that this output may take the place of.
    """

    argument: str
    path: Path
    written: bool = False
    replaces: Path | None = None


def check_no_overlap(roles: Sequence[PathRole]) -> None:
    """Refuse paths of which one is, contains or lies in another, unless both are only read.

    Links, hard links, ``..`` and, on a file system that ignores it, case are seen through.
    """
    for one, other in combinations(roles, 2):
        if not (one.written or other.written):
            continue
        if _is_same(one.path, other.path):
            if one.path == other.replaces or other.path == one.replaces:
                continue
            relation = "is the same as"
        elif _is_within(one.path, other.path):
            relation = "lies in"
        elif _is_within(other.path, one.path):
            relation = "contains"
        else:
            continue
        msg = (
            f"{one.argument} {str(one.path)!r} {relation} {other.argument} {str(other.path)!r}, "
            "and one of them would be lost; give another path."
        )
        raise ValueError(msg)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # at least one of them does not exist
        return _name_when_new(one) == _name_when_new(other)


def _is_within(inner: Path, outer: Path) -> bool:
    return any(_is_same(folder, outer) for folder in resolved(inner).parents)


def _name_when_new(path: Path) -> tuple[Path, str]:
    """Return the folder and the name under which a file appears; where case is ignored, in lower case."""
    path = resolved(path)
    return path.parent, path.name.lower() if _ignores_case(path.parent) else path.name


def _ignores_case(folder: Path) -> bool:
    swapped = folder.parent / folder.name.swapcase()
    try:
        return swapped != folder and os.path.samefile(folder, swapped)
    except OSError:
        return False
