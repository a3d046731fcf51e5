"""Which stage a long piece of work is in, told to whoever listens; a stage of a second or two is not worth a word."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

PATIENCE = 2.0  # seconds that a stage lasts before it is told


class Teller:
    """Writes a line about a stage that lasts, and about how long the rest will take where that can be known."""

    def __init__(self, write: Callable[[str], None]):
        self._write, self._began = write, time.perf_counter()
        self._timer: threading.Timer | None = None

    def __call__(self, stage: str, done: float | None = None) -> None:
        """Note a new stage, at which a share ``done`` of the work is behind."""
        self.close()
        left = ""
        if done:
            seconds = (time.perf_counter() - self._began) * (1 - done) / done
            left = f" (about {max(1, round(seconds))} s left)"
        self._timer = threading.Timer(PATIENCE, self._write, (f"{stage}{left}",))
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        """The last stage is over: nothing more about it."""
        if self._timer is not None:
            self._timer.cancel()


_listening: ContextVar[Teller | None] = ContextVar("listening", default=None)


def tell(stage: str, done: float | None = None) -> None:
    """Say that a stage begins; ``done`` is the share of what it belongs to that is behind."""
    teller = _listening.get()
    if teller is not None:
        teller(stage, done)


@contextmanager
def told_by(write: Callable[[str], None]) -> Iterator[None]:
    """Let lines about stages within be written by a function, unless somebody listens already."""
    if _listening.get() is not None:
        yield
        return
    teller = Teller(write)
    token = _listening.set(teller)
    try:
        yield
    finally:
        _listening.reset(token)
        teller.close()


def wanted(progress: bool | None) -> bool:
    """Return whether to show progress: by default on a terminal only."""
    return sys.stderr.isatty() if progress is None else progress


@contextmanager
def told(progress: bool | None) -> Iterator[None]:
    """Write lines about stages within to stderr (None: on a terminal only), unless somebody listens already."""
    began = time.perf_counter()

    def write(line: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {line}", file=sys.stderr, flush=True)

    with told_by(write) if wanted(progress) else nullcontext():
        try:
            yield
        finally:
            if (teller := _listening.get()) is not None:
                teller.close()  # what comes next is not the last stage of this
