"""Tell on the console what a command does while it works."""

from __future__ import annotations

import io
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Protocol


class Say(Protocol):
    """A function that tells what is being done, and, where it is known, which share of the whole is behind."""

    def __call__(self, line: str, done: float | None = None, /) -> None:
        """Show a line, and move the bar to ``done`` (between 0 and 1)."""


# of libraries: nothing a user can mend
NOISE = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ImportWarning, ResourceWarning)


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Say]:
    """Give a function that tells what is being done: lines over a bar on a terminal, plain lines in a log.

    Warnings become lines too. All goes to stdout, so that stderr holds nothing but an error; with ``quiet`` nothing is
    written.
    """
    with ExitStack() as stack:
        terminal = sys.stdout.isatty() and not quiet
        show = stack.enter_context(_bar()) if terminal else lambda text, _: print(text, flush=True)
        start = time.perf_counter()

        def say(line: str, done: float | None = None, /) -> None:
            if not quiet:
                show(f"[{time.perf_counter() - start:6.1f} s] {line}", done)

        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("default")
        for category in NOISE:
            warnings.simplefilter("ignore", category)
        warnings.showwarning = lambda message, *_, **__: say(f"note: {message}")
        if quiet or terminal:
            stack.enter_context(redirect_stderr(io.StringIO()))  # no second bar by `pdvi.fit`
        yield say


@contextmanager
def _bar() -> Iterator[Say]:
    """Lines with a moving bar below the last one."""
    from rich.progress import BarColumn, Progress, TimeElapsedColumn

    with Progress(BarColumn(pulse_style="#0072B2"), TimeElapsedColumn(), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(text: str, done: float | None = None, /) -> None:
            bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            if done is not None:
                bar.update(task, total=1.0, completed=done)

        yield show
