"""What runs on a cluster's worker: a host whose shards come and go, in the worker's memory."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import jax
import numpy as np

from pdvi._base.types import PyTree
from pdvi.core.problem import Problem
from pdvi.executors.host import Host
from pdvi.shards.store import Store
from pdvi.solvers.local_variables import Recall, settle

AS_BEFORE = "="  # in place of what has not changed


class Brief(NamedTuple):
    """What is to be done and what is told, without what the worker knows from last time.

    ``thing`` (pickled) is None if one of this ``number`` was sent before; leaves of ``told`` may be `AS_BEFORE`.
    """

    number: int
    thing: bytes | None
    told: PyTree


class WorkerHost(Host):
    """A host that is told which shards are its own, and keeps everything in its memory."""

    def __init__(self, problem: Problem):
        super().__init__(problem, [], {})
        self.local: dict[int, PyTree] = {}
        self.own: dict[int, PyTree] = {}
        self._solver: Any = None
        self._things: dict[int, Any] = {}
        self._told: dict[int, list[Any]] = {}

    def ask(self, method: str, wide: bool, *arguments: Any) -> Any:
        """Return the answer of a method, or why there is none."""
        try:
            with jax.enable_x64(wide):
                return getattr(self, method)(*arguments)
        except Exception as error:
            return Failure(error)

    def _understood(self, brief: Brief) -> tuple[Any, Any]:
        if brief.thing is not None:
            self._things[brief.number] = pickle.loads(brief.thing)
        leaves, structure = jax.tree.flatten(brief.told)
        before = self._told.get(brief.number, leaves)
        known = [old if isinstance(new, str) else new for new, old in zip(leaves, before)]
        self._told[brief.number] = known
        return self._things[brief.number], jax.tree.unflatten(structure, known)

    def begin_with(self, shards: list[int], key: Any, locals_: Any) -> Any:
        """Begin with these shards, besides those it has."""
        self._take(shards)
        return self.begin(jax.random.wrap_key_data(key), locals_, shards)

    def begin_again(self, shards: list[int], key: Any) -> Any:
        """Set local variables as at the start, with these shards and no others: a move may have been cut short."""
        self.shards = list(shards)
        return self.begin(jax.random.wrap_key_data(key), None, shards)

    def equip_for(self, brief: Brief) -> None:
        """Keep for every shard what a solver keeps at first."""
        self._solver, server = self._understood(brief)
        self.equip(self._solver, server)

    def visit_as(self, brief: Brief, shards: list[int], halos: Any) -> Any:
        """Visit these shards."""
        return self.visit(*self._understood(brief), shards, halos)

    def look_as(self, brief: Brief, shards: list[int], halos: Any) -> Any:
        """Look at these shards."""
        return self.look(*self._understood(brief), shards, halos)

    def fold_as(self, brief: Brief) -> Any:
        """Fold what is kept."""
        return self.fold(*self._understood(brief))

    def adopt(self, shards: list[int], key: Any, lam: Any, halos: Any, solver: bytes | None) -> Any:
        """Take over shards whose worker was lost: local variables that fit ``lam``, and what is kept for them."""
        self._take(shards)
        rows = self.begin(jax.random.wrap_key_data(key), None, shards)
        if solver is None:
            return rows
        self._solver = pickle.loads(solver)
        self.visit(settle, lam, shards, halos)
        return self.visit(Recall(self._solver), lam, shards, halos)[1]

    def release(self, shards: list[int]) -> Any:
        """Give shards away, with all that is theirs."""
        self.shards = [b for b in self.shards if b not in shards]
        return {b: jax.tree.map(np.asarray, (self.local.pop(b), self.own.pop(b))) for b in shards}

    def accept(self, shards: list[int], parcel: Any) -> None:
        """Take what another worker gave away."""
        self._take(shards)
        for b in shards:
            self.local[b], self.own[b] = parcel[b]

    def _take(self, shards: list[int]) -> None:
        self.shards = self.shards + [b for b in shards if b not in self.shards]

    def local_of(self, b: int) -> tuple[int, PyTree]:
        """Return the local variables of one shard."""
        return b, jax.tree.map(np.asarray, self.local[b])


class Failure(NamedTuple):
    """An error in the work, which is not one of the worker."""

    error: Exception


def make_host(path: str, model: Any, wide: bool) -> WorkerHost:
    """Return a host without shards yet. ``wide``: in double precision, as its client."""
    with jax.enable_x64(wide):
        return WorkerHost(Problem(model, Store(path, verify=False)))


def awake() -> bool:
    """Return what a worker that can answer answers."""
    return True
