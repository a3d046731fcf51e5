"""Solvers and executors by name, where a name says all: the method with its default settings, the usual place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdvi._base.checks import instance
from pdvi.core.executor import Executor
from pdvi.core.problem import Problem
from pdvi.core.solver import Solver
from pdvi.executors import Dask, Disk, Memory
from pdvi.solvers import SOLVERS

METHODS = {name.lower(): solver for name, solver in SOLVERS.items()} | {"memoized": SOLVERS["MemoizedVB"]}


def solver_for(solver: Any) -> Solver:
    """Return the solver, which may be given by name: "p2dvi", or "P2DVI"."""
    if isinstance(solver, str):
        return METHODS[_known("solver", solver, tuple(METHODS))]
    return instance("solver", solver, Solver, "a solver such as pdvi.P2DVI(), or its name", _instead_of(solver))


def executor_for(executor: Any, problem: Problem) -> Executor:
    """Return the executor, which may be given by name; by default the one that suits where the shards are."""
    if executor is None:
        return Memory() if problem.store is None else Disk()
    if isinstance(executor, str):
        return PLACES[_known("executor", executor, tuple(PLACES))]()
    wanted = "an executor such as pdvi.Memory() or pdvi.Disk(), or its name"
    return instance("executor", executor, Executor, wanted, _instead_of(executor))


def _known(name: str, value: str, options: tuple[str, ...]) -> str:
    known = value.lower().replace("-", "")  # "P2D-VI" is what the paper writes
    if known not in options:
        msg = f"`{name}` must be one of {options}, or an object made by hand, got {value!r}."
        raise ValueError(msg)
    return known


def _instead_of(value: Any) -> str:
    return f"call it: {value.__name__}()" if isinstance(value, type) else ""


def _dask() -> Executor:
    """Dask with the client that the process has: which cluster to work on is nothing to guess."""
    try:
        from distributed import default_client
    except ImportError as error:
        msg = 'the executor Dask needs dask and distributed; install them with: pip install "pdvi[dask]"'
        raise ImportError(msg) from error
    try:
        return Dask(default_client())
    except ValueError as error:
        msg = "`executor='dask'` needs a client, and there is none; give pdvi.Dask(distributed.Client(address))."
        raise ValueError(msg) from error


PLACES: dict[str, Callable[[], Executor]] = {"memory": Memory, "disk": Disk, "dask": _dask}
