"""Some shards in one place, and what is done with them there: a process that streams a disk, or a cluster's worker.

A host keeps what belongs to its shards (local variables, copies, duals) and sees of all others only the halo rows
it is handed. It is asked for sums, so that what it answers does not grow with its shards' area.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi.core.problem import Problem, with_halo
from pdvi.executors.memory import traced
from pdvi.shards.stacking import to_device
from pdvi.shards.store import Store
from pdvi.solvers.local_variables import settled
from pdvi.solvers.primal_dual.penalty import shard_curvature

Array = jax.Array
PyTree = Any
Halos = dict[int, PyTree]  # the latest halo rows of each shard; None where there are none


class Pair(NamedTuple):
    """A shard's copy of the globals, lam_b, and its dual, mu_b."""

    copy: Any
    dual: Any


class Measured(NamedTuple):
    """What is known of a host's shards at a log point."""

    losses: dict[int, float]
    gradient: np.ndarray  # sum of grad_lam f_b
    disagreement: float  # sum of |lam_b - lam|


class Host:
    """Visits, measures and rebuilds its shards."""

    def __init__(
        self,
        problem: Problem,
        solver: Any,
        shards: Iterable[int],
        locals_: Any,
        pairs: Any,
        *,
        keep: float = float("inf"),
    ):
        self.problem, self.solver = problem, traced(solver)
        self.shards = list(shards)
        self.local, self.pair = locals_, pairs  # by shard, in a dict or in scratch files
        assert problem.store is not None
        self.data = Reader(problem.store, keep)
        self.exports = exports_of(problem)

    def begin(self, key: Array, lam: Any, locals_: Any = None, shards: Iterable[int] | None = None) -> Halos:
        """The state of shards that were never visited: lam_b = lam, mu_b = 0. Returns the rows that others read."""
        lam = np.asarray(lam)
        rows = {}
        for b, shard in self._each(shards):
            local = _init(self.problem, key, jnp.asarray(b), shard) if locals_ is None else locals_[b]
            self.local[b], self.pair[b] = local, Pair(lam, np.zeros_like(lam))
            rows[b] = self._exported(b, local)
        return rows

    def visit(self, batch: Iterable[int], lam0: Any, penalty: Any, halos: Halos) -> tuple[np.ndarray, Halos]:
        """Algorithm 1's visits: the sum of lam_b - lam0, and the rows that others read."""
        lam0, penalty = jnp.asarray(lam0), jnp.asarray(penalty)
        gaps, rows = [], {}
        for b in batch:
            phi, mu = self.local[b], self.pair[b].dual
            phi, lam, mu = _visit(self.problem, self.solver, phi, halos[b], self.data[b], lam0, mu, penalty)
            self.local[b], self.pair[b] = phi, Pair(lam, mu)
            gaps.append(np.asarray(lam - lam0))
            rows[b] = self._exported(b, phi)
        return add_up(gaps), rows

    def explore(self, batch: Iterable[int], lam: Any, stepper: Any, halos: Halos) -> tuple[PyTree, Halos]:
        """Visits of a natural-gradient step: the sum of the statistics, and the rows that others read."""
        lam, stepper = jnp.asarray(lam), traced(stepper)
        found, rows = [], {}
        for b in batch:
            phi, statistics = _look(self.problem, stepper, self.local[b], halos[b], self.data[b], lam)
            self.local[b] = phi
            found.append(jax.tree.map(np.asarray, statistics))
            rows[b] = self._exported(b, phi)
        return add_up(found), rows

    def statistics(self, halos: Halos) -> PyTree:
        """The sum of the statistics of all shards, in double precision."""
        total: PyTree = None
        for b, shard in self._each():
            found = jax.tree.map(
                lambda leaf: np.asarray(leaf, float), _statistics(self.problem, self.local[b], halos[b], shard)
            )
            total = found if total is None else jax.tree.map(np.add, total, found)
        return total

    def restart(self, key: Array, shards: Iterable[int]) -> Halos:
        """Local variables as at the start, for shards that lost theirs."""
        rows = {}
        for b, shard in self._each(shards):
            self.local[b] = _init(self.problem, key, jnp.asarray(b), shard)
            rows[b] = self._exported(b, self.local[b])
        return rows

    def rebuild(self, lam: Any, halos: Halos, shards: Iterable[int], *, settle: bool = True) -> Halos:
        """What shards would have kept near ``lam``: phi a minimiser (``settle``), lam_b = lam, mu_b = -grad_lam f_b."""
        lam = jnp.asarray(lam)
        rows = {}
        for b, shard in self._each(shards):
            local = self.local[b]
            if settle:
                local = self.local[b] = _settle(self.problem, lam, local, halos[b], shard)
            gradient = _evaluate(self.problem, lam, local, halos[b], shard)[1]
            self.pair[b] = Pair(lam, -gradient)
            rows[b] = self._exported(b, local)
        return rows

    def curvature(self, lam: Any, halos: Halos, shards: Iterable[int]) -> np.ndarray:
        """The sum of |diag grad^2_lam f_b|."""
        lam = jnp.asarray(lam)
        total = np.zeros(lam.size)
        for b, shard in self._each(shards):
            total += np.asarray(_curvature(self.problem, lam, self.local[b], halos[b], shard))
        return total

    def evaluate(self, lam: Any, halos: Halos) -> Measured:
        """Losses, gradient and disagreement, added in double precision."""
        lam = jnp.asarray(lam)
        losses, total, disagreement = {}, np.zeros(lam.size), 0.0
        for b, shard in self._each():
            loss, gradient = _evaluate(self.problem, lam, self.local[b], halos[b], shard)
            losses[b] = float(loss)
            total += np.asarray(gradient)
            disagreement += float(np.linalg.norm(np.asarray(self.pair[b].copy) - np.asarray(lam)))
        return Measured(losses, total, disagreement)

    def dual(self) -> np.ndarray:
        """The sum of mu_b."""
        total = np.zeros(self.problem.n_global)
        for b in self.shards:
            total += np.asarray(self.pair[b].dual)
        return total

    def _each(self, shards: Iterable[int] | None = None) -> Iterable[tuple[int, PyTree]]:
        wanted = self.shards if shards is None else list(shards)
        self.data.expect(wanted)
        return ((b, self.data[b]) for b in wanted)

    def _exported(self, b: int, local: PyTree) -> PyTree:
        if self.exports is None:
            return None
        rows = self.exports.rows(b)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], local)


class Exports:
    """Which rows of a shard other shards read: rows sorted through all shards, so those of a shard lie together."""

    def __init__(self, halo: np.ndarray, n_rows: int):
        n_shards = len(halo)
        self.n_rows = n_rows
        self.slots = np.unique(halo)
        self.position = np.searchsorted(self.slots, halo)
        self.first = np.searchsorted(self.slots, np.arange(n_shards + 1) * n_rows)

    def rows(self, b: int) -> np.ndarray:
        """Rows of shard ``b``."""
        return self.slots[self.first[b] : self.first[b + 1]] - b * self.n_rows


class Boundary:
    """The latest values of all rows that shards read of each other: they grow with the shards' outlines only."""

    def __init__(self, problem: Problem):
        self.exports = exports_of(problem)
        if self.exports is not None:
            size = len(self.exports.slots)
            self.values = jax.tree.map(lambda leaf: np.empty((size, *leaf.shape[1:]), leaf.dtype), local_shape(problem))

    def publish(self, rows: Halos) -> None:
        """Take the newest rows of some shards."""
        for b, own in rows.items():
            if self.exports is not None:
                part = slice(self.exports.first[b], self.exports.first[b + 1])
                jax.tree.map(lambda leaf, value, part=part: leaf.__setitem__(part, value), self.values, own)

    def halos(self, shards: Iterable[int]) -> Halos:
        """The rows that some shards read."""
        if self.exports is None:
            return dict.fromkeys(shards)
        position = self.exports.position
        return {b: jax.tree.map(lambda leaf, b=b: leaf[position[b]], self.values) for b in map(int, shards)}


class Reader:
    """A store's shards on the device: up to ``keep`` bytes stay there, the others are read ahead by one."""

    def __init__(self, store: Store, keep: float = float("inf")):
        self.store = store
        self.room = keep
        self._kept: dict[int, PyTree] = {}
        self._checked: set[int] = set()
        self._queue: deque[int] = deque()
        self._ahead: tuple[int, Future] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pdvi-read-ahead")

    def expect(self, order: Iterable[int]) -> None:
        """The shards that will be asked for next."""
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


def exports_of(problem: Problem) -> Exports | None:
    """The rows that shards read of each other; None if they do not touch."""
    assert problem.store is not None
    halo = problem.store.halo
    return None if halo is None else Exports(halo, jax.tree.leaves(local_shape(problem))[0].shape[0])


def add_up(parts: list[PyTree]) -> PyTree:
    """The sum of arrays or pytrees of them: added in double precision, in the type they have."""
    return jax.tree.map(lambda *leaves: np.sum(leaves, axis=0, dtype=float).astype(leaves[0].dtype), *parts)


def local_shape(problem: Problem) -> PyTree:
    """Shapes and types of the local variables of one shard."""
    assert problem.store is not None
    shard = jax.tree.map(to_device, problem.store.read(0))
    return jax.eval_shape(problem.init_shard, jax.random.key(0), jnp.asarray(0), shard)


@eqx.filter_jit
def _init(problem: Problem, key: Array, b: Array, shard: PyTree) -> PyTree:
    return problem.init_shard(key, b, shard)


@eqx.filter_jit
def _visit(
    problem: Problem, solver: Any, local: PyTree, halo: PyTree, shard: PyTree, lam0: Array, mu: Array, penalty: Array
) -> tuple[PyTree, Array, Array]:
    return solver.visit(problem, with_halo(local, halo), shard, lam0, mu, penalty)


@eqx.filter_jit
def _look(
    problem: Problem, stepper: Any, local: PyTree, halo: PyTree, shard: PyTree, lam: Array
) -> tuple[PyTree, PyTree]:
    phi, statistics = stepper.look(problem, with_halo(local, halo), lam, shard)
    return _own(phi, local), statistics


def _own(phi: PyTree, local: PyTree) -> PyTree:
    """Without the halo rows, as in ``local``."""
    return jax.tree.map(lambda leaf, own: leaf[: len(own)], phi, local)


@eqx.filter_jit
def _statistics(problem: Problem, local: PyTree, halo: PyTree, shard: PyTree) -> PyTree:
    return problem.model.statistics(with_halo(local, halo), shard)


@eqx.filter_jit
def _settle(problem: Problem, lam: Array, local: PyTree, halo: PyTree, shard: PyTree) -> PyTree:
    return _own(settled(problem, with_halo(local, halo), lam, shard), local)


@eqx.filter_jit
def _evaluate(problem: Problem, lam: Array, local: PyTree, halo: PyTree, shard: PyTree) -> tuple[Array, Array]:
    return jax.value_and_grad(problem.loss, argnums=1)(with_halo(local, halo), lam, shard)


@eqx.filter_jit
def _curvature(problem: Problem, lam: Array, local: PyTree, halo: PyTree, shard: PyTree) -> Array:
    return shard_curvature(problem, lam, with_halo(local, halo), shard)
