"""Shards on the workers of a dask cluster: what visits are told goes out, sums and halo rows come back.

A worker that dies or hangs costs one re-read of its shards: others take them over from the store, with local variables
that fit lam and what the method recalls from these; the server's sums are then made anew. The step in which it happened
counts the visits that were answered, which Algorithm 1 allows for any step.
"""

from __future__ import annotations

import pickle
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.checks import positive
from pdvi._base.types import PyTree
from pdvi.core.executor import NoShards, Step, updated
from pdvi.core.solver import Reader, Solver, State, Visitor
from pdvi.executors.host import add_up, total
from pdvi.executors.remote import Remote
from pdvi.executors.scratch import Scratch
from pdvi.executors.worker import AS_BEFORE, Brief, Failure, awake, make_host

Flying = dict[Any, tuple[str, float]]  # answers to come, from whom and since when
Calls = dict[str, tuple[Any, ...]]  # what each worker is asked: a method of `WorkerHost`, and its arguments

POLL = 0.5  # seconds after which a silent worker is looked for among the living
PAUSE = 0.0005  # seconds between two looks for an answer
VISIT = "visit_as"  # whose bytes are counted
OPENING = 4  # times the timeout, for a worker's first call: it imports, reads and compiles


@dataclass
class Traffic:
    """Bytes of visits on the wire, and their number."""

    sent: int = 0
    received: int = 0
    visits: int = 0


class Dask(Remote):
    """Works on a problem from a store with the workers of a `distributed.Client`.

    Every worker must see the store under the same path. Workers may come and go: those that join get their share of
    the shards at the next log point, those that are lost are replaced, and the trace tells both (column ``event``).
    A checkpoint holds the global state; see `Disk`.

    Parameters
    ----------
    client
        any: local processes, SLURM, Kubernetes, a cloud.
    asynchronous
        do not wait for a whole batch: every answer updates the globals at once. No worker waits for a slower one; the
        order of visits, and so the course of the run, then depends on who is fast.
    timeout
        seconds after which a worker that does not answer is taken for lost. It must cover the work between two
        answers: a worker's part of a batch, and of one evaluation of all its shards.
    """

    def __init__(self, client: Any, *, asynchronous: bool = False, timeout: float = 300.0):
        try:
            import distributed
        except ImportError as error:
            msg = 'the executor Dask needs dask and distributed; install them with: pip install "pdvi[dask]"'
            raise ImportError(msg) from error
        if not isinstance(client, distributed.Client) or client.asynchronous:
            msg = f"`client` must be a (synchronous) distributed.Client, got {type(client).__name__}."
            raise ValueError(msg)
        self.client, self.asynchronous, self.timeout = client, asynchronous, positive("timeout", timeout)
        self.traffic = Traffic()
        self._forget()

    def _forget(self) -> None:
        self._hosts: dict[str, Any] = {}  # the future of each worker's host; with it goes its memory
        self._actors: dict[str, Any] = {}  # the hosts themselves, to be asked
        self._owned: dict[str, list[int]] = {}
        self._orphans: set[int] = set()
        self._silent: dict[str, Any] = {}  # workers that did not answer, and the future that tells if they wake up
        self._known: dict[str, dict[int, PyTree]] = {}  # what each worker was last told, by the thing it was told for
        self._solver: bytes | None = None  # what recalls for the shards of lost workers
        self._rebuilt, self._looked = False, 0.0
        self._patience = OPENING * self.timeout  # seconds to wait for workers when there are none

    # ------------------------------------------------------------------------------------ what an executor is asked

    def begin(self, state: State, solver: Solver) -> State:
        """Keep for every shard what ``solver`` keeps at first."""
        self._solver, self._lam = _pickled(solver), np.asarray(state.lam)
        self._everywhere(lambda address, own: ("equip_for", self._brief(address, solver, state.server)))
        return state

    def run(self, solver: Solver, state: State, batches: np.ndarray) -> State:
        """Return the state after one step per row of ``batches``."""
        self._share_with_newcomers(state.lam)
        if self.asynchronous and solver.any_order:
            return self._run_asynchronously(solver, state, batches)
        return super().run(solver, state, batches)

    def visit(
        self, state: State, visitor: Visitor, told: Any, shards: np.ndarray | None = None
    ) -> tuple[State, PyTree, int]:
        """Visit these shards: every worker its part; those of a worker that is lost meanwhile are not counted."""
        if shards is None:
            return state, self._visit_all(state, visitor, told), self.problem.n_shards
        self._lam = np.asarray(state.lam)
        chosen = set(np.asarray(shards).tolist())
        shares = {a: [b for b in own if b in chosen] for a, own in self._owned.items()}
        calls = {a: self._visit_call(a, visitor, told, own) for a, own in shares.items() if own}
        self.traffic.visits += sum(len(shares[address]) for address in calls)
        parts, count = [], 0
        for address, (part, rows) in sorted(self._ask(calls).items()):
            self._take_in(part, rows)
            parts.append(part)
            count += len(shares[address])
        self._recover(self._lam)
        return state, add_up(parts), count

    def _visit_all(self, state: State, visitor: Visitor, told: Any) -> PyTree:
        """Visit all shards once, those of lost workers at their heirs."""
        self._lam = np.asarray(state.lam if state.server is not None else told)
        halos = self.boundary.halos(range(self.problem.n_shards))  # as they were before
        answers = self._everywhere(
            lambda address, own: (
                VISIT,
                self._brief(address, visitor, told),
                own,
                {b: halos[b] for b in own},
            )
        )
        for _, rows in answers.values():
            self.boundary.publish(rows)
        return add_up([answers[address][0] for address in sorted(answers)])

    def look(self, state: State, reader: Reader, told: Any, shards: np.ndarray | None = None) -> PyTree:
        """Return the sum of what ``reader`` says of these shards."""
        wanted = set(range(self.problem.n_shards) if shards is None else np.asarray(shards).tolist())

        def call(address: str, own: list[int]) -> tuple[Any, ...]:
            own = [b for b in own if b in wanted]
            return "look_as", self._brief(address, reader, told), own, self.boundary.halos(own)

        return self._total(call)

    def fold(self, state: State, function: Any, told: Any) -> PyTree:
        """Return the sum of ``function(told, own)`` over all shards."""
        return self._total(lambda address, own: ("fold_as", self._brief(address, function, told)))

    def fresh(self, state: State) -> State:
        """Set the local variables to those that the run began with."""
        key = np.asarray(jax.random.key_data(self.key))
        for rows in self._everywhere(lambda address, own: ("begin_again", own, key)).values():
            self.boundary.publish(rows)
        return state

    def disturbed(self) -> bool:
        """Return whether shards were rebuilt since the last call."""
        rebuilt, self._rebuilt = self._rebuilt, False
        return rebuilt

    def interrupted(self) -> None:
        """Wait for no new workers: Ctrl-C at a terminal ends a local cluster's workers too."""
        self._patience = 0.0

    def close(self) -> None:
        """Let the workers forget the run: at once, not when the garbage of this process is collected."""
        self.client.cancel(list(self._hosts.values()), force=True)
        self._forget()

    def local_params(self, state: State) -> PyTree:
        """Return the local variables of all shards, fetched one by one into a memory-mapped file; None if lost."""
        try:
            return self._fetch(state)
        except NoShards:
            msg = "all workers are gone: the result has no local variables; start workers, and go on with start=result."
            warnings.warn(msg, stacklevel=2)
            return None

    def _fetch(self, state: State) -> PyTree:
        kept = Scratch(self.problem.local_shape(), self.problem.n_shards)
        missing = set(range(self.problem.n_shards))
        while missing:
            calls = {a: ("local_of", b) for a, own in self._owned.items() for b in own if b in missing}
            for b, local in self._ask(calls).values():
                kept[b] = local
                missing.remove(b)
            self._recover(state.lam)
        return kept.stacked()

    def _open(self, template: PyTree, local: PyTree) -> None:
        self.close()
        self._lam = np.zeros(0)
        self._orphans = set(range(self.problem.n_shards))
        key = np.asarray(jax.random.key_data(self.key))
        self._hand_out(lambda shards: ("begin_with", shards, key, _rows(local, shards)))

    # ------------------------------------------------------------------------------------ what workers are told

    def _brief(self, address: str, thing: Any, told: Any) -> Brief:
        """Return what a worker has to know to do a thing, without what it knows from last time."""
        content = _pickled(thing)
        number = zlib.crc32(content)
        told = jax.tree.map(np.asarray, told)
        known = self._known.setdefault(address, {})
        before = known.get(number)
        known[number] = told
        if before is None:
            return Brief(number, content, told)
        return Brief(number, None, jax.tree.map(lambda old, new: AS_BEFORE if _same(old, new) else new, before, told))

    def _visit_call(self, address: str, visitor: Visitor, told: Any, shards: list[int]) -> tuple[Any, ...]:
        return VISIT, self._brief(address, visitor, told), shards, self.boundary.halos(shards)

    def _take_in(self, part: PyTree, rows: PyTree) -> None:
        """Take the rows that others read from what a visit gave; the sum is for the caller."""
        self.traffic.received += len(pickle.dumps((part, rows), protocol=5))
        self.boundary.publish(rows)

    # ------------------------------------------------------------------------------------ asking the workers

    def _run_asynchronously(self, solver: Solver, state: State, batches: np.ndarray) -> State:
        """Let every worker have one visit under way; each answer updates the globals."""
        state = self.tidied(state, solver)
        waiting, said = deque(batches.ravel().tolist()), {}
        flying: Flying = {}
        begun = 0
        while waiting or flying:
            busy = {address for address, _ in flying.values()}
            for address, own in self._owned.items():
                turn = next((b for b in waiting if b in own), None)
                if address not in busy and turn is not None:
                    waiting.remove(turn)
                    if begun % batches.shape[1] == 0:  # a step of the solver's own count
                        server = solver.before_step(self.problem, state.server, batches.shape[1])
                        state = state._replace(server=server)
                    begun += 1
                    said[address] = solver.tell(state.server)
                    self._lam = np.asarray(state.lam)
                    self.traffic.visits += 1
                    flying |= self._submit({address: self._visit_call(address, Step(solver), said[address], [turn])})
            for address, (message, rows) in self._arrivals(flying, self.timeout).items():
                self._take_in(message, rows)
                server = updated(self.problem, solver, state.server, message, 1, said[address])
                state = state._replace(server=server)
            self._recover(self._lam)
            if self.disturbed():
                state = self.tidied(state, solver)
        return self.tidied(state, solver)

    def _total(self, call: Callable[[str, list[int]], tuple[Any, ...]]) -> PyTree:
        """Return the sum of the workers' answers, in an order that does not depend on who is fast."""
        answers = self._everywhere(call)
        return total(answers[address] for address in sorted(answers))

    def _everywhere(self, call: Callable[[str, list[int]], tuple[Any, ...]]) -> dict[str, Any]:
        """Return answers from the workers of all shards: if some are lost on the way, their heirs are asked in turn."""
        while True:
            answers = self._ask({address: call(address, own) for address, own in self._owned.items()})
            if not self._orphans:
                return answers
            self._recover(self._lam)

    def _ask(self, calls: Calls, patience: float = 1) -> dict[str, Any]:
        """What the workers answered; the shards of those that did not are orphans."""
        flying = self._submit(calls)
        answers: dict[str, Any] = {}
        while flying:
            answers |= self._arrivals(flying, patience * self.timeout)
        return answers

    def _submit(self, calls: Calls) -> Flying:
        """Ask, directly from here to the worker: a scheduled task would take several times as long to arrive."""
        flying: Flying = {}
        for address, (method, *arguments) in calls.items():
            actor = self._actor(address)
            if actor is None:
                continue
            try:
                flying[actor.ask(method, _wide(), *arguments)] = address, time.monotonic()
            except RuntimeError:  # known to be lost before it was asked
                self._lose(address, "is gone")
            if method == VISIT:
                self.traffic.sent += len(pickle.dumps(arguments, protocol=5))
        return flying

    def _arrivals(self, flying: Flying, timeout: float) -> dict[str, Any]:
        """Wait until at least one worker answered or is lost; take all that are done out of ``flying``."""
        answers: dict[str, Any] = {}
        orphans = len(self._orphans)
        while flying and not answers and len(self._orphans) == orphans:
            self._look_after(flying, timeout)
            for future in [future for future in flying if future.done()]:
                address, _ = flying.pop(future)
                try:
                    answers[address] = future.result()
                except Exception:  # on the way; an error in the work itself comes as a Failure
                    self._lose(address, "is gone")
            if not answers:
                time.sleep(PAUSE)
        for answer in answers.values():
            if isinstance(answer, Failure):
                raise answer.error
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

    def _actor(self, address: str) -> Any:
        """A worker's host; None if the worker is lost before it has one."""
        from distributed import KilledWorker
        from distributed.comm import CommClosedError

        began = time.monotonic()
        while address in self._hosts and address not in self._actors:
            try:
                self._actors[address] = self._hosts[address].result(timeout=POLL)
            except TimeoutError:
                late = time.monotonic() - began > OPENING * self.timeout
                if late or address not in self.client.nthreads():
                    self._lose(address, "did not start" if late else "is gone")
            except (KilledWorker, CancelledError, CommClosedError, UnboundLocalError):
                # the last is distributed's own, where a worker goes while its answer is waited for
                self._lose(address, "is gone")
        return self._actors.get(address)

    # ------------------------------------------------------------------------------------ workers that come and go

    def _workers(self) -> list[str]:
        """Those that can be given work, the least loaded first."""
        living = [address for address in self.client.nthreads() if address not in self._silent]
        return sorted(living, key=lambda address: (len(self._owned.get(address, ())), address))

    def _shares(self, shards: Any) -> dict[str, list[int]]:
        """Neighbouring shards to the same worker, as many to each as makes all equal."""
        began = time.monotonic()
        while not (workers := self._workers()):
            if time.monotonic() - began > self._patience:
                msg = "no worker is left; start workers, and go on from the checkpoint with start=<its path>."
                raise NoShards(msg)
            time.sleep(POLL)
        shards = sorted(shards)
        total = len(shards) + sum(len(self._owned.get(address, ())) for address in workers)
        shares, begin_at = {}, 0
        for number, address in enumerate(workers):
            fair = (total * (number + 1)) // len(workers) - (total * number) // len(workers)
            size = max(0, fair - len(self._owned.get(address, ())))
            size = len(shards) - begin_at if number == len(workers) - 1 else min(size, len(shards) - begin_at)
            if size:
                shares[address] = shards[begin_at : begin_at + size]
            begin_at += size
        return shares

    def _engage(self, address: str) -> None:
        """Begin a worker's part: an empty host."""
        if address in self._hosts:
            return
        self._owned.setdefault(address, [])
        model = _as_numpy(self.problem.model)
        path = str(self.problem.store.path.absolute())  # type: ignore[union-attr]
        self._hosts[address] = self.client.submit(
            make_host, path, model, _wide(), workers=[address], actor=True, pure=False
        )

    def _lose(self, address: str, why: str) -> None:
        if address not in self._owned:
            return
        shards = self._owned.pop(address)
        self._orphans |= set(shards)
        self.client.cancel([self._hosts.pop(address)], force=True)
        self._actors.pop(address, None)
        self._known.pop(address, None)
        if address in self.client.nthreads():  # silent, not gone: it may wake up
            self._silent[address] = self.client.submit(awake, workers=[address], pure=False)
        self.tell(f"worker {address} {why}: {len(shards)} shards rebuilt from the store")

    def _recover(self, lam: Any) -> None:
        """Find the orphans new workers, who rebuild them."""
        if self._orphans:
            lam, key, solver = np.asarray(lam), np.asarray(jax.random.key_data(self.key)), self._solver
            self._rebuilt = True
            self._hand_out(lambda shards: ("adopt", shards, key, lam, self.boundary.halos(shards), solver))

    def _hand_out(self, call: Any) -> None:
        """Ask workers to take the orphans; if some are lost with theirs, ask others, until all are taken."""
        while self._orphans:
            shares = self._shares(self._orphans)
            for address, shards in shares.items():
                self._engage(address)
                self._owned[address] = self._owned[address] + shards
            self._orphans = set()
            for rows in self._ask({a: call(shards) for a, shards in shares.items()}, patience=OPENING).values():
                self.boundary.publish(rows)

    def _share_with_newcomers(self, lam: Any) -> None:
        """Move shards, with all that is theirs, from worker to worker until new ones have their part."""
        self._silent = {address: woken for address, woken in self._silent.items() if not woken.done()}
        for new in [address for address in self._workers() if address not in self._owned]:
            fair = self.problem.n_shards // (len(self._owned) + 1)
            if fair == 0:
                return
            self._engage(new)
            while len(self._owned.get(new, range(fair))) < fair:
                giver = max(self._owned, key=lambda address: len(self._owned[address]))
                size = min(fair - len(self._owned[new]), max(1, len(self._owned[giver]) - fair))
                self._move(giver, new, self._owned[giver][-size:])
                self._recover(lam)
            self.tell(f"worker {new} joined: {len(self._owned.get(new, ()))} shards moved to it")

    def _move(self, giver: str, taker: str, shards: list[int]) -> None:
        parcel = self._ask({giver: ("release", shards)}).get(giver)
        if parcel is not None:
            self._owned[giver] = [b for b in self._owned[giver] if b not in shards]
            self._owned[taker] = self._owned[taker] + shards
            self._ask({taker: ("accept", shards, parcel)})


def _pickled(thing: Any) -> bytes:
    import cloudpickle  # comes with distributed; also for what is defined in a user's script

    return cloudpickle.dumps(_as_numpy(thing))


def _as_numpy(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def _same(old: np.ndarray, new: np.ndarray) -> bool:
    return old.dtype == new.dtype and np.array_equal(old, new)


def _wide() -> bool:
    return jnp.result_type(float) == np.float64


def _rows(local: PyTree, shards: list[int]) -> Any:
    if local is None:
        return None
    return {b: jax.tree.map(lambda leaf, b=b: np.asarray(leaf[b]), local) for b in shards}
