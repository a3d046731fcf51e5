"""Shards on the workers of a dask cluster: lam0 goes out, sums and halo rows come back, data never travels.

A worker that dies or hangs costs one re-read of its shards: others take them over from the store, with phi from
lam0, mu = - grad_lam f_b, and h rebuilt from all duals. The step in which it happened counts the visits that were
answered, which Algorithm 1 allows for any step.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdvi.executors.host import Host, Measured, local_shape
from pdvi.executors.scratch import Scratch
from pdvi.executors.server import Server, begin, update
from pdvi.problem import Problem
from pdvi.store import Store

Array = jax.Array
PyTree = Any
Calls = dict[str, tuple]  # what each worker is asked: a method of `Host`, and its arguments

POLL = 0.5  # seconds after which a silent worker is looked for among the living
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
        self._happened: list[str] = []
        self._forget()

    def _forget(self) -> None:
        self._hosts: dict[str, Any] = {}  # the future of each worker's Host; with the last of it goes its memory
        self._owned: dict[str, list[int]] = {}
        self._orphans: set[int] = set()
        self._silent: dict[str, Any] = {}  # workers that did not answer, and the future that tells if they wake up
        self._penalty: dict[str, np.ndarray] = {}  # what each worker was last told
        self._rebuilt = False

    # ------------------------------------------------------------------------------------ what a server is asked

    def run(self, problem: Problem, solver: Any, state: Any, batches: np.ndarray) -> Any:
        """``state`` after one step per row of ``batches``."""
        self._share_with_newcomers(state.lam0)
        run = self._run_asynchronously if self.asynchronous else super().run
        return run(problem, solver, state, batches)

    def events(self) -> list[str]:
        """Workers lost and gained since the last call."""
        happened, self._happened = self._happened, []
        return happened

    def close(self) -> None:
        """Let the workers forget the run."""
        self._forget()

    def local_params(self, state: Any) -> PyTree:
        """The local variables of all shards, fetched one by one into a memory-mapped file."""
        kept = Scratch(local_shape(self.problem), self.problem.n_shards)
        missing = set(range(self.problem.n_shards))
        while missing:
            calls = {a: ("local_of", b) for a, own in self._owned.items() for b in own if b in missing}
            for b, local in self._ask(calls).values():
                kept[b] = local
                missing.remove(b)
            self._recover(state.lam0)
        return kept.stacked()

    def _open(self, template: PyTree, lam: Array, local: PyTree, batch_size: int) -> None:
        self._forget()
        self._template, self._lam = template, np.asarray(lam)
        self._orphans = set(range(self.problem.n_shards))
        for address, shards in self._shares(self._orphans).items():
            self._engage(address)
            self._owned[address] = shards
        self._orphans = set()
        key = np.asarray(jax.random.key_data(self.key))
        known = {a: _rows(local, own) for a, own in self._owned.items()}
        calls = {a: ("begin", own, key, self._lam, known[a]) for a, own in self._owned.items()}
        for rows in self._ask(calls, patience=OPENING).values():
            self.boundary.publish(rows)
        if self._orphans:
            msg = f"workers were lost while they read their shards: {'; '.join(self._happened)}; try again."
            raise RuntimeError(msg)

    def _visit(self, batch: np.ndarray, state: Any) -> tuple[Any, int]:
        chosen = set(batch.tolist())
        shares = {a: [b for b in own if b in chosen] for a, own in self._owned.items()}
        calls = {a: self._visit_call(a, shards, state) for a, shards in shares.items() if shards}
        gaps, count = [], 0
        for address, (gap, rows) in sorted(self._ask(calls).items()):
            self.boundary.publish(rows)
            gaps.append(gap)
            count += len(shares[address])
        self._recover(state.lam0)
        return np.sum(gaps, axis=0, dtype=float).astype(state.lam.dtype) if gaps else 0.0, count

    def _visit_call(self, address: str, shards: list[int], state: Any) -> tuple:
        """The call of a visit; a penalty is sent only when it is new."""
        penalty = np.asarray(state.penalty)
        known = np.array_equal(self._penalty.get(address, ()), penalty)
        self._penalty[address] = penalty
        self._lam = np.asarray(state.lam0)
        halos = self.boundary.halos(shards)
        self.traffic.visits += len(shards)
        return "visit", shards, self._lam, None if known else penalty, halos

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
        for rows in self._everywhere(lambda own: ("rebuild", self._lam, self.boundary.halos(own), own, settle)).values():
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
        waiting, flying, centres = deque(batches.ravel().tolist()), {}, {}
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
                    flying |= self._submit({address: self._visit_call(address, [turn], state)})
            for address, (gap, rows) in self._arrivals(flying, self.timeout).items():
                self.boundary.publish(rows)
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
        futures, answers = self._submit(calls), {}
        while futures:
            answers |= self._arrivals(futures, patience * self.timeout)
        return answers

    def _submit(self, calls: Calls) -> dict[Any, tuple[str, float]]:
        futures = {}
        wide = bool(jax.config.jax_enable_x64)
        for address, (method, *arguments) in calls.items():
            if method == "visit":
                self.traffic.sent += len(pickle.dumps(arguments, protocol=5))
            future = self.client.submit(
                _call, self._hosts[address], method, wide, *arguments, workers=[address], pure=False
            )
            futures[future] = address, time.monotonic()
        return futures

    def _arrivals(self, futures: dict[Any, tuple[str, float]], timeout: float) -> dict[str, Any]:
        """Wait until at least one worker answered or is lost; take all that are done out of ``futures``."""
        from distributed import wait

        answers: dict[str, Any] = {}
        while futures:
            try:
                wait(list(futures), timeout=POLL, return_when="FIRST_COMPLETED")
            except TimeoutError:
                living = self.client.nthreads()
                for future, (address, since) in list(futures.items()):
                    late = time.monotonic() - since > timeout
                    if address not in living or late:
                        del futures[future]
                        self._lose(address, f"did not answer within {timeout:g} s" if late else "is gone")
            for future in [future for future in futures if future.status != "pending"]:
                address, _ = futures.pop(future)
                answers |= self._answer(address, future)
            if answers or self._orphans:
                break
        return answers

    def _answer(self, address: str, future: Any) -> dict[str, Any]:
        """A worker's answer, if it still can be had: the worker may have died after giving it."""
        from distributed import KilledWorker

        began = time.monotonic()
        while future.status in ("finished", "pending"):
            try:
                answer = future.result(timeout=POLL)
            except TimeoutError:
                if address in self.client.nthreads() and time.monotonic() - began < self.timeout:
                    continue
                break
            except KilledWorker:
                break
            if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], np.ndarray):
                self.traffic.received += len(pickle.dumps(answer, protocol=5))
            return {address: answer}
        if future.status == "error" and not isinstance(future.exception(), KilledWorker):
            future.result()  # a fault of the work, not of the worker: raise it here
        self._lose(address, "is gone")
        return {}

    # ------------------------------------------------------------------------------------ workers that come and go

    def _workers(self) -> list[str]:
        """Those that can be given work, the least loaded first."""
        living = [address for address in self.client.nthreads() if address not in self._silent]
        return sorted(living, key=lambda address: (len(self._owned.get(address, ())), address))

    def _shares(self, shards: Any) -> dict[str, list[int]]:
        """Neighbouring shards to the same worker, as many to each as makes all equal."""
        began = time.monotonic()
        while not (workers := self._workers()):
            if time.monotonic() - began > OPENING * self.timeout:
                msg = "no worker is left; start workers, and go on from the checkpoint with start=<its path>."
                raise RuntimeError(msg)
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
        model = jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, self.problem.model)
        wide = bool(jax.config.jax_enable_x64)
        path = str(self.problem.store.path.absolute())  # type: ignore[union-attr]
        self._hosts[address] = self.client.submit(
            _make_host, path, model, self.solver, wide, workers=[address], pure=False
        )
        self._owned.setdefault(address, [])

    def _lose(self, address: str, why: str) -> None:
        if address not in self._owned:
            return
        shards = self._owned.pop(address)
        self._orphans |= set(shards)
        del self._hosts[address]
        self._penalty.pop(address, None)
        if address in self.client.nthreads():  # silent, not gone: it may wake up
            self._silent[address] = self.client.submit(_awake, workers=[address], pure=False)
        self._happened.append(f"worker {address} {why}: {len(shards)} shards rebuilt from the store")

    def _recover(self, lam: Any) -> None:
        """Find the orphans new workers."""
        lam, key = np.asarray(lam), np.asarray(jax.random.key_data(self.key))
        while self._orphans:
            self._rebuilt = True
            shares = self._shares(self._orphans)
            for address, shards in shares.items():
                self._engage(address)
                self._owned[address] = self._owned[address] + shards
            self._orphans = set()
            calls = {a: ("adopt", shards, key, lam, self.boundary.halos(shards)) for a, shards in shares.items()}
            for rows in self._ask(calls, patience=OPENING).values():
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
            self._happened.append(f"worker {new} joined: {len(self._owned.get(new, ()))} shards moved to it")

    def _move(self, giver: str, taker: str, shards: list[int]) -> None:
        given = self._submit({giver: ("release", shards)})
        parcel = next(iter(given))
        while parcel in given and parcel.status == "pending" and giver in self._owned:
            self._arrivals_without_result(given)
        if giver not in self._owned:
            return
        self._owned[giver] = [b for b in self._owned[giver] if b not in shards]
        self._owned[taker] = self._owned[taker] + shards
        self._ask({taker: ("accept", shards, parcel)}, patience=OPENING)

    def _arrivals_without_result(self, futures: dict[Any, tuple[str, float]]) -> None:
        """Wait a moment for futures whose results stay on their workers."""
        from distributed import wait

        try:
            wait(list(futures), timeout=POLL)
        except TimeoutError:
            for future, (address, since) in list(futures.items()):
                late = time.monotonic() - since > self.timeout
                if late or address not in self.client.nthreads():
                    del futures[future]
                    self._lose(address, "did not answer" if late else "is gone")


# ------------------------------------------------------------------------------------ on the workers


class WorkerHost(Host):
    """A host that is told which shards are its own, and keeps everything in its memory."""

    def __init__(self, problem: Problem, solver: Any):
        super().__init__(problem, solver, [], {}, {})
        self._last_penalty: Any = None

    def begin(self, shards: list[int], key: Any, lam: Any, locals_: Any) -> Any:  # type: ignore[override]
        """Begin with these shards."""
        self.shards = shards
        return super().begin(jax.random.wrap_key_data(key), lam, locals_)

    def visit(self, batch: Any, lam0: Any, penalty: Any, halos: Any) -> Any:
        """As `Host`; without a penalty, under the last one."""
        self._last_penalty = self._last_penalty if penalty is None else penalty
        return super().visit(batch, lam0, self._last_penalty, halos)

    def restart(self, key: Any, shards: Any) -> Any:
        """As `Host`."""
        return super().restart(jax.random.wrap_key_data(key), shards)

    def rebuild(self, lam: Any, halos: Any, shards: Any, settle: bool = True) -> Any:  # type: ignore[override]
        """As `Host`."""
        return super().rebuild(lam, halos, shards, settle=settle)

    def adopt(self, shards: list[int], key: Any, lam: Any, halos: Any) -> Any:
        """Take over shards whose worker was lost."""
        self.shards = self.shards + [b for b in shards if b not in self.shards]
        self.restart(key, shards)
        return self.rebuild(lam, halos, shards)

    def release(self, shards: list[int]) -> Any:
        """Give shards away, with all that is theirs."""
        self.shards = [b for b in self.shards if b not in shards]
        return {b: jax.tree.map(np.asarray, (self.local.pop(b), self.pair.pop(b))) for b in shards}

    def accept(self, shards: list[int], parcel: Any) -> None:
        """Take what another worker gave away."""
        self.shards = self.shards + shards
        for b in shards:
            self.local[b], self.pair[b] = parcel[b]

    def local_of(self, b: int) -> tuple[int, PyTree]:
        """The local variables of one shard."""
        return b, jax.tree.map(np.asarray, self.local[b])


def _make_host(path: str, model: Any, solver: Any, wide: bool) -> WorkerHost:
    with jax.enable_x64(wide):
        return WorkerHost(Problem(model, Store(path, verify=False)), solver)


def _call(host: WorkerHost, method: str, wide: bool, *arguments: Any) -> Any:
    with jax.enable_x64(wide):
        return getattr(host, method)(*arguments)


def _awake() -> bool:
    return True


def _rows(local: PyTree, shards: list[int]) -> Any:
    if local is None:
        return None
    return {b: jax.tree.map(lambda leaf, b=b: np.asarray(leaf[b]), local) for b in shards}
