"""Some shards in one place, and what is done with them there: a process that streams a disk, or a cluster's worker.

A host keeps what belongs to its shards and sees only the halo rows of all others. It returns sums over its shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, PyTree
from pdvi.core.executor import traced
from pdvi.core.problem import Problem, with_halo, without_halo
from pdvi.core.solver import Solver
from pdvi.executors.exchange import Halos, exports_of
from pdvi.executors.reader import Reader
from pdvi.executors.scratch import Scratch

Kept = dict[int, PyTree] | Scratch  # something by shard


class Host:
    """Visits, and looks at, its shards."""

    def __init__(self, problem: Problem, shards: Iterable[int], locals_: Kept, *, keep: float = float("inf")):
        self.problem = problem
        self.shards = list(shards)
        self.local = locals_
        self.own: Kept = {}
        assert problem.store is not None
        self.data = Reader(problem.store, keep)
        self.exports = exports_of(problem, problem.store)

    def begin(self, key: Array, locals_: Any = None, shards: Iterable[int] | None = None) -> Halos:
        """Set the local variables: given ones, or the model's own start. Returns the rows that others read."""
        rows = {}
        for b, shard in self._each(shards):
            self.local[b] = _init(self.problem, key, jnp.asarray(b), shard) if locals_ is None else locals_[b]
            rows[b] = self.exported(b, self.local[b])
        return rows

    def equip(self, solver: Solver, lam: Array, owns: Kept | None = None) -> None:
        """Keep for every shard what a method keeps at first; ``owns`` is where."""
        self.own = {} if owns is None else owns
        for b in self.shards:
            self.own[b] = _own(self.problem, traced(solver), jnp.asarray(lam), self.local[b])

    def visit(self, visitor: Any, told: Any, shards: Iterable[int], halos: Halos) -> tuple[PyTree, Halos]:
        """Visit these shards: the sum of their messages, and the rows that others read."""
        visitor, told = traced(visitor), jax.tree.map(jnp.asarray, told)
        messages, rows = [], {}
        for b, shard in self._each(shards, announce=False):
            local, own = self.local[b], self.own.get(b)
            local, own, message = _visit(self.problem, visitor, told, local, halos[b], own, shard)
            self.local[b], self.own[b] = local, own
            messages.append(jax.tree.map(np.asarray, message))
            rows[b] = self.exported(b, local)
        return add_up(messages), rows

    def look(self, reader: Any, told: Any, shards: Iterable[int], halos: Halos) -> PyTree:
        """Add up, in double precision, what ``reader`` says of these shards; scalars are left apart, see `total`."""
        reader, told = traced(reader), jax.tree.map(jnp.asarray, told)
        part: PyTree = None
        for b, shard in self._each(shards):
            found = _look(self.problem, reader, told, self.local[b], halos[b], self.own.get(b), shard)
            part = _plus(part, b, found)
        return part

    def fold(self, function: Any, told: Any) -> PyTree:
        """Add up in the same way what ``function`` says of what is kept for each shard."""
        function, told = traced(function), jax.tree.map(jnp.asarray, told)
        part: PyTree = None
        for b in self.shards:
            part = _plus(part, b, _fold(function, told, self.own.get(b)))
        return part

    def _each(self, shards: Iterable[int] | None = None, announce: bool = True) -> Iterable[tuple[int, PyTree]]:
        wanted = self.shards if shards is None else list(shards)
        if announce:  # the batches of a run are announced as a whole
            self.data.expect(wanted)
        return ((b, self.data[b]) for b in wanted)

    def exported(self, b: int, local: PyTree) -> PyTree:
        """Return the rows of a shard that others read."""
        if self.exports is None:
            return None
        rows = self.exports.rows(b)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], local)


def by_shard(stacked: PyTree, shards: Iterable[int]) -> dict[int, PyTree] | None:
    """Return what is stacked, shard by shard; None if there is nothing."""
    return (
        None if stacked is None else {b: jax.tree.map(lambda leaf, b=b: np.asarray(leaf)[b], stacked) for b in shards}
    )


def add_up(parts: list[PyTree]) -> PyTree:
    """Return the sum of arrays or pytrees of them: added in double precision, in the type they have; None of none."""
    if not parts:
        return None
    return jax.tree.map(lambda *leaves: np.sum(leaves, axis=0, dtype=float).astype(leaves[0].dtype), *parts)


class PerShard:
    """A number of each of some shards: they are added in the shards' order, wherever the shards are."""

    def __init__(self, numbers: dict[int, float]):
        self.numbers = numbers

    def __add__(self, other: PerShard) -> PerShard:
        return PerShard({**self.numbers, **other.numbers})

    def sum(self) -> Any:
        """Return their sum."""
        return np.array([self.numbers[b] for b in sorted(self.numbers)]).sum()


def total(parts: Iterable[PyTree]) -> PyTree:
    """Return the sum of what hosts said of their shards."""
    parts = [part for part in parts if part is not None]
    if not parts:
        return None
    added = jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]), *parts)
    return jax.tree.map(lambda leaf: leaf.sum() if isinstance(leaf, PerShard) else leaf, added)


def _plus(part: PyTree, b: int, found: PyTree) -> PyTree:
    def wide(leaf: Any) -> Any:
        return PerShard({b: float(leaf)}) if leaf.ndim == 0 else np.asarray(leaf, float)

    new = jax.tree.map(wide, found)
    return new if part is None else jax.tree.map(lambda old, more: old + more, part, new)


_init = eqx.filter_jit(Problem.init_shard)
_fold = eqx.filter_jit(lambda function, told, own: function(told, own))


@eqx.filter_jit
def _own(problem: Problem, solver: Solver, lam: Array, local: PyTree) -> PyTree:
    return solver.init_shard_state(problem, lam, local, None)


@eqx.filter_jit
def _visit(
    problem: Problem, visitor: Any, told: Any, local: PyTree, halo: PyTree, own: PyTree, shard: PyTree
) -> tuple[PyTree, PyTree, PyTree]:
    new, own, message = visitor(problem, told, with_halo(local, halo), own, shard)
    return without_halo(new, local), own, message


@eqx.filter_jit
def _look(problem: Problem, reader: Any, told: Any, local: PyTree, halo: PyTree, own: PyTree, shard: PyTree) -> PyTree:
    return reader(problem, told, with_halo(local, halo), own, shard)
