"""The command line."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit; see `pdvi.cli.app`. Interrupted while it is imported, it leaves without a traceback."""
    if arguments is None:
        # Among a million objects that are imported there is no garbage. Looking for it takes a fifth of the time of
        # imports, and most of a second at the exit.
        gc.set_threshold(100_000, 20, 20)
        atexit.register(gc.freeze)
    try:
        from pdvi.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run(arguments)


__all__ = ["main"]
