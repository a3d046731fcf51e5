"""The workers of a cluster that have shards: they are asked, they get lost, others come.

The shards of a worker that dies or hangs are orphans until they are placed again. A worker that another could not reach
is lost if it does not answer the client either; if it does, the network is at fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import PyTree
from pdvi.core.executor import NoShards
from pdvi.core.problem import Problem
from pdvi.executors.exchange import Peers, Unreachable, exports_of
from pdvi.executors.worker import Failure, make_host
from pdvi.shards.store import Store

Flying = dict[Any, tuple[str, float]]  # answers to come, from whom and since when
Calls = dict[str, tuple[Any, ...]]  # what each worker is asked: a method of `WorkerHost`, and its arguments

POLL = 0.5  # seconds after which a silent worker is looked for among the living
PAUSE = 0.0005  # seconds between two looks for an answer
OPENING = 4  # times the timeout, for a worker's first call: it imports, reads and compiles
ASKING = 0.5  # of the timeout, for a worker that asks another; half as long again is left to judge who is lost


@dataclass
class Member:
    """A worker with shards, and what it was told."""

    host: Any  # a future; with it goes the worker's memory
    actor: Any = None  # the host itself, to be asked
    shards: list[int] = field(default_factory=list)
    known: dict[int, PyTree] = field(default_factory=dict)  # what it was last told, by the thing it was told for
    version: int = 0  # of who has what, when it was last told


class Crew:
    """Workers that come and go. ``tell`` keeps a note for the trace."""

    def __init__(self, client: Any, timeout: float, tell: Callable[[str], None]):
        self.client, self.timeout, self._tell = client, timeout, tell
        self.members: dict[str, Member] = {}
        self.orphans: set[int] = set()
        self.patience = OPENING * timeout  # seconds to wait for workers when there are none
        self._silent: dict[str, Any] = {}  # workers that did not answer, and the future that tells if they wake up
        self._looked = 0.0
        self._version = 0  # of who has what
        self._host: tuple[Any, ...] = ()
        self._read: list[set[int]] = []  # by shard: those whose rows it reads

    def begin(self, problem: Problem, store: Store) -> None:
        """Take on a problem, all of whose shards are orphans."""
        exports, is_wide = exports_of(problem, store), jnp.result_type(float) == np.float64
        self._host = str(store.path.absolute()), as_numpy(problem.model), is_wide, ASKING * self.timeout
        n_shards = problem.n_shards
        self._read = [set() if exports is None else exports.sources(b) for b in range(n_shards)]
        self.orphans = set(range(n_shards))

    def dismiss(self) -> None:
        """Let the workers forget everything: at once, not when the garbage of this process is collected."""
        self.client.cancel([member.host for member in self.members.values()], force=True)
        self.members = {}

    # ------------------------------------------------------------------------------------ asking

    def ask(self, calls: Calls, patience: float = 1) -> dict[str, Any]:
        """Return what the workers answered; the shards of those that are lost are orphans."""
        flying = self.submit(calls)
        answers: dict[str, Any] = {}
        while flying:
            answers |= self.arrivals(flying, patience * self.timeout)
        return answers

    def submit(self, calls: Calls) -> Flying:
        """Ask, directly from here to the worker: a scheduled task would take several times as long to arrive."""
        flying: Flying = {}
        for address, (method, *arguments) in calls.items():
            actor = self._actor(address)
            if actor is None:
                continue
            try:
                flying[getattr(actor, method)(*arguments)] = address, time.monotonic()
            except RuntimeError:  # known to be lost before it was asked
                self._lose(address, "is gone")
        return flying

    def arrivals(self, flying: Flying, timeout: float | None = None) -> dict[str, Any]:
        """Wait until at least one worker answered or is lost; take all that are done out of ``flying``."""
        timeout = self.timeout if timeout is None else timeout
        answers: dict[str, Any] = {}
        done = 0
        lost = len(self.orphans)
        while flying and not done and len(self.orphans) == lost:
            self._look_after(flying, timeout)
            for future in [future for future in flying if future.done()]:
                address, _ = flying.pop(future)
                done += 1
                try:
                    answers[address] = future.result()
                except Exception:  # on the way; an error in the work itself comes as a Failure
                    self._lose(address, "is gone")
            if not done:
                time.sleep(PAUSE)
        for address, answer in list(answers.items()):
            if isinstance(answer, Failure):
                raise answer.error
            if isinstance(answer, Unreachable):
                del answers[address]
                self._judge(address, answer)
        return answers

    def _look_after(self, flying: Flying, timeout: float) -> None:
        """Now and then: lose the workers that are gone, or late."""
        if time.monotonic() - self._looked < POLL:
            return
        living, self._looked = self.client.nthreads(), time.monotonic()
        for future, (address, since) in list(flying.items()):
            late = self._looked - since > timeout
            if not future.done() and (address not in living or late):
                del flying[future]
                self._lose(address, f"did not answer within {timeout:g} s" if late else "is gone")

    def _judge(self, asker: str, failed: Unreachable) -> None:
        """Lose a worker that another could not reach, unless it answers here."""
        member = self.members.get(failed.address)
        if member is None:  # known to be lost
            return
        try:
            member.actor.awake().result(timeout=ASKING * self.timeout / 2)
        except Exception:
            gone = failed.address not in self.client.nthreads()
            self._lose(failed.address, "is gone" if gone else f"did not answer within {ASKING * self.timeout:g} s")
            return
        msg = (
            f"the workers of the cluster must reach each other, since rows at the seams of shards go from worker to "
            f"worker: {asker} could not ask {failed.address} ({failed.why}); open the workers' ports to each other, "
            "or start them with --contact-address."
        )
        raise RuntimeError(msg)

    def _actor(self, address: str) -> Any:
        """A worker's host; None if the worker is lost before it has one."""
        from distributed import KilledWorker
        from distributed.comm import CommClosedError

        began = time.monotonic()
        while (member := self.members.get(address)) is not None and member.actor is None:
            try:
                member.actor = member.host.result(timeout=POLL)
            except TimeoutError:
                late = time.monotonic() - began > OPENING * self.timeout
                if late or address not in self.client.nthreads():
                    self._lose(address, "did not start" if late else "is gone")
            except (KilledWorker, CancelledError, CommClosedError, UnboundLocalError):
                # the last is distributed's own, where a worker goes while its answer is waited for
                self._lose(address, "is gone")
            except RuntimeError:  # distributed's too, where it went before; any other is one of the work
                if address in self.client.nthreads():
                    raise
                self._lose(address, "is gone")
        return None if member is None else member.actor

    # ------------------------------------------------------------------------------------ who has what

    def peers(self, address: str) -> Peers | None:
        """Return where the shards are that a worker's shards read; None if it was told since a shard moved."""
        member = self.members[address]
        if member.version == self._version:
            return None
        member.version = self._version
        read = set().union(*(self._read[b] for b in member.shards))
        return {
            other: (their.host.key, own)
            for other, their in self.members.items()
            if other != address and (own := [b for b in their.shards if b in read])
        }

    def place(self) -> dict[str, list[int]]:
        """Give the orphans to workers; they have yet to be told."""
        began = time.monotonic()
        while not (workers := self._workers()):
            if time.monotonic() - began > self.patience:
                msg = "no worker is left; start workers, and go on from the checkpoint with start=<its path>."
                raise NoShards(msg)
            time.sleep(POLL)
        given = runs(self.orphans, {address: len(self._owned(address)) for address in workers})
        for address, shards in given.items():
            member = self.engage(address)
            member.shards = sorted(member.shards + shards)
        self.orphans = set()
        self._version += 1
        return given

    def move(self, giver: str, taker: str, shards: list[int]) -> None:
        """Note that a worker gave shards to another."""
        theirs, mine = self.members[giver], self.members[taker]
        theirs.shards = [b for b in theirs.shards if b not in shards]
        mine.shards = sorted(mine.shards + shards)
        self._version += 1

    def newcomers(self) -> list[str]:
        """Return the workers without shards, those included that were silent and woke up."""
        self._silent = {address: woken for address, woken in self._silent.items() if not woken.done()}
        return [address for address in self._workers() if address not in self.members]

    def engage(self, address: str) -> Member:
        """Return the member that a worker is: a new one has an empty host."""
        if address not in self.members:
            key = f"pdvi-{uuid4().hex}"  # the first word is what dashboards show
            host = self.client.submit(make_host, *self._host, workers=[address], actor=True, key=key)
            self.members[address] = Member(host)
        return self.members[address]

    def _workers(self) -> list[str]:
        """Those that can be given work, the least loaded first."""
        living = [address for address in self.client.nthreads() if address not in self._silent]
        return sorted(living, key=lambda address: (len(self._owned(address)), address))

    def _owned(self, address: str) -> list[int]:
        return self.members[address].shards if address in self.members else []

    def _lose(self, address: str, why: str) -> None:
        member = self.members.pop(address, None)
        if member is None:
            return
        self.orphans |= set(member.shards)
        self._version += 1
        self.client.cancel([member.host], force=True)
        if address in self.client.nthreads():  # silent, not gone: it may wake up
            self._silent[address] = self.client.submit(_awake, workers=[address], pure=False)
        self._tell(f"worker {address} {why}: {len(member.shards)} shards rebuilt from the store")


def runs(shards: Iterable[int], owned: dict[str, int]) -> dict[str, list[int]]:
    """Return who takes which of some shards, ``owned`` being how many all workers have.

    Everybody gets a run of them, since shards that follow each other in a store lie side by side, and all come to have
    as equal a number as what they have allows.
    """
    shards, before = sorted(shards), np.array(list(owned.values()))
    after = before.copy()
    for _ in shards:
        after[after.argmin()] += 1
    parts = np.split(np.array(shards), np.cumsum(after - before)[:-1])
    return {address: part.tolist() for address, part in zip(owned, parts) if len(part)}


def as_numpy(tree: Any) -> Any:
    """Return a pytree without arrays on a device."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def _awake() -> bool:
    return True
