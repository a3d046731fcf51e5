"""Shards of a store on the device, the next being read while one is worked on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from pdvi._base.types import PyTree
from pdvi.shards.stacking import to_device
from pdvi.shards.store import Store


class Reader:
    """A store's shards on the device: up to ``keep`` bytes stay there, the others are read ahead by one."""

    def __init__(self, store: Store, keep: float = float("inf")):
        self.store = store
        self.room = keep
        self._kept: dict[int, PyTree] = {}
        self._checked: set[int] = set()
        self._queue: deque[int] = deque()
        self._ahead: tuple[int, Future[PyTree]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pdvi-read-ahead")

    def expect(self, order: Iterable[int]) -> None:
        """Take notice of the shards that will be asked for next."""
        self._queue = deque(order)
        if self._ahead is None:
            self._read_ahead()

    def __getitem__(self, b: int) -> PyTree:
        if b in self._kept:
            return self._kept[b]
        if self._ahead is not None and self._ahead[0] == b:
            raw = self._ahead[1].result()
            self._ahead = None
        else:
            raw = self._read(b)
        if self._queue and self._queue[0] == b:
            self._queue.popleft()
        if self._ahead is None:
            self._read_ahead()
        shard = jax.tree.map(to_device, raw)
        if self.room >= self.store.shard_bytes:
            self.room -= self.store.shard_bytes
            self._kept[b] = shard
        return shard

    def _read_ahead(self) -> None:
        while self._queue and self._queue[0] in self._kept:
            self._queue.popleft()
        if self._queue:
            b = self._queue.popleft()
            self._ahead = b, self._thread.submit(self._read, b)

    def _read(self, b: int) -> PyTree:
        shard = self.store.read(b, check=b not in self._checked)
        self._checked.add(b)
        return shard
