"""Shards on disk, one process: they are streamed through, the next being read while one is worked on."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from pdvi._base.types import Array, PyTree
from pdvi.core.executor import Executor, check_local, store_of
from pdvi.core.problem import Problem
from pdvi.core.solver import LocalUpdateFn, ShardFn, Solver, State
from pdvi.executors.exchange import Exchange, Halos, Moment
from pdvi.executors.host import Host, by_shard, total
from pdvi.executors.scratch import Scratch
from pdvi.shards.store import Store

UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SHARDS_AT_ONCE = 3  # the one worked on, the one read ahead, the one being let go
FILLED = 0.8  # of what is free: the allocator leaves gaps between arrays that come and go
MORE = 4e9  # bytes above what the process has anyway, unless told otherwise
RUNTIME = 150e6  # bytes that JAX and its compiler take once they are used
LOCALS_AT_ONCE = 8  # old, with halo, logits, new, written, and what the compiler keeps in between


class Disk(Executor):
    """Works on a problem from a store that need not fit into memory.

    Local variables and what a method keeps for a shard are in scratch files, which go away by themselves. A checkpoint
    holds the global state; a run resumed from it rebuilds the rest from the data and goes on to the same optimum,
    though not to the same bits.

    Parameters
    ----------
    memory_limit
        resident memory of the process, "4GB" or a number of bytes; by default 4 GB more than it has now. What shards
        being worked on leave free holds as many others as fit, so that they are read once only.
    scratch
        a folder for scratch files, as large as all local variables; by default where the store is.
    strict
        refuse a limit that cannot be kept; otherwise no shard stays in memory, and it is said.
    """

    def __init__(
        self,
        memory_limit: str | float | None = None,
        *,
        scratch: str | os.PathLike[str] | None = None,
        strict: bool = True,
    ):
        self.memory_limit = resident() + MORE if memory_limit is None else parse_bytes(memory_limit)
        self.scratch, self.strict = scratch, strict

    def open(self, problem: Problem, key: Array, local: PyTree) -> tuple[Array, State]:
        """Return the model's own start of the globals, and a state without anything that is a shard's."""
        store, template = store_of(problem, self), problem.local_shape()
        check_local(problem, local)
        self.problem, self._key = problem, key
        self._folder = store.path.parent if self.scratch is None else Path(self.scratch)
        self._locals = Scratch(template, store.n_shards, self._folder)
        self._host = Host(problem, range(store.n_shards), self._locals, keep=self._room(store, template))
        self._exchange, self._time = Exchange(self._host.exports), 0
        self._publish(self._host.begin(key, by_shard(local, range(store.n_shards))))
        return problem.init_global(key), State(None, None, None)

    def begin(self, state: State, solver: Solver) -> State:
        """Keep for every shard what ``solver`` keeps at first."""
        shape = self.problem.local_shape()
        template = eqx.filter_eval_shape(solver.init_shard_state, self.problem, state.lam, shape, None)
        self._host.equip(solver, state.lam, Scratch(template, self.problem.n_shards, self._folder))
        return state

    def run(self, solver: Solver, state: State, batches: np.ndarray) -> State:
        """Return the state after one step per row of ``batches``, which the reader is told before."""
        self._host.data.expect(batches.ravel().tolist())
        return super().run(solver, state, batches)

    def visit(
        self, state: State, visitor: LocalUpdateFn, told: Any, shards: np.ndarray | None = None
    ) -> tuple[State, PyTree, int]:
        """Visit these shards."""
        chosen = self._chosen(shards)
        if shards is None:
            self._host.data.expect(chosen)
        message, rows = self._host.visit(visitor, told, chosen, self._halos(chosen))
        self._publish(rows)
        return state, message, len(chosen)

    def look(self, state: State, reader: ShardFn, told: Any, shards: np.ndarray | None = None) -> PyTree:
        """Return the sum of what ``reader`` says of these shards."""
        chosen = self._chosen(shards)
        return total([self._host.look(reader, told, chosen, self._halos(chosen))])

    def fold(self, state: State, function: Any, told: Any) -> PyTree:
        """Return the sum of ``function(told, own)`` over all shards."""
        return total([self._host.fold(function, told)])

    def fresh(self, state: State) -> State:
        """Set the local variables to those that the run began with."""
        self._publish(self._host.begin(self._key))
        return state

    def local_params(self, state: State) -> PyTree:
        """Return the local variables of all shards, memory-mapped."""
        return self._locals.stacked()

    def close(self) -> None:
        """Let go of the shards in memory; the local variables stay as long as a result refers to them."""
        self.__dict__.pop("_host", None)

    def _chosen(self, shards: np.ndarray | None) -> list[int]:
        return self._host.shards if shards is None else np.asarray(shards).tolist()

    def _halos(self, shards: list[int]) -> Halos:
        return self._exchange.halos(shards, Moment(self._time, self._time + 1))[0]

    def _publish(self, rows: Halos) -> None:
        self._time += 1
        self._exchange.publish(rows, self._time)

    def _room(self, store: Store, template: PyTree) -> float:
        """Bytes of shards that may stay in memory."""
        one = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(template))
        used = resident() + RUNTIME + SHARDS_AT_ONCE * store.shard_bytes + LOCALS_AT_ONCE * one
        if used > self.memory_limit:
            msg = (
                f"`memory_limit` must be at least {used / 1e9:.2f} GB for this store ({resident() / 1e9:.2f} GB are in "
                f"use, and a shard has {store.shard_bytes / 1e9:.3f} GB), got {self.memory_limit / 1e9:.2f} GB; "
                "give more, or write the store with smaller shards."
            )
            if self.strict:
                raise ValueError(msg)
            warnings.warn(f"going on with more than the memory limit: {msg}", UserWarning, stacklevel=2)
            return 0.0
        return FILLED * (self.memory_limit - used)


def parse_bytes(size: str | float) -> float:
    """Bytes of "4GB", "500 MB", or a number."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(size))
    if isinstance(size, bool) or found is None or found.group(2).upper() not in UNITS or float(found.group(1)) <= 0:
        msg = f'`memory_limit` must be a positive number of bytes or a text such as "4GB", got {size!r}.'
        raise ValueError(msg)
    return float(found.group(1)) * UNITS[found.group(2).upper()]


def resident() -> float:
    """Resident memory of this process in bytes; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0.0
