"""What a solver is: what happens at a shard, what happens at the server, and what each of them keeps.

A step visits some shards. Each of them gets what the server broadcasts, changes what is its own (its local variables,
and its shard state), and sends a message back; the server gets the sum of the messages (`Solver.server_update`).
Nothing else passes between them, so the same solver runs wherever the shards are: in memory as one compiled program,
streamed from a disk, on the workers of a cluster.

What needs all shards at once (a curvature to start with, an objective to judge by) goes through a `Shards`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem

# (problem, broadcast, local, shard_state, shard) -> (local, shard_state, message)
LocalUpdateFn = Callable[[Problem, Any, PyTree, PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]
ShardFn = Callable[[Problem, Any, PyTree, PyTree, PyTree], PyTree]  # the same arguments -> what is added up
ShardStateFn = Callable[[Any, PyTree], PyTree]  # (broadcast, shard_state) -> what is added up


class State(NamedTuple):
    """All that a run carries on: what is the server's, and, stacked over shards, what is theirs.

    ``local`` and ``own`` are None where shards keep what is theirs elsewhere (on a disk, on a cluster's workers).
    """

    server: Any  # the solver's NamedTuple; has ``lam``, the reported global parameters as one vector
    local: PyTree  # shard-wise: the local variables
    own: PyTree  # shard-wise: the shard states, that is, what the method keeps for each shard

    @property
    def lam(self) -> Array:
        """Return the reported global parameters."""
        return self.server.lam


class After(eqx.Module):
    """A `ShardFn`: what another returns after a local update of which nothing is kept; ``broadcast`` has one for each.

    An executor may update and read in two programs, if it can take the update back.
    """

    update: LocalUpdateFn
    read: ShardFn

    def __call__(
        self, problem: Problem, broadcast: tuple[Any, Any], local: PyTree, shard_state: PyTree, shard: PyTree
    ) -> PyTree:
        """Return it."""
        local, shard_state, _ = self.update(problem, broadcast[0], local, shard_state, shard)
        return self.read(problem, broadcast[1], local, shard_state, shard)


class Shards(ABC):
    """All shards of a run, and its state, which the methods change: what a solver's hooks are given.

    There are two kinds. One works through an executor, wherever the shards are (`pdvi.core.executor.HostShards`); the
    other inside of a compiled program (`pdvi.executors.steps.TracedShards`), where nothing may depend on the value of
    an array but through `when`. A hook that keeps to jax.numpy and to `when` runs in both.

    ``warm`` tells whether the local variables were given, so that they need not be found first.
    """

    is_traced: ClassVar[bool]
    problem: Problem
    state: State
    warm: bool

    @property
    def server(self) -> Any:
        """Return the server's part of the state."""
        return self.state.server

    @server.setter
    def server(self, server: Any) -> None:
        self.state = self.state._replace(server=server)

    @property
    def lam(self) -> Array:
        """Return the reported global parameters."""
        return self.state.lam

    @contextmanager
    def inner(self) -> Iterator[None]:
        """Let the server be its own field ``inner``: what a wrapped solver works on."""
        outer = self.server
        self.server = outer.inner
        yield
        self.server = outer._replace(inner=self.server)

    @abstractmethod
    def sum(self, fn: ShardFn, broadcast: Any, subset: np.ndarray | None = None) -> PyTree:
        """Return the sum of ``fn(problem, broadcast, local, None, shard)`` over all shards, or a subset of them.

        The shard state is left out, so that one program serves before the first step and after (see `sum_states`).
        """

    @abstractmethod
    def sum_states(self, fn: ShardStateFn, broadcast: Any) -> PyTree:
        """Return the sum of ``fn(broadcast, shard_state)`` over all shards; no data is read."""

    @abstractmethod
    def update(self, fn: LocalUpdateFn, broadcast: Any) -> None:
        """Change the local variables and the shard states of all shards as ``fn`` does; its messages are dropped."""

    @abstractmethod
    def reset(self) -> None:
        """Set the local variables to those at the start of the run."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Write a note into the next row of the trace."""

    @abstractmethod
    def when(self, condition: Any, fn: Callable[[Shards], None], *, on_host: bool = False) -> None:
        """Call ``fn(shards)`` if ``condition`` holds.

        With ``on_host`` ``fn`` need not be traceable: a compiled program that meets the condition ends there, and the
        hook is called again outside of it.
        """


class Segment(NamedTuple):
    """The next steps of a run: which solver makes them, and how many (None: all that follow)."""

    solver: Solver
    n_steps: Any = None


class RemainingGain(NamedTuple):
    """What a run that has settled may still gain, as far as derivatives tell; 0 for a method that does not ask them."""

    nats: float
    noise: float  # what rounding leaves of the objective


class Solver(eqx.Module):
    """A method. Settings are fields; real numbers among them may change without recompilation.

    A method has to define its server's state (`init`), a local update and a server update; everything else has a
    default. These twelve methods are all that a run calls.
    """

    full_batch: ClassVar[bool] = False  # every step visits all shards
    any_order: ClassVar[bool] = False  # local updates may arrive one by one, from broadcasts of older states
    is_warmup: ClassVar[bool] = False  # its steps are a noisy search, whose state no run should end with

    # ---------------------------------------------------------------------------------------------- the start

    def specialize(self, problem: Problem, batch_size: int, *, warm: bool = False) -> Solver:
        """Return the solver that does the work on this problem: itself, or a wrapper where that is known to help.

        ``warm``: the run starts from given local variables.
        """
        return self

    @abstractmethod
    def init(self, problem: Problem, shards: Shards, lam: Array, batch_size: int) -> Any:
        """Return what the server holds before the first step: a NamedTuple with the field ``lam``."""

    def init_shard_state(self, problem: Problem, lam: Array, local: PyTree, shard: PyTree | None) -> PyTree:
        """Return what the method keeps for a shard: its shard state.

        ``shard`` None: before its first visit; ``local`` is then without halo rows, and no data is read. Else as if the
        shard had been visited at this point: for local variables that are given, and for shards that were lost and
        rebuilt.
        """
        return ()

    # ---------------------------------------------------------------------------------------------- a step

    def broadcast(self, server: Any) -> Any:
        """Return what a local update gets of the server's state."""
        return server.lam

    @abstractmethod
    def local_update(
        self, problem: Problem, broadcast: Any, local: PyTree, shard_state: PyTree, shard: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return a shard's new local variables, its new shard state, and the message to be added up.

        ``local`` comes with the halo rows appended; they may be returned, or not.
        """

    @abstractmethod
    def server_update(self, problem: Problem, server: Any, total: PyTree, count: int, broadcast: Any) -> Any:
        """Return ``server`` after ``count`` local updates from one broadcast, from the sum of their messages."""

    # ---------------------------------------------------------------------------------------------- between steps

    def on_segment_end(self, problem: Problem, shards: Shards, step: Any, batch_size: int) -> Segment:
        """Change the state between two segments of a run, and return the next segment.

        Called before the first step, and then wherever a segment has ended, ``step`` being the number of steps made.
        Changes are made through ``shards.when``, so that it may be traced.
        """
        return Segment(self)

    def rebuild_sums(self, problem: Problem, shards: Shards) -> None:
        """Rebuild the running sums of the server from the shard states: in single precision they drift."""
        return

    def increase_penalty(self, server: Any, factor: float) -> Any:
        """Return ``server`` with smaller steps, for a run that went wrong; None if the method has no penalty."""
        return None

    def remaining_gain(self, problem: Problem, shards: Shards) -> RemainingGain:
        """Return how far the objective is above a stationary point; asked when it has settled, never traced."""
        return RemainingGain(0.0, 0.0)

    def log_metrics(self, problem: Problem, shards: Shards) -> dict[str, Any]:
        """Return scalars for the trace."""
        return {}

    def finalize(self, problem: Problem, shards: Shards, batch_size: int) -> None:
        """Go to the best state there is, where a run ends during a warm-up; never traced."""
        return


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


_name = partial(jax.tree_util.keystr, simple=True, separator=".")


def named(tree: PyTree) -> dict[str, np.ndarray]:
    """Return the arrays of a state by name: "server.lam0", "own.dual"."""
    return {_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def filled(template: PyTree, arrays: dict[str, Any], what: str) -> PyTree:
    """Return the arrays of these names in the structure of ``template``, if they are all there and fit."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(template)
    wanted = {_name(path): leaf for path, leaf in leaves}
    if set(wanted) != set(arrays):
        missing, extra = [name for name in wanted if name not in arrays], sorted(set(arrays) - set(wanted))
        msg = f"{what} must fit the solver: it lacks {missing} and has {extra} besides; start anew, or with its point."
        raise ValueError(msg)
    for name, leaf in wanted.items():
        found = np.asarray(arrays[name])
        if found.shape != leaf.shape or found.dtype != leaf.dtype:
            msg = (
                f"{what} must fit the problem: expected {name} of shape {leaf.shape} and type {leaf.dtype}, "
                f"got {found.shape} and {found.dtype}."
            )
            raise ValueError(msg)
    return jax.tree.unflatten(structure, [jnp.asarray(arrays[name]) for name in wanted])
