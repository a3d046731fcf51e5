"""What runs on a cluster's worker: a host whose shards come and go, in the worker's memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from pdvi.core.problem import Problem
from pdvi.executors.host import Host
from pdvi.shards.store import Store

PyTree = Any


class WorkerHost(Host):
    """A host that is told which shards are its own, and keeps everything in its memory."""

    def __init__(self, problem: Problem, solver: Any):
        super().__init__(problem, solver, [], {}, {})
        self._last_penalty: Any = None

    def ask(self, method: str, wide: bool, *arguments: Any) -> Any:
        """The answer of a method, or why there is none."""
        try:
            with jax.enable_x64(wide):
                return getattr(self, method)(*arguments)
        except Exception as error:
            return Failure(error)

    def begin_with(self, shards: list[int], key: Any, lam: Any, locals_: Any) -> Any:
        """Begin with these shards, besides those it has."""
        self._own(shards)
        return self.begin(jax.random.wrap_key_data(key), lam, locals_, shards)

    def visit(self, batch: Any, lam0: Any, penalty: Any, halos: Any) -> Any:
        """As `Host`; without a penalty, under the last one."""
        self._last_penalty = self._last_penalty if penalty is None else penalty
        return super().visit(batch, lam0, self._last_penalty, halos)

    def restart(self, key: Any, shards: Any) -> Any:
        """As `Host`, with these shards and no others: what interrupted a run may have cut short their moving."""
        self.shards = list(shards)
        return super().restart(jax.random.wrap_key_data(key), shards)

    def rebuild(self, lam: Any, halos: Any, shards: Any, settle: bool = True) -> Any:
        """As `Host`."""
        return super().rebuild(lam, halos, shards, settle=settle)

    def adopt(self, shards: list[int], key: Any, lam: Any, halos: Any) -> Any:
        """Take over shards whose worker was lost."""
        self._own(shards)
        super().restart(jax.random.wrap_key_data(key), shards)
        return self.rebuild(lam, halos, shards)

    def release(self, shards: list[int]) -> Any:
        """Give shards away, with all that is theirs."""
        self.shards = [b for b in self.shards if b not in shards]
        return {b: jax.tree.map(np.asarray, (self.local.pop(b), self.pair.pop(b))) for b in shards}

    def accept(self, shards: list[int], parcel: Any) -> None:
        """Take what another worker gave away."""
        self._own(shards)
        for b in shards:
            self.local[b], self.pair[b] = parcel[b]

    def _own(self, shards: list[int]) -> None:
        self.shards = self.shards + [b for b in shards if b not in self.shards]

    def local_of(self, b: int) -> tuple[int, PyTree]:
        """The local variables of one shard."""
        return b, jax.tree.map(np.asarray, self.local[b])


class Failure(NamedTuple):
    """An error in the work, which is not one of the worker."""

    error: Exception


def make_host(path: str, model: Any, solver: Any, wide: bool) -> WorkerHost:
    """A host without shards yet. ``wide``: in double precision, as its client."""
    with jax.enable_x64(wide):
        return WorkerHost(Problem(model, Store(path, verify=False)), solver)


def awake() -> bool:
    """What a worker that can answer answers."""
    return True
