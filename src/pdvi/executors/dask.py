"""Shards on the workers of a Dask cluster: what a step broadcasts goes out, sums come back.

Halo rows go from worker to worker (`exchange.py`), so what passes through the client does not grow with the shards.
The shards of a lost worker are rebuilt by others: read from the store, with local variables that fit lam. The step in
which it was lost counts the updates that were answered, which Algorithm 1 allows for any step.
"""

from __future__ import annotations

import pickle
import warnings
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pdvi._base.checks import positive
from pdvi._base.types import Array, PyTree
from pdvi.core.executor import Executor, NoShards, check_local, store_of, updated
from pdvi.core.problem import Problem
from pdvi.core.solver import LocalUpdateFn, ShardFn, Solver, State
from pdvi.executors.crew import OPENING, Crew, Flying, as_numpy
from pdvi.executors.exchange import Moment
from pdvi.executors.host import add_up, by_shard, total
from pdvi.executors.scratch import Scratch
from pdvi.executors.worker import AS_BEFORE, Brief
from pdvi.solvers.local_variables import PASSES, Recall, settle

Call = Callable[[str, list[int]], tuple[Any, ...]]  # what a worker with these shards is asked
LATEST = float("inf")  # in place of a time: rows as they are


@dataclass
class Traffic:
    """Visits, and their bytes: through the client, and of halo rows between workers and within them."""

    visits: int = 0
    sent: int = 0
    received: int = 0
    halo_between: int = 0
    halo_within: int = 0


class Dask(Executor):
    """Works on a problem from a store with the workers of a `distributed.Client`.

    Every worker must see the store under the same path, and reach the others. Workers may come and go: those that join
    get their share of the shards at the next log point, those that are lost are replaced, and the trace tells both
    (column ``event``). A checkpoint holds the global state; see `Disk`.

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
        distributed = import_distributed()
        if not isinstance(client, distributed.Client) or client.asynchronous:
            msg = f"`client` must be a (synchronous) distributed.Client, got {type(client).__name__}."
            raise ValueError(msg)
        self.client, self.asynchronous, self.timeout = client, asynchronous, positive("timeout", timeout)
        self.traffic = Traffic()
        self.crew = Crew(client, self.timeout, self.tell)
        self._time = 0  # counts the calls that change rows others read
        self._solver: Solver | None = None  # what recalls for the shards of lost workers
        self._rebuilt = False

    # ------------------------------------------------------------------------------------ what an executor is asked

    def open(self, problem: Problem, key: Array, local: PyTree) -> tuple[Array, State]:
        """Return the model's own start of the globals, and a state without anything that is a shard's."""
        store = store_of(problem, self)
        check_local(problem, local)
        self.close()
        self.problem, self._lam = problem, np.zeros(0)
        self._key_data = np.asarray(jax.random.key_data(key))
        self.crew.begin(problem, store)
        self._hand_out(local)
        return problem.init_global(key), State(None, None, None)

    def begin(self, state: State, solver: Solver) -> State:
        """Keep for every shard what ``solver`` keeps at first."""
        self._solver, self._lam = solver, np.asarray(state.lam)
        self._everywhere(lambda address, own: ("equip_for", self._brief(address, solver, state.lam)))
        return state

    def run(self, solver: Solver, state: State, batches: np.ndarray) -> State:
        """Return the state after one step per row of ``batches``."""
        self._share_with_newcomers(state.lam)
        if self.asynchronous and solver.any_order:
            return self._run_asynchronously(solver, state, batches)
        return super().run(solver, state, batches)

    def visit(
        self, state: State, visitor: LocalUpdateFn, told: Any, shards: np.ndarray | None = None
    ) -> tuple[State, PyTree, int]:
        """Visit these shards: every worker its part.

        Those of a worker that is lost meanwhile are not counted; where all are to be visited, all are visited again.
        """
        self._lam = np.asarray(told if state.server is None else state.lam)  # before there is a server lam is told
        chosen = range(self.problem.n_shards) if shards is None else np.asarray(shards).tolist()
        while True:
            parts, count = self._visit_some(visitor, told, chosen)
            self._recover(self._lam)
            if shards is not None or count == self.problem.n_shards:
                return state, add_up(parts), count

    def _visit_some(self, visitor: Any, told: Any, shards: Any) -> tuple[list[PyTree], int]:
        """Return what the workers of some shards answered, in an order that does not depend on who is fast."""
        moment, shares = self._moment(), self._shares(shards)
        answers = self.crew.ask({a: self._visit_call(a, visitor, told, own, moment) for a, own in shares.items()})
        parts = [self._taken_in(answers[address], len(shares[address])) for address in sorted(answers)]
        return parts, sum(len(shares[address]) for address in answers)

    def look(self, state: State, reader: ShardFn, told: Any, shards: np.ndarray | None = None) -> PyTree:
        """Return the sum of what ``reader`` says of these shards."""
        wanted = set(range(self.problem.n_shards) if shards is None else np.asarray(shards).tolist())

        def call(address: str, own: list[int]) -> tuple[Any, ...]:
            own = [b for b in own if b in wanted]
            moment = self._moment()._replace(peers=self.crew.peers(address))
            return "look_at_shards", self._brief(address, reader, told), own, moment

        return total(self._everywhere(call))

    def fold(self, state: State, function: Any, told: Any) -> PyTree:
        """Return the sum of ``function(told, own)`` over all shards."""
        return total(self._everywhere(lambda address, own: ("fold_shards", self._brief(address, function, told))))

    def fresh(self, state: State) -> State:
        """Set the local variables to those that the run began with."""
        self._everywhere(lambda address, own: ("begin_again", own, self._key_data, self._moment().stamp))
        return state

    def disturbed(self) -> bool:
        """Return whether shards were rebuilt since the last call."""
        rebuilt, self._rebuilt = self._rebuilt, False
        return rebuilt

    def interrupted(self) -> None:
        """Wait for no new workers: Ctrl-C at a terminal ends a local cluster's workers too."""
        self.crew.patience = 0.0

    def close(self) -> None:
        """Let the workers forget the run."""
        self.crew.dismiss()
        self.crew = Crew(self.client, self.timeout, self.tell)
        self._solver = None

    def local_params(self, state: State) -> PyTree:
        """Return the local variables of all shards, fetched one by one into a memory-mapped file; None if lost."""
        kept = Scratch(self.problem.local_shape(), self.problem.n_shards)
        missing = set(range(self.problem.n_shards))
        try:
            while missing:
                calls = {address: ("local_of", own[0]) for address, own in self._shares(missing).items()}
                for b, local in self.crew.ask(calls).values():
                    kept[b] = local
                    missing.remove(b)
                self._recover(state.lam)
        except NoShards:
            msg = "all workers are gone: the result has no local variables; start workers, and go on with start=result."
            warnings.warn(msg, stacklevel=2)
            return None
        return kept.stacked()

    # ------------------------------------------------------------------------------------ what workers are told

    def _brief(self, address: str, thing: Any, told: Any) -> Brief:
        """Return what a worker has to know to do a thing, without what it knows from last time."""
        import cloudpickle  # comes with distributed; also for what is defined in a user's script

        content = cloudpickle.dumps(as_numpy(thing))
        number = zlib.crc32(content)
        told = jax.tree.map(np.asarray, told)
        known = self.crew.members[address].known
        before = known.get(number)
        known[number] = told
        if before is None:
            return Brief(number, content, told)

        def news(old: np.ndarray, new: np.ndarray) -> Any:
            return AS_BEFORE if old.dtype == new.dtype and np.array_equal(old, new) else new

        return Brief(number, None, jax.tree.map(news, before, told))

    def _moment(self) -> Moment:
        """Return a new one: what was made before is read, what is made is newer."""
        self._time += 1
        return Moment(self._time, self._time + 1)

    def _visit_call(self, address: str, visitor: Any, told: Any, shards: list[int], moment: Moment) -> tuple[Any, ...]:
        moment = moment._replace(peers=self.crew.peers(address))
        arguments = self._brief(address, visitor, told), shards, moment
        self.traffic.sent += len(pickle.dumps(arguments, protocol=5))
        return "visit_shards", *arguments

    def _taken_in(self, answer: Any, visits: int) -> PyTree:
        """Return the sum that came back, and count what it took."""
        part, moved = answer
        self.traffic.visits += visits
        self.traffic.received += len(pickle.dumps(answer, protocol=5))
        self.traffic.halo_between += moved.between
        self.traffic.halo_within += moved.within
        return part

    # ------------------------------------------------------------------------------------ asking the workers

    def _run_asynchronously(self, solver: Solver, state: State, batches: np.ndarray) -> State:
        """Let every worker have one visit under way; each answer updates the globals."""
        state = self.rebuilt(state, solver)
        waiting, said = deque(batches.ravel().tolist()), {}
        flying: Flying = {}
        while waiting or flying:
            busy = {address for address, _ in flying.values()}
            for address, member in list(self.crew.members.items()):
                turn = next((b for b in waiting if b in member.shards), None)
                if address not in busy and turn is not None:
                    waiting.remove(turn)
                    said[address] = solver.broadcast(state.server)
                    self._lam = np.asarray(state.lam)
                    now = self._moment()._replace(as_of=LATEST)
                    call = self._visit_call(address, solver.local_update, said[address], [turn], now)
                    flying |= self.crew.submit({address: call})
            for address, answer in self.crew.arrivals(flying).items():
                message = self._taken_in(answer, 1)
                server = updated(self.problem, solver, state.server, message, 1, said[address])
                state = state._replace(server=server)
            self._recover(self._lam)
            if self.disturbed():
                state = self.rebuilt(state, solver)
        return self.rebuilt(state, solver)

    def _everywhere(self, call: Call) -> list[Any]:
        """Return answers from the workers of all shards, in an order that does not depend on who is fast.

        If some are lost on the way, those that take over their shards are asked in turn.
        """
        while True:
            calls = {address: call(address, member.shards) for address, member in self.crew.members.items()}
            answers = self.crew.ask(calls)
            if not self.crew.orphans and set(answers) == set(calls):
                return [answers[address] for address in sorted(answers)]
            self._recover(self._lam)

    def _shares(self, shards: Any) -> dict[str, list[int]]:
        """Return who has which of some shards."""
        wanted = set(shards)
        found = {a: [b for b in member.shards if b in wanted] for a, member in self.crew.members.items()}
        return {address: own for address, own in found.items() if own}

    # ------------------------------------------------------------------------------------ shards that change hands

    def _hand_out(self, local: PyTree = None) -> None:
        """Let workers begin with the orphans; if some are lost with theirs, let others, until all are taken."""
        while self.crew.orphans:
            stamp = self._moment().stamp
            given = self.crew.place()
            calls = {a: ("begin_with", own, self._key_data, by_shard(local, own), stamp) for a, own in given.items()}
            self.crew.ask(calls, patience=OPENING)

    def _recover(self, lam: Any) -> None:
        """Find the orphans new workers, who rebuild them: local variables that fit ``lam``, and what is recalled."""
        rebuilt: set[int] = set()
        while self.crew.orphans:
            self._rebuilt = True
            rebuilt |= self.crew.orphans
            self._hand_out()
            if self._solver is not None:
                passes = PASSES if self.problem.halo_rows else 1  # rows of lost shards are those of the start at first
                for visitor in (*passes * [settle], Recall(self._solver)):
                    if not self.crew.orphans:
                        self._visit_some(visitor, np.asarray(lam), rebuilt)

    def _share_with_newcomers(self, lam: Any) -> None:
        """Move shards, with all that is theirs, from worker to worker until new ones have their part."""
        for new in self.crew.newcomers():
            fair = self.problem.n_shards // (len(self.crew.members) + 1)
            if fair == 0:
                return
            mine = self.crew.engage(new)
            while self.crew.members.get(new) is mine and len(mine.shards) < fair:
                giver = max(self.crew.members, key=lambda address: len(self.crew.members[address].shards))
                theirs = self.crew.members[giver].shards
                size = min(fair - len(mine.shards), max(1, len(theirs) - fair))
                moved = theirs[-size:]
                parcel = self.crew.ask({giver: ("release", moved)}).get(giver)
                if parcel is not None:
                    self.crew.move(giver, new, moved)
                    self.crew.ask({new: ("accept", moved, parcel, self._moment().stamp)})
                self._recover(lam)
            self.tell(f"worker {new} joined: {len(mine.shards)} shards moved to it")


def import_distributed() -> Any:
    """Return the module, or say how to get it."""
    try:
        import distributed
    except ImportError as error:
        msg = 'the executor Dask needs dask and distributed; install them with: pip install "pdvi[dask]"'
        raise ImportError(msg) from error
    return distributed
