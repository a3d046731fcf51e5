"""Halo rows from worker to worker.

Every worker keeps the rows that others read of its shards, the newest and those before. A worker that is to update
shards asks the workers of the rows next to them, all at the same time, for what is newer than what it has. Its event
loop answers, so that two workers can ask each other while both work. Within a step all updates see the rows of the step
before (`Moment.as_of`), whichever worker is first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from pdvi._base.types import PyTree
from pdvi.core.problem import Problem
from pdvi.shards.store import Store

Halos = dict[int, PyTree]  # the latest halo rows of each shard; None where there are none
Peers = dict[str, tuple[str, list[int]]]  # by a worker's address: the key of its host, and shards that are there
Wanted = dict[tuple[int, int], int]  # by reader and source: the stamp of what the reader has
Offer = dict[tuple[int, int], tuple[int, PyTree]]  # what is newer, and its stamp

HERE = ""  # in place of an address
NEVER = -1  # the stamp of rows that never came


class Moment(NamedTuple):
    """When a call is made: rows stamped up to ``as_of`` are read, those that are made get ``stamp``.

    ``peers`` has the workers of shards that are read elsewhere; None if they are as in the call before.
    """

    as_of: float
    stamp: int
    peers: Peers | None = None


class Moved(NamedTuple):
    """Bytes of halo rows: from other workers, and from shards of the same."""

    between: int
    within: int


class Unreachable(Exception):
    """A worker could not be asked for the rows of its shards."""

    def __init__(self, address: str, why: str):
        super().__init__(address, why)
        self.address, self.why = address, why


class Seam(NamedTuple):
    """What one shard reads: each row once, those of one source together.

    ``sources`` has for each of them where its rows go, and which of those that it exports they are; ``order`` makes a
    halo of them.
    """

    size: int
    sources: dict[int, tuple[slice, np.ndarray]]
    order: np.ndarray


class Exports:
    """Which rows of a shard other shards read: rows sorted through all shards, so those of a shard lie together."""

    def __init__(self, halo: np.ndarray, n_rows: int):
        n_shards = len(halo)
        self.halo, self.n_rows = halo, n_rows
        self.slots = np.unique(halo)
        self.first = np.searchsorted(self.slots, np.arange(n_shards + 1) * n_rows)
        self._seams: dict[int, Seam] = {}

    def rows(self, b: int) -> np.ndarray:
        """Return the rows of shard ``b`` that others read."""
        return self.slots[self.first[b] : self.first[b + 1]] - b * self.n_rows

    def sources(self, b: int) -> set[int]:
        """Return the shards whose rows shard ``b`` reads."""
        return set(np.unique(self.halo[b] // self.n_rows).tolist())

    def seam(self, b: int) -> Seam:
        """Return what shard ``b`` reads; it is found out once."""
        if b not in self._seams:
            slots, order = np.unique(self.halo[b], return_inverse=True)
            shards, begins = np.unique(slots // self.n_rows, return_index=True)
            sources = {}
            for c, begin, end in zip(shards.tolist(), begins, [*begins[1:], len(slots)]):
                offered = self.slots[self.first[c] : self.first[c + 1]]
                sources[c] = slice(begin, end), np.searchsorted(offered, slots[begin:end])
            self._seams[b] = Seam(len(slots), sources, order)
        return self._seams[b]


def exports_of(problem: Problem, store: Store) -> Exports | None:
    """Return the rows that others read of each shard; None if shards do not touch."""
    return None if store.halo is None else Exports(store.halo, jax.tree.leaves(problem.local_shape())[0].shape[0])


class Exchange:
    """The halo rows that shards read, and those that others read of them: of a worker's shards, or of all on a disk."""

    def __init__(self, exports: Exports | None, patience: float = 0.0):
        self._exports, self._patience = exports, patience
        self._editions: dict[int, tuple[tuple[int, PyTree], ...]] = {}  # of own shards: the newest, the one before
        self._halos: dict[int, PyTree] = {}
        self._stamps: Wanted = {}
        self._hosts: dict[str, str] = {}
        self._where: dict[int, str] = {}

    def publish(self, rows: Halos, stamp: int) -> None:
        """Show others the newest rows of some shards."""
        if self._exports is not None:
            for b, own in rows.items():
                self._editions[b] = (stamp, own), *self._editions.get(b, ())[:1]

    def withdraw(self, shards: Iterable[int]) -> None:
        """Show the rows of some shards no more."""
        for b in shards:
            self._editions.pop(b, None)

    def offered(self, wanted: Wanted, as_of: float) -> Offer:
        """Return rows of own shards as they were, where the reader has others."""
        assert self._exports is not None
        offer: Offer = {}
        for (b, c), known in wanted.items():
            editions = self._editions[c]
            stamp, rows = next((edition for edition in editions if edition[0] <= as_of), editions[-1])
            if stamp != known:
                _, which = self._exports.seam(b).sources[c]
                offer[b, c] = stamp, jax.tree.map(lambda leaf, which=which: leaf[which], rows)
        return offer

    def halos(self, shards: Iterable[int], moment: Moment) -> tuple[Halos, Moved]:
        """Return the rows that some shards read, and how many bytes had to move; raises `Unreachable`."""
        if moment.peers is not None:
            self._hosts = {address: key for address, (key, _) in moment.peers.items()}
            self._where = {c: address for address, (_, own) in moment.peers.items() for c in own}
        if self._exports is None:
            return dict.fromkeys(shards), Moved(0, 0)
        shards = list(shards)
        wanted: dict[str, Wanted] = {HERE: {}}
        for b in shards:
            for c in self._exports.seam(b).sources:
                wanted.setdefault(self._where.get(c, HERE), {})[b, c] = self._stamps.get((b, c), NEVER)
        within = self.offered(wanted.pop(HERE), moment.as_of)
        between = self._asked(wanted, moment.as_of)
        for offer in (within, *between):
            for (b, c), (stamp, rows) in offer.items():
                size, sources, _ = self._exports.seam(b)
                if b not in self._halos:
                    self._halos[b] = jax.tree.map(lambda leaf, n=size: np.empty((n, *leaf.shape[1:]), leaf.dtype), rows)
                place, _ = sources[c]
                jax.tree.map(lambda leaf, new, place=place: leaf.__setitem__(place, new), self._halos[b], rows)
                self._stamps[b, c] = stamp
        orders = {b: self._exports.seam(b).order for b in shards}
        halos = {b: jax.tree.map(lambda leaf, b=b: leaf[orders[b]], self._halos[b]) for b in shards}
        return halos, Moved(sum(map(_bytes, between)), _bytes(within))

    def _asked(self, wanted: dict[str, Wanted], as_of: float) -> list[Offer]:
        """Return what other workers offer, all being asked at once."""
        if not wanted:
            return []
        from distributed import get_worker
        from distributed.protocol import to_serialize
        from distributed.utils import sync

        worker = get_worker()

        async def ask(address: str, rows: Wanted) -> Any:
            question = {"actor": self._hosts[address], "function": "offered", "kwargs": {}}
            try:
                asked = worker.rpc(address).actor_execute(args=[to_serialize(rows), as_of], **question)
                answer = await asyncio.wait_for(asked, self._patience)
            except Exception as error:  # whatever happens on the way, the client has to judge who is lost
                raise Unreachable(address, repr(error)) from None
            if answer["status"] != "OK":
                raise Unreachable(address, repr(answer["exception"]))
            return answer["result"]

        async def ask_all() -> list[Any]:
            return await asyncio.gather(*[ask(address, rows) for address, rows in sorted(wanted.items())])

        return sync(worker.loop, ask_all)


def _bytes(offer: Offer) -> int:
    return sum(leaf.nbytes for _, rows in offer.values() for leaf in jax.tree.leaves(rows))
