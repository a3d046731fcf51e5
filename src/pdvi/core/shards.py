"""What a solver's hooks are given to work on all shards at once.

A hook gets a `Shards`: it holds the state of the run, adds up functions of the shards, and changes what is theirs.
There are two kinds. One works through an executor, wherever the shards are (`pdvi.core.executor.HostShards`); the other
inside of a compiled program (`pdvi.executors.steps.TracedShards`), where nothing may depend on the value of an array
but through `Shards.when`. A hook that keeps to jax.numpy and to `when` runs in both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
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
    """All shards of a run, and its state, which the methods change.

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
    def drop_states(self) -> None:
        """Forget the shard states, where all of them will be made anew."""

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
