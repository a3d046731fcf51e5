"""What a run gives back."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pdvi._base.types import PyTree
from pdvi.core.result_file import read_result, write_result


class Status(enum.Enum):
    """Why a run ended; the text says what to do next."""

    CONVERGED = "reached the tolerance"
    MAX_EPOCHS = "did not reach tol within the budget; increase max_epochs or loosen tol"
    STALLED = (
        "the objective has settled, but its derivatives say that it is not at a minimum; go on with start=result, "
        "or try another start or a smaller tol"
    )
    MAX_SECONDS = "did not reach tol within max_seconds; increase it, or go on with start=result"
    INTERRUPTED = "interrupted; this is the last logged state, go on with start=result"
    STOPPED = "stopped by a callback"
    DIVERGED = (
        "the objective is not finite or keeps rising; this is the last good state: "
        "try a smaller eta (or a larger scale), or another start"
    )
    RUNNING = "a checkpoint of an unfinished run; go on with start=<this file>"

    def __str__(self) -> str:
        return f"{self.name}: {self.value}"


class Point(NamedTuple):
    """Global parameters and the local variables that go with them."""

    global_params: Mapping[str, Any]
    local_params: PyTree


@dataclass(frozen=True)
class Result:
    """The outcome of `pdvi.fit`.

    ``global_params`` is a dict of arrays, one per block; ``local_params`` is stacked over shards; ``trace`` has
    one row per log point. ``solver`` is the solver's settings. ``state`` holds its other arrays by name
    ("server.lam0"), so that ``start=result`` goes on with the same bits. ``data`` is a fingerprint of the problem's
    data, empty if it is not known.
    """

    global_params: dict[str, np.ndarray]
    local_params: PyTree
    trace: pd.DataFrame
    status: Status
    n_steps: int
    seed: int
    batch_size: int
    solver: dict[str, Any] | str
    state: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    data: str = ""

    @property
    def converged(self) -> bool:
        """Return whether the tolerance was reached."""
        return self.status is Status.CONVERGED

    @property
    def point(self) -> Point:
        """Return where the run ended, as a start for another."""
        return Point(self.global_params, self.local_params)

    @property
    def objective(self) -> float:
        """Return F at the returned parameters."""
        return float(self.trace["objective"].iloc[-1])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one file, whole or not at all; a file that is there is replaced."""
        write_result({**vars(self), "status": self.status.name}, path)


def load_result(path: str | os.PathLike[str]) -> Result:
    """Read what `Result.save` or a checkpoint wrote. No code in the file is run; a damaged file is refused."""
    fields = read_result(path, Status.__members__)
    return Result(**{**fields, "status": Status[fields["status"]]})
