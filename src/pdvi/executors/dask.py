"""Shards on the workers of a dask cluster: lam0 goes out, sums and halo rows come back, data never travels.

A worker that dies or hangs costs one re-read of its shards: others take them over from the store, with phi from
lam0, mu = - grad_lam f_b, and h rebuilt from all duals. The step in which it happened counts the visits that were
answered, which Algorithm 1 allows for any step.
"""

from __future__ import annotations

import pickle
import time
import warnings
from collections import deque
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdvi.core.problem import Problem
from pdvi.executors.host import Measured, add_up, local_shape
from pdvi.executors.scratch import Scratch
from pdvi.executors.server import NoShards, Server, begin, update
from pdvi.executors.worker import Failure, awake, make_host

Array = jax.Array
PyTree = Any
Flying = dict[Any, tuple[str, float]]  # answers to come, from whom and since when
Calls = dict[str, tuple]  # what each worker is asked: a method of `WorkerHost`, and its arguments

POLL = 0.5  # seconds after which a silent worker is looked for among the living
PAUSE = 0.0005  # seconds between two looks for an answer
VISITS = "visit", "explore"  # whose bytes are counted
OPENING = 4  # times the timeout, for a worker's first call: it imports, reads and compiles


@dataclass
class Traffic:
    """Bytes of visits on the wire, and their number."""

    sent: int = 0
    received: int = 0
    visits: int = 0


class Dask(Server):
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
        if not timeout > 0:
            msg = f"`timeout` must be a positive number of seconds, got {timeout!r}."
            raise ValueError(msg)
        self.client, self.asynchronous, self.timeout = client, asynchronous, timeout
        self.traffic = Traffic()
        self._forget()

    def _forget(self) -> None:
        self._hosts: dict[str, Any] = {}  # the future of each worker's host; with it goes its memory
        self._actors: dict[str, Any] = {}  # the hosts themselves, to be asked
        self._owned: dict[str, list[int]] = {}
        self._orphans: set[int] = set()
        self._silent: dict[str, Any] = {}  # workers that did not answer, and the future that tells if they wake up
        self._penalty: dict[str, np.ndarray] = {}  # what each worker was last told
        self._rebuilt, self._looked = False, 0.0
        self._patience = OPENING * self.timeout  # seconds to wait for workers when there are none

    # ------------------------------------------------------------------------------------ what a server is asked

    def run(self, problem: Problem, solver: Any, state: Any, batches: np.ndarray) -> Any:
        """``state`` after one step per row of ``batches``."""
        self._share_with_newcomers(state.lam)
        return super().run(problem, solver, state, batches)

    def _run(self, problem: Problem, solver: Any, state: Any, batches: np.ndarray) -> Any:
        run = self._run_asynchronously if self.asynchronous else super()._run
        return run(problem, solver, state, batches)

    def interrupted(self) -> None:
        """Ctrl-C at a terminal ends a local cluster's workers too, and no others will come."""
        self._patience = 0.0

    def close(self) -> None:
        """Let the workers forget the run: at once, not when the garbage of this process is collected."""
        self.client.cancel(list(self._hosts.values()), force=True)
        self._forget()

    def local_params(self, state: Any) -> PyTree:
        """The local variables of all shards, fetched one by one into a memory-mapped file; None if nobody has them."""
        try:
            return self._fetch(state)
        except NoShards:
            msg = "all workers are gone: the result has no local variables; start workers, and go on with start=result."
            warnings.warn(msg, stacklevel=2)
            return None

    def _fetch(self, state: Any) -> PyTree:
        kept = Scratch(local_shape(self.problem), self.problem.n_shards)
        missing = set(range(self.problem.n_shards))
        while missing:
            calls = {a: ("local_of", b) for a, own in self._owned.items() for b in own if b in missing}
            for b, local in self._ask(calls).values():
                kept[b] = local
                missing.remove(b)
            self._recover(state.lam)
        return kept.stacked()

    def _open(self, template: PyTree, lam: Array, local: PyTree, batch_size: int) -> None:
        self.close()
        self._lam = np.asarray(lam)
        self._orphans = set(range(self.problem.n_shards))
        key = np.asarray(jax.random.key_data(self.key))
        self._hand_out(lambda shards: ("begin_with", shards, key, self._lam, _rows(local, shards)))

    def _visit(self, batch: np.ndarray, state: Any) -> tuple[Any, int]:
        return self._together(batch, lambda address, shards: self._visit_call(address, shards, state))

    def _look(self, batch: np.ndarray, stepper: Any, state: Any) -> tuple[PyTree, int]:
        self._lam = np.asarray(state.lam)
        return self._together(
            batch, lambda _, shards: ("explore", shards, self._lam, stepper, self.boundary.halos(shards))
        )

    def _together(self, batch: np.ndarray, call: Any) -> tuple[PyTree, int]:
        """Every worker's part of a batch: the sum of what they answered (None: nobody did), and for how many shards."""
        chosen = set(batch.tolist())
        shares = {a: [b for b in own if b in chosen] for a, own in self._owned.items()}
        calls = {a: call(a, shards) for a, shards in shares.items() if shards}
        self.traffic.visits += sum(len(shares[address]) for address in calls)
        parts, count = [], 0
        for address, (part, rows) in sorted(self._ask(calls).items()):
            self._take_in(part, rows)
            parts.append(part)
            count += len(shares[address])
        self._recover(self._lam)
        return add_up(parts) if parts else None, count

    def _visit_call(self, address: str, shards: list[int], state: Any) -> tuple:
        """The call of a visit; a penalty is sent only when it is new."""
        penalty = np.asarray(state.penalty)
        known = np.array_equal(self._penalty.get(address, ()), penalty)
        self._penalty[address] = penalty
        self._lam = np.asarray(state.lam0)
        return "visit", shards, self._lam, None if known else penalty, self.boundary.halos(shards)

    def _take_in(self, part: PyTree, rows: PyTree) -> None:
        """What a visit gave: the rows that others read; the sum is for the caller."""
        self.traffic.received += len(pickle.dumps((part, rows), protocol=5))
        self.boundary.publish(rows)

    def _statistics(self) -> PyTree:
        answers = self._everywhere(lambda own: ("statistics", self.boundary.halos(own)))
        return add_up([answers[address] for address in sorted(answers)])

    def _curvature(self, lam: Array, shards: np.ndarray) -> np.ndarray:
        wanted = set(shards.tolist())

        def call(own: list[int]) -> tuple:
            own = [b for b in own if b in wanted]
            return "curvature", np.asarray(lam), self.boundary.halos(own), own

        return np.sum(list(self._everywhere(call).values()), axis=0)

    def _restart(self) -> None:
        key = np.asarray(jax.random.key_data(self.key))
        for rows in self._everywhere(lambda own: ("restart", key, own)).values():
            self.boundary.publish(rows)

    def _rebuild(self, lam: Array, *, settle: bool) -> None:
        self._lam = np.asarray(lam)
        for rows in self._everywhere(
            lambda own: ("rebuild", self._lam, self.boundary.halos(own), own, settle)
        ).values():
            self.boundary.publish(rows)

    def _evaluate(self, lam: Array) -> Measured:
        answers = self._everywhere(lambda own: ("evaluate", np.asarray(lam), self.boundary.halos(own)))
        losses = {b: loss for found in answers.values() for b, loss in found.losses.items()}
        ordered = [answers[address] for address in sorted(answers)]
        return Measured(losses, np.sum([f.gradient for f in ordered], axis=0), sum(f.disagreement for f in ordered))

    def _dual(self) -> np.ndarray:
        answers = self._everywhere(lambda own: ("dual",))
        return np.sum([answers[address] for address in sorted(answers)], axis=0)

    def _disturbed(self) -> bool:
        rebuilt, self._rebuilt = self._rebuilt, False
        return rebuilt

    # ------------------------------------------------------------------------------------ asking the workers

    def _run_asynchronously(self, problem: Problem, solver: Any, state: Any, batches: np.ndarray) -> Any:
        """Every worker has one visit under way; each answer updates the globals."""
        state = self._tidy(state)
        waiting, centres = deque(batches.ravel().tolist()), {}
        flying: Flying = {}
        begun = 0
        while waiting or flying:
            busy = {address for address, _ in flying.values()}
            for address, own in self._owned.items():
                turn = next((b for b in waiting if b in own), None)
                if address not in busy and turn is not None:
                    waiting.remove(turn)
                    if begun % batches.shape[1] == 0:  # a step of the solver's own count
                        state = begin(problem, solver, state, batches.shape[1])
                    begun += 1
                    centres[address] = np.asarray(state.lam0)
                    self.traffic.visits += 1
                    flying |= self._submit({address: self._visit_call(address, [turn], state)})
            for address, (gap, rows) in self._arrivals(flying, self.timeout).items():
                self._take_in(gap, rows)
                state = update(state, jnp.asarray(gap), 1, problem.n_shards, jnp.asarray(centres[address]))
            self._recover(state.lam0)
            if self._disturbed():
                state = self._tidy(state)
        return self._tidy(state)

    def _everywhere(self, call: Any) -> dict[str, Any]:
        """Answers from the workers of all shards: if some are lost on the way, their heirs are asked in turn."""
        while True:
            answers = self._ask({address: call(own) for address, own in self._owned.items()})
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
            if method in VISITS:
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

        began = time.monotonic()
        while address in self._hosts and address not in self._actors:
            try:
                self._actors[address] = self._hosts[address].result(timeout=POLL)
            except TimeoutError:
                late = time.monotonic() - began > OPENING * self.timeout
                if late or address not in self.client.nthreads():
                    self._lose(address, "did not start" if late else "is gone")
            except (KilledWorker, CancelledError):
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
        model = jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, self.problem.model)
        path = str(self.problem.store.path.absolute())  # type: ignore[union-attr]
        self._hosts[address] = self.client.submit(
            make_host, path, model, self.solver, _wide(), workers=[address], actor=True, pure=False
        )

    def _lose(self, address: str, why: str) -> None:
        if address not in self._owned:
            return
        shards = self._owned.pop(address)
        self._orphans |= set(shards)
        self.client.cancel([self._hosts.pop(address)], force=True)
        self._actors.pop(address, None)
        self._penalty.pop(address, None)
        if address in self.client.nthreads():  # silent, not gone: it may wake up
            self._silent[address] = self.client.submit(awake, workers=[address], pure=False)
        self.tell(f"worker {address} {why}: {len(shards)} shards rebuilt from the store")

    def _recover(self, lam: Any) -> None:
        """Find the orphans new workers, who rebuild them."""
        if self._orphans:
            lam, key = np.asarray(lam), np.asarray(jax.random.key_data(self.key))
            self._rebuilt = True
            self._hand_out(lambda shards: ("adopt", shards, key, lam, self.boundary.halos(shards)))

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


def _wide() -> bool:
    return jnp.result_type(float) == np.float64


def _rows(local: PyTree, shards: list[int]) -> Any:
    if local is None:
        return None
    return {b: jax.tree.map(lambda leaf, b=b: np.asarray(leaf[b]), local) for b in shards}
