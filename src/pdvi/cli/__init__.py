"""The command line."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit; see `pdvi.cli.app`. Interrupted while it is imported, it leaves without a traceback."""
    if arguments is None:
        _spare_collections()
    try:
        from pdvi.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run(arguments)


def _spare_collections() -> None:
    """Look for garbage seldom, and not at all at the end: among what is imported, a million objects, there is none.

    It is a fifth of the time that imports take, and most of a second at the exit.
    """
    gc.set_threshold(100_000, 20, 20)
    atexit.register(gc.freeze)


__all__ = ["main"]
