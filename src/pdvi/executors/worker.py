"""What runs on a cluster's worker: a host whose shards come and go, in the worker's memory."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from pdvi._base.memory import keep_freed
from pdvi._base.types import PyTree
from pdvi.core.problem import Problem
from pdvi.executors.exchange import Exchange, Moment, Moved, Offer, Unreachable, Wanted
from pdvi.executors.host import Host
from pdvi.shards.store import Store

AS_BEFORE = "="  # in place of what has not changed


class Brief(NamedTuple):
    """What is to be done and what is told, without what the worker knows from last time.

    ``thing`` (pickled) is None if one of this ``number`` was sent before; leaves of ``told`` may be `AS_BEFORE`.
    """

    number: int
    thing: bytes | None
    told: PyTree


class Failure(NamedTuple):
    """An error in the work, which is not one of the worker."""

    error: Exception


def answering(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that works in its client's precision, and returns why if there is no answer."""

    @functools.wraps(method)
    def answered(self: WorkerHost, *arguments: Any) -> Any:
        try:
            with jax.enable_x64(self.wide):
                return method(self, *arguments)
        except Exception as error:
            return error if isinstance(error, Unreachable) else Failure(error)

    return answered


class WorkerHost(Host):
    """A host that is told which shards are its own, and keeps everything in its memory.

    The names of its methods are what a dashboard shows of the work.
    """

    def __init__(self, problem: Problem, wide: bool, patience: float):
        super().__init__(problem, [], {})
        self.wide = wide
        self.local: dict[int, PyTree] = {}
        self.own: dict[int, PyTree] = {}
        self.exchange = Exchange(self.exports, patience)
        self._things: dict[int, Any] = {}
        self._told: dict[int, list[Any]] = {}

    def _understood(self, brief: Brief) -> tuple[Any, Any]:
        if brief.thing is not None:
            self._things[brief.number] = pickle.loads(brief.thing)
        leaves, structure = jax.tree.flatten(brief.told)
        before = self._told.get(brief.number, leaves)
        known = [old if isinstance(new, str) else new for new, old in zip(leaves, before)]
        self._told[brief.number] = known
        return self._things[brief.number], jax.tree.unflatten(structure, known)

    # ------------------------------------------------------------------------------------ what other workers ask

    async def offered(self, wanted: Wanted, as_of: float) -> Offer:
        """Return the rows that another worker's shards read: by the event loop, also while shards are worked on."""
        return self.exchange.offered(wanted, as_of)

    async def awake(self) -> bool:
        """Return what a worker that can answer answers."""
        return True

    # ------------------------------------------------------------------------------------ what the client asks

    @answering
    def begin_with(self, shards: list[int], key: Any, locals_: Any, stamp: int) -> None:
        """Begin with these shards, besides those it has."""
        self._take(shards)
        self.exchange.publish(self.begin(jax.random.wrap_key_data(key), locals_, shards), stamp)

    @answering
    def begin_again(self, shards: list[int], key: Any, stamp: int) -> None:
        """Set local variables as at the start, with these shards and no others: a move may have been cut short."""
        self.exchange.withdraw(set(self.shards) - set(shards))
        self.shards = list(shards)
        self.exchange.publish(self.begin(jax.random.wrap_key_data(key), None, shards), stamp)

    @answering
    def equip_for(self, brief: Brief) -> None:
        """Keep for every shard what a solver keeps at first."""
        self.equip(*self._understood(brief))

    @answering
    def visit_shards(self, brief: Brief, shards: list[int], moment: Moment) -> tuple[PyTree, Moved]:
        """Visit these shards: the sum of their messages, and the bytes of halo rows that had to move."""
        visitor, told = self._understood(brief)
        halos, moved = self.exchange.halos(shards, moment)
        message, rows = self.visit(visitor, told, shards, halos)
        self.exchange.publish(rows, moment.stamp)
        return message, moved

    @answering
    def look_at_shards(self, brief: Brief, shards: list[int], moment: Moment) -> PyTree:
        """Look at these shards."""
        reader, told = self._understood(brief)
        return self.look(reader, told, shards, self.exchange.halos(shards, moment)[0])

    @answering
    def fold_shards(self, brief: Brief) -> PyTree:
        """Fold what is kept."""
        return self.fold(*self._understood(brief))

    @answering
    def release(self, shards: list[int]) -> Any:
        """Give shards away, with all that is theirs."""
        self.shards = [b for b in self.shards if b not in shards]
        self.exchange.withdraw(shards)
        return {b: jax.tree.map(np.asarray, (self.local.pop(b), self.own.pop(b))) for b in shards}

    @answering
    def accept(self, shards: list[int], parcel: Any, stamp: int) -> None:
        """Take what another worker gave away."""
        self._take(shards)
        for b in shards:
            self.local[b], self.own[b] = parcel[b]
        self.exchange.publish({b: self.exported(b, self.local[b]) for b in shards}, stamp)

    @answering
    def local_of(self, b: int) -> tuple[int, PyTree]:
        """Return the local variables of one shard."""
        return b, jax.tree.map(np.asarray, self.local[b])

    def _take(self, shards: list[int]) -> None:
        self.shards = self.shards + [b for b in shards if b not in self.shards]


def make_host(path: str, model: Any, wide: bool, patience: float) -> WorkerHost:
    """Return a host without shards yet. ``wide``: in double precision, as its client."""
    keep_freed()
    with jax.enable_x64(wide):
        return WorkerHost(Problem(model, Store(path, verify=False)), wide, patience)
