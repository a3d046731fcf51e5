"""The command line."""

from pdvi.cli.app import main

__all__ = ["main"]
