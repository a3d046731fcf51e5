"""What a solver is: what happens at a shard, what happens at the server, and what each of them keeps.

A step visits some shards. Each visit is told something by the server (`tell`), changes what is the shard's (its local
variables, and what the method keeps for it), and sends a message back; the server gets the sum of the messages
(`update`). Nothing else passes between them, so the same solver runs wherever the shards are: in memory as one compiled
scan, streamed from a disk, on the workers of a cluster.

What needs all shards at once (a curvature to begin with, an objective to judge by) is asked for: a `Dialogue` yields
requests, and whoever runs the solver answers them.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Generator
from typing import Any, ClassVar, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem

# at a shard: (problem, told, local, own, shard) -> (local, own, message); a reader returns the message alone
Visitor = Callable[[Problem, Any, PyTree, PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]
Reader = Callable[[Problem, Any, PyTree, PyTree, PyTree], PyTree]


class State(NamedTuple):
    """All that a run carries on: what is the server's, and, stacked over shards, what is theirs.

    ``local`` and ``own`` are None where shards keep what is theirs elsewhere (on a disk, on a cluster's workers).
    """

    server: Any  # the solver's NamedTuple; has ``lam``, the reported global parameters as one vector
    local: PyTree  # shard-wise: the local variables
    own: PyTree  # shard-wise: what the method keeps for each shard

    @property
    def lam(self) -> Array:
        """Return the reported global parameters."""
        return self.server.lam


class Look(NamedTuple):
    """A request: read all shards (or some), and add up what ``reader`` says of each."""

    state: State
    reader: Reader
    told: Any
    shards: np.ndarray | None = None


class After(eqx.Module):
    """A reader: what another says of a shard after a visit of which nothing is kept; told both, one after the other.

    An executor may make the visit and read in two programs, if it can take the visit back.
    """

    visitor: Visitor
    reader: Reader

    def __call__(self, problem: Problem, told: tuple[Any, Any], local: PyTree, own: PyTree, shard: PyTree) -> PyTree:
        """Return it."""
        local, own, _ = self.visitor(problem, told[0], local, own, shard)
        return self.reader(problem, told[1], local, own, shard)


class Visit(NamedTuple):
    """A request: change all shards; the answer is the new state."""

    state: State
    visitor: Visitor
    told: Any


class Fresh(NamedTuple):
    """A request: local variables as the run began with; the answer is the new state."""

    state: State


class Begin(NamedTuple):
    """A request: what a method keeps for each shard, as it is at first (`Solver.own`); the answer is the new state."""

    state: State
    solver: Solver


class Tidy(NamedTuple):
    """A request: the server's running sums made anew from what shards keep; the answer is the new state."""

    state: State
    solver: Solver


class Tell(NamedTuple):
    """A request: a note for the trace."""

    event: str


Answered = TypeVar("Answered")
Dialogue = Generator[Any, Any, Answered]


class Stage(NamedTuple):
    """Who makes the next steps, and how many (None: all that follow)."""

    solver: Solver
    steps: int | None = None


class Left(NamedTuple):
    """What a run that has settled may still gain, as far as derivatives tell; 0 for a method that does not ask them."""

    nats: float
    noise: float  # what rounding leaves of the objective


class Solver(eqx.Module):
    """A method. Settings are fields; real numbers among them may change without recompilation.

    A method has to say what it holds (`init`), and what a visit and an update are; everything else has a default.
    """

    full_batch: ClassVar[bool] = False  # every step visits all shards
    any_order: ClassVar[bool] = False  # visits may answer one by one, told of an older state

    # ---------------------------------------------------------------------------------------------- to begin with

    def resolved(self, problem: Problem, batch_size: int) -> Solver:
        """Return the solver that does the work on this problem: itself, or a wrapper where that is known to help."""
        return self

    @abstractmethod
    def init(self, problem: Problem, lam: Array, batch_size: int) -> Any:
        """Return what the server holds before the first step: a NamedTuple with the field ``lam``."""

    def begin(self, problem: Problem, state: State, lam: Array, batch_size: int) -> Dialogue[Any]:
        """Return what `init` does; may ask for what all shards together know."""
        return self.init(problem, lam, batch_size)
        yield

    def own(self, problem: Problem, server: Any, local: PyTree) -> PyTree:
        """Return what the method keeps for a shard before its first visit."""
        return ()

    def recall(self, problem: Problem, lam: Array, local: PyTree, shard: PyTree) -> PyTree:
        """Return what the method would have kept for a shard if it had been visited at this point.

        For local variables that are known, and for shards that were lost and rebuilt.
        """
        return ()

    def settled(self, server: Any) -> Any:
        """Return ``server`` of a run whose local variables are known: nothing is left to explore."""
        return server

    # ---------------------------------------------------------------------------------------------- a step

    def before_step(self, problem: Problem, server: Any, batch_size: int) -> Any:
        """Return ``server`` as a step begins: a schedule that counts steps is kept here."""
        return server

    def tell(self, server: Any) -> Any:
        """Return what a visit is told of the server's state."""
        return server.lam

    @abstractmethod
    def visit(
        self, problem: Problem, told: Any, local: PyTree, own: PyTree, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return a shard's new local variables and what is kept for it, and the message to be added up.

        ``local`` comes with the halo rows appended; they may be returned, or not.
        """

    @abstractmethod
    def update(self, problem: Problem, server: Any, total: PyTree, count: int, told: Any) -> Any:
        """Return ``server`` after ``count`` visits that were ``told`` so, from the sum of their messages."""

    # ---------------------------------------------------------------------------------------------- between steps

    def kept(self, told: Any, own: PyTree) -> PyTree:
        """Return a shard's part of the running sums that the server holds; None if it holds none."""
        return None

    def refreshed(self, problem: Problem, server: Any, total: PyTree) -> Any:
        """Return ``server`` with its running sums replaced by ``total``: in single precision they drift."""
        return server

    def metrics(self, lam: Any, own: PyTree) -> dict[str, Array]:
        """Return scalars of a shard whose means over all shards are told in the trace."""
        return {}

    def recover(self, server: Any, factor: float) -> Any:
        """Return ``server`` ``factor`` times as careful, for a run that went wrong; None if the method cannot be."""
        return None

    def heard(self, server: Any, epoch: float, objective: float) -> Any:
        """Return ``server`` after it was told the objective at a log point."""
        return server

    def stage(self, problem: Problem, server: Any, batch_size: int) -> Stage:
        """Return who makes the next steps: decided outside compiled code, where a branch would copy the state."""
        return Stage(self)

    def turn(self, problem: Problem, state: State, batch_size: int) -> Dialogue[State]:
        """Return the state as the next stage takes it over."""
        return state
        yield

    def left(self, problem: Problem, state: State) -> Dialogue[Left]:
        """Return how far the objective is above a stationary point; asked when it has settled."""
        return Left(0.0, 0.0)
        yield

    def notes(self, server: Any) -> dict[str, float]:
        """Return what the trace should tell of the server's state."""
        return {}

    def exploring(self, server: Any) -> bool:
        """Return whether the state is that of a search, noisy on purpose, which no run should end with."""
        return False

    def concluded(self, problem: Problem, state: State, batch_size: int) -> Dialogue[State]:
        """Return the best state there is, for a run that ends while it explores."""
        return state
        yield


def add(messages: PyTree) -> PyTree:
    """Return the sum of stacked messages."""
    return jax.tree.map(lambda leaf: leaf.sum(0), messages)


def settings_of(solver: Any) -> Any:
    """Return a solver with all its settings as plain data: what tells whether a run can be continued."""
    if isinstance(solver, eqx.Module):
        fields = {field.name: settings_of(vars(solver)[field.name]) for field in dataclasses.fields(solver)}
        return {"class": type(solver).__name__, **fields}
    if isinstance(solver, dict):
        return {str(key): settings_of(value) for key, value in solver.items()}
    if isinstance(solver, list | tuple):
        return [settings_of(value) for value in solver]
    if isinstance(solver, np.ndarray | np.generic | jax.Array):
        return np.asarray(solver).tolist()
    return solver if solver is None or isinstance(solver, bool | int | float | str) else repr(solver)


def named(tree: PyTree, prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays of a state by name: "server.lam0", "own.dual"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {_name(prefix, path): np.asarray(leaf) for path, leaf in leaves}


def filled(template: PyTree, arrays: dict[str, Any], prefix: str, what: str) -> PyTree:
    """Return the arrays of these names in the structure of ``template``, if they are all there and fit."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(template)
    names = [_name(prefix, path) for path, _ in leaves]
    missing = [name for name in names if name not in arrays]
    extra = sorted(name for name in arrays if name.split(".")[0] == prefix and name not in names)
    if missing or extra:
        msg = f"{what} must fit the solver: it lacks {missing} and has {extra} besides; start anew, or with its point."
        raise ValueError(msg)
    for name, (_, leaf) in zip(names, leaves):
        found = np.asarray(arrays[name])
        if found.shape != leaf.shape or found.dtype != leaf.dtype:
            msg = (
                f"{what} must fit the problem: expected {name} of shape {leaf.shape} and type {leaf.dtype}, "
                f"got {found.shape} and {found.dtype}."
            )
            raise ValueError(msg)
    return jax.tree.unflatten(structure, [jnp.asarray(arrays[name]) for name in names])


def _name(prefix: str, path: tuple[Any, ...]) -> str:
    tail = jax.tree_util.keystr(path, simple=True, separator=".")
    return f"{prefix}.{tail}" if tail else prefix
