"""The command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit; see `pdvi.cli.app`. Interrupted while it is imported, it leaves without a traceback."""
    try:
        from pdvi.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run(arguments)


__all__ = ["main"]
