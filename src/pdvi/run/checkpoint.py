"""Keeping a run while it lasts."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pdvi._base.atomic import check_path
from pdvi._base.checks import instance
from pdvi.core.result import Result


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written; the one before is still there."""


@dataclass(frozen=True)
class Checkpoint:
    """Where to keep a run while it lasts, and how often; written at log points and at the end."""

    path: str | os.PathLike[str]
    every_seconds: float = 5.0


class Keeper:
    """Writes checkpoints, not too often."""

    def __init__(self, checkpoint: Checkpoint | str | os.PathLike[str] | None):
        self.to = Checkpoint(checkpoint) if isinstance(checkpoint, str | os.PathLike) else checkpoint
        if self.to is not None:
            instance("checkpoint", self.to, Checkpoint, "a path, or a Checkpoint")
            instance("path", self.to.path, (str, os.PathLike), "the path of a file")
            instance("every_seconds", self.to.every_seconds, (int, float, np.number), "a number of seconds")
            if not self.to.every_seconds >= 0:
                msg = f"`every_seconds` must be at least 0 (infinite: only at the end), got {self.to.every_seconds!r}."
                raise ValueError(msg)
            check_path(self.to.path)  # now, not after the first hour
        self.saved = time.monotonic()

    def if_due(self, result: Callable[[], Result]) -> None:
        """Keep a run that goes on."""
        if self.to and time.monotonic() - self.saved >= self.to.every_seconds:
            self.now(result())

    def now(self, result: Result) -> None:
        """Keep this result. What cannot be written is no reason to lose the run: the last checkpoint stays."""
        if not self.to:
            return
        try:
            result.save(self.to.path)
        except Exception as error:  # whatever a file system or a writer raises
            kept = "the one before is kept" if os.path.exists(self.to.path) else "there is none yet"
            why = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
            msg = (
                f"cannot write the checkpoint {str(self.to.path)!r}: {why}; {kept}, and the run goes on. "
                "Make room, or save the result elsewhere at the end."
            )
            warnings.warn(msg, CheckpointWarning, stacklevel=4)
        self.saved = time.monotonic()
