"""What a solver is: what happens at a shard, what happens at the server, and what each of them keeps.

A step visits some shards. Each of them gets what the server broadcasts, changes what is its own (its local variables,
and its shard state), and sends a message back; the server gets the sum of the messages (`Solver.server_update`).
Nothing else passes between them, so the same solver runs wherever the shards are: in memory as one compiled program,
streamed from a disk, on the workers of a cluster.

What needs all shards at once (a curvature to start with, an objective to judge by) goes through a `Shards`.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, PyTree
from pdvi.core.problem import Problem
from pdvi.core.shards import After, LocalUpdateFn, ShardFn, Shards, ShardStateFn, State

__all__ = [
    "After",
    "LocalUpdateFn",
    "RemainingGain",
    "Segment",
    "ShardFn",
    "ShardStateFn",
    "Shards",
    "Solver",
    "State",
    "add",
    "filled",
    "named",
    "settings_of",
]


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
