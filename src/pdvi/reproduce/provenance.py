"""Note which state of the source made the runs in a folder."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pdvi

FILE = "commits.txt"  # a line for each state that has made a run


def sign(folder: Path) -> None:
    """Note that a run in ``folder`` was made by this source."""
    if commit() not in commits(folder):
        with open(folder / FILE, "a", encoding="utf-8") as file:
            file.write(f"{commit()}\n")


def commits(folder: Path) -> list[str]:
    """Return the commits of all runs in ``folder``, the first one first."""
    path = folder / FILE
    return path.read_text(encoding="utf-8").split() if path.exists() else []


@cache
def commit() -> str:
    """Return the commit of the source tree, with a plus if files differ; the version where there is no tree."""
    source = Path(pdvi.__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", source, *arguments], capture_output=True, text=True, check=True).stdout

    try:
        if Path(git("rev-parse", "--show-toplevel").strip()) / "src" / "pdvi" != source.resolve():
            return version("pdvi")
        return git("rev-parse", "--short", "HEAD").strip() + ("+" if git("status", "--porcelain", ".").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return version("pdvi")
