"""The arguments of `fit`: checked, found by name, and completed with what an earlier run used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.checks import instance, positive, whole
from pdvi._base.checks import seed as checked_seed
from pdvi.core.executor import Executor
from pdvi.core.problem import Problem, default_batch_size
from pdvi.core.result import Result
from pdvi.core.solver import Solver
from pdvi.executors import Dask, Disk, Memory
from pdvi.executors.dask import import_distributed
from pdvi.solvers import SOLVERS

METHODS = {name.lower(): solver for name, solver in SOLVERS.items()} | {"memoized": SOLVERS["MemoizedVB"]}


def solver_for(solver: Any) -> Solver:
    """Return the solver, which may be given by name: "p2dvi", or "P2DVI"."""
    return _made("solver", solver, METHODS, Solver, "a solver such as pdvi.P2DVI(), or its name")


def executor_for(executor: Any, problem: Problem) -> Executor:
    """Return the executor, which may be given by name; by default the one that suits where the shards are."""
    if executor is None:
        return Memory() if problem.store is None else Disk()
    wanted = "an executor such as pdvi.Memory() or pdvi.Disk(), or its name"
    found = _made("executor", executor, PLACES, Executor, wanted)
    return found() if isinstance(executor, str) else found


def _made(name: str, value: Any, by_name: Mapping[str, Any], kind: Any, wanted: str) -> Any:
    """Return the object that is given, or the one of a name: "P2D-VI" is what the paper writes."""
    if not isinstance(value, str):
        remedy = f"call it: {value.__name__}()" if isinstance(value, type) else ""
        return instance(name, value, kind, wanted, remedy)
    known = value.lower().replace("-", "")
    if known not in by_name:
        msg = f"`{name}` must be one of {tuple(by_name)}, or an object made by hand, got {value!r}."
        raise ValueError(msg)
    return by_name[known]


def _dask() -> Executor:
    """Dask with the client that the process has: which cluster to work on is nothing to guess."""
    try:
        return Dask(import_distributed().default_client())
    except ValueError as error:
        msg = "`executor='dask'` needs a client, and there is none; give pdvi.Dask(distributed.Client(address))."
        raise ValueError(msg) from error


PLACES: dict[str, Callable[[], Executor]] = {"memory": Memory, "disk": Disk, "dask": _dask}


def batch_size_for(problem: Problem, solver: Solver, batch_size: int | None, earlier: Result | None) -> int:
    """Return the number of shards visited in a step."""
    if solver.full_batch:
        if batch_size not in (None, problem.n_shards):
            msg = (
                f"`batch_size` must be left out for {type(solver).__name__}, which visits all "
                f"{problem.n_shards} shards in every step, got {batch_size!r}."
            )
            raise ValueError(msg)
        return problem.n_shards
    if batch_size is None:
        return earlier.batch_size if earlier else default_batch_size(problem.n_shards)
    whole("batch_size", batch_size, least=1, most=problem.n_shards, of="the number of shards")
    if earlier and batch_size != earlier.batch_size:
        msg = f"`batch_size` must be that of the run to continue ({earlier.batch_size}), got {batch_size!r}."
        raise ValueError(msg)
    return int(batch_size)


def seed_for(seed: int | None, earlier: Result | None) -> int:
    """Return the seed, checked against that of the run to continue."""
    if seed is None:
        return earlier.seed if earlier else 0
    checked_seed("seed", seed)
    if earlier and seed != earlier.seed:
        msg = f"`seed` must be that of the run to continue ({earlier.seed}), got {seed!r}."
        raise ValueError(msg)
    return int(seed)


def last_step(max_epochs: float, max_steps: int | None, per_epoch: int) -> int:
    """Return the step at which the budget ends."""
    last = round(positive("max_epochs", max_epochs) * per_epoch)
    return max(1, last if max_steps is None else min(last, whole("max_steps", max_steps, least=1)))


def lam_from(problem: Problem, start: Any) -> jax.Array:
    """Return the global parameters in a dict of blocks as one vector."""
    if not isinstance(start, Mapping) or set(start) != {name for name, _ in problem.blocks}:
        found = sorted(start) if isinstance(start, Mapping) else type(start).__name__
        msg = f"`start` must have the blocks {[name for name, _ in problem.blocks]}, got {found}."
        raise ValueError(msg)
    for name, shape in problem.blocks:
        value = np.asarray(start[name])
        if value.dtype.kind not in "fiub":
            msg = f"`start` of block {name!r} must hold numbers, got {start[name]!r}."
            raise ValueError(msg)
        if value.shape != shape:
            msg = f"`start` of block {name!r} must have shape {shape}, got {value.shape}."
            raise ValueError(msg)
        if not np.isfinite(value).all():
            msg = f"`start` must be finite: block {name!r} has NaN or infinite values."
            raise ValueError(msg)
    return problem.ravel({name: jnp.asarray(value, jnp.result_type(float)) for name, value in start.items()})


def no_nan(parts: Mapping[str, Any]) -> None:
    """Refuse to begin where no step leads away from; infinite values may be marks of what was not yet found."""
    for name, part in parts.items():
        for leaf in map(np.asarray, jax.tree.leaves(part)):
            if leaf.dtype.kind == "f" and np.isnan(leaf).any():
                msg = (
                    f"`start` must be free of NaN: {name!r} has {int(np.isnan(leaf).sum())} of {leaf.size}; "
                    "give an earlier checkpoint, or the blocks of `global_params` alone."
                )
                raise ValueError(msg)
