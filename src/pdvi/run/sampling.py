"""How the shards of a step, S_t, are drawn.

A draw depends on the seed and the epoch alone, so that a resumed run sees what an uninterrupted one would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from pdvi.core.problem import steps_per_epoch


@runtime_checkable
class Sampling(Protocol):
    """Anything that lists the batches of one epoch."""

    def epoch(self, seed: int, epoch: int, n_shards: int, batch_size: int) -> np.ndarray:
        """Return integers of shape (steps per epoch, batch size); no shard twice in a row."""
        ...


def batches(sampling: Sampling, seed: int, start: int, stop: int, n_shards: int, batch_size: int) -> np.ndarray:
    """Return the batches of steps ``start`` to ``stop``, counted from the beginning of the run."""
    size = steps_per_epoch(n_shards, batch_size)
    first, last = start // size, -(-stop // size)
    drawn = [sampling.epoch(seed, epoch, n_shards, batch_size) for epoch in range(first, last)]
    return np.concatenate(drawn)[start - first * size : stop - first * size].astype(np.int32)


@dataclass(frozen=True)
class Reshuffled:
    """Every epoch visits every shard, in a new random order.

    Where the batch size does not divide the number of shards, the last batch is filled up from the
    beginning of the same order.
    """

    def epoch(self, seed: int, epoch: int, n_shards: int, batch_size: int) -> np.ndarray:
        """Return the batches of one epoch."""
        order = np.random.default_rng([seed, epoch]).permutation(n_shards)
        return np.resize(order, (steps_per_epoch(n_shards, batch_size), batch_size))


@dataclass(frozen=True)
class Uniform:
    """Every step draws its shards uniformly without replacement, independently: the paper's assumption."""

    def epoch(self, seed: int, epoch: int, n_shards: int, batch_size: int) -> np.ndarray:
        """Return the batches of one epoch."""
        rng = np.random.default_rng([seed, epoch])
        steps = steps_per_epoch(n_shards, batch_size)
        return np.stack([rng.choice(n_shards, batch_size, replace=False) for _ in range(steps)])


@dataclass(frozen=True)
class Fixed:
    """Every epoch visits the shards in the given order, however biased: by label, by place, by time."""

    order: tuple[int, ...] | None = None  # None: as the shards are numbered

    def epoch(self, seed: int, epoch: int, n_shards: int, batch_size: int) -> np.ndarray:
        """Return the batches of one epoch."""
        order = np.arange(n_shards) if self.order is None else np.asarray(self.order)
        if not np.array_equal(np.sort(order), np.arange(n_shards)):
            msg = f"`order` must hold each of the {n_shards} shards once, got {len(order)} entries."
            raise ValueError(msg)
        return np.resize(order, (steps_per_epoch(n_shards, batch_size), batch_size))
