"""What the commands say while they work."""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr

Say = Callable[[str], None]
NOISE = (DeprecationWarning, FutureWarning, ImportWarning, ResourceWarning)  # of libraries: nothing a user can mend


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Say]:
    """A function that prints a line with the seconds so far; warnings become such lines too.

    It writes to stdout, so that stderr holds nothing but an error; only the bar of `pdvi.fit` is drawn there, on a
    terminal. With ``quiet`` nothing is written.
    """
    start = time.perf_counter()

    def say(line: str) -> None:
        if not quiet:
            print(f"[{time.perf_counter() - start:6.1f} s] {line}", flush=True)

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("default")
        for category in NOISE:
            warnings.simplefilter("ignore", category)
        warnings.showwarning = lambda message, *_, **__: say(f"note: {message}")
        if quiet:
            stack.enter_context(redirect_stderr(io.StringIO()))  # no terminal, no bar
        yield say
