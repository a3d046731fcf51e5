"""What a run gives back, and how it is kept: one zarr (zip) file, written whole or not at all."""

from __future__ import annotations

import enum
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd

from pdvi._base.atomic import check_path, replacing

PyTree = Any
FORMAT = 1


class Status(enum.Enum):
    """Why a run ended; the text says what to do next."""

    CONVERGED = "reached the tolerance"
    MAX_EPOCHS = "did not reach tol within the budget; increase max_epochs or loosen tol"
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
    one row per log point. ``state`` holds the solver's other arrays by name, so that ``start=result`` goes on with
    the same bits; ``solver`` has its settings, ``data`` a checksum of the problem.
    """

    global_params: dict[str, np.ndarray]
    local_params: PyTree
    trace: pd.DataFrame
    status: Status
    n_steps: int
    seed: int
    batch_size: int
    solver: Any
    state: dict[str, np.ndarray] = field(repr=False)
    data: str = ""

    @property
    def converged(self) -> bool:
        """Whether the tolerance was reached."""
        return self.status is Status.CONVERGED

    @property
    def point(self) -> Point:
        """Where the run ended, as a start for another."""
        return Point(self.global_params, self.local_params)

    @property
    def objective(self) -> float:
        """F at the returned parameters."""
        return float(self.trace["objective"].iloc[-1])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one file, atomically: a temporary name, fsync, rename."""
        path = check_path(path)
        structure, leaves = _describe(self.local_params)
        arrays = {f"global/{i}": value for i, value in enumerate(self.global_params.values())}
        arrays |= {f"local/{i}": value for i, value in enumerate(leaves)}
        arrays |= {f"state/{i}": value for i, value in enumerate(self.state.values())}
        numbers = self.trace.drop(columns="event")
        arrays |= {f"trace/{i}": numbers[name].to_numpy() for i, name in enumerate(numbers)}
        meta = {
            "format": FORMAT,
            "blocks": list(self.global_params),
            "local": structure,
            "state": list(self.state),
            "data": self.data,
            "columns": list(numbers),
            "events": self.trace["event"].tolist(),
            "status": self.status.name,
            "n_steps": self.n_steps,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "solver": self.solver,
        }
        with replacing(path) as temporary:
            _write(temporary, arrays, meta)
        _sync(path.parent)


def load_result(path: str | os.PathLike[str]) -> Result:
    """Read what `Result.save` or a checkpoint wrote. No code in the file is run."""
    path = Path(path)
    if not path.is_file():
        msg = f"no result file at {str(path)!r}; give the path that was saved."
        raise FileNotFoundError(msg)
    import zarr
    from zarr.storage import ZipStore

    try:
        with ZipStore(path, mode="r") as store:
            group = zarr.open_group(store, mode="r")
            meta = json.loads(group.attrs["pdvi"])  # type: ignore[arg-type]
            arrays = {name: np.asarray(array[...]) for name, array in group.arrays()}
            arrays |= {
                f"{part}/{name}": np.asarray(array[...]) for part, sub in group.groups() for name, array in sub.arrays()
            }
    except Exception as error:
        msg = f"{str(path)!r} is not a pdvi result file, or it is damaged ({error}); save it again."
        raise ValueError(msg) from error
    if meta["format"] != FORMAT:
        msg = f"{str(path)!r} has format {meta['format']}, this version reads {FORMAT}; use a newer pdvi."
        raise ValueError(msg)
    trace = pd.DataFrame({name: arrays[f"trace/{i}"] for i, name in enumerate(meta["columns"])})
    trace["event"] = pd.Series(meta["events"], dtype=object)
    return Result(
        global_params={name: arrays[f"global/{i}"] for i, name in enumerate(meta["blocks"])},
        local_params=_rebuild(meta["local"], arrays),
        trace=trace,
        status=Status[meta["status"]],
        n_steps=meta["n_steps"],
        seed=meta["seed"],
        batch_size=meta["batch_size"],
        solver=meta["solver"],
        state={name: arrays[f"state/{i}"] for i, name in enumerate(meta["state"])},
        data=meta["data"],
    )


def _write(path: Path, arrays: dict[str, Any], meta: dict[str, Any]) -> None:
    import zarr
    from zarr.storage import ZipStore

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Duplicate name")  # zip members are only ever appended
        with ZipStore(path, mode="w") as store:
            group = zarr.create_group(store, attributes={"pdvi": json.dumps(meta)})
            for name, value in arrays.items():
                group.create_array(name, data=np.asarray(value), compressors=None)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _describe(tree: PyTree) -> tuple[Any, list[np.ndarray]]:
    """A pytree as JSON with leaf numbers, and its leaves. A NamedTuple is kept as a plain tuple."""
    leaves: list[np.ndarray] = []

    def visit(node: Any) -> Any:
        if isinstance(node, dict):
            if not all(isinstance(key, str) for key in node):
                msg = f"local variables in a dict must have text keys to be saved, got {list(node)}."
                raise ValueError(msg)
            return {"dict": {key: visit(value) for key, value in node.items()}}
        if isinstance(node, list | tuple):
            return {"list" if isinstance(node, list) else "tuple": [visit(value) for value in node]}
        if node is None:
            return None
        if not isinstance(node, np.ndarray | jax.Array | np.generic):
            msg = f"local variables must be dicts, lists, tuples and arrays to be saved, got {type(node)}."
            raise ValueError(msg)
        leaves.append(np.asarray(node))
        return len(leaves) - 1

    return visit(tree), leaves


def _rebuild(structure: Any, arrays: dict[str, np.ndarray]) -> PyTree:
    if structure is None or isinstance(structure, int):
        return None if structure is None else arrays[f"local/{structure}"]
    (kind, content), *_ = structure.items()
    if kind == "dict":
        return {key: _rebuild(value, arrays) for key, value in content.items()}
    items = [_rebuild(value, arrays) for value in content]
    return items if kind == "list" else tuple(items)
