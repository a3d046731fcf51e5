"""The categorical family."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array
from pdvi.q import family
from pdvi.q.family import Family


class Categorical(Family):
    """Independent labels, one of K, with probabilities along the last axis; a draw is a vector of one 1 and zeros.

    Unconstrained: ``logits`` of all but the first label, relative to the first: K - 1 numbers, so that no direction is
    flat.
    """

    logits: Any

    def __init__(self, probabilities: Any = None, *, logits: Any = None):
        if logits is None:
            logs = family.log(family.numbers("probabilities", probabilities, positive=True))
            if np.ndim(logs) < 1 or np.shape(logs)[-1] < 2:
                msg = f"`probabilities` must have at least two entries along its last axis, got shape {np.shape(logs)}."
                raise ValueError(msg)
            logits = logs[..., 1:] - logs[..., :1]
        self.logits = logits

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a draw."""
        *rows, size = np.shape(self.logits)
        return (*rows, size + 1)

    @property
    def log_probabilities(self) -> Array:
        """Return the logarithms of the probabilities."""
        logits = jnp.asarray(self.logits)
        return jax.nn.log_softmax(jnp.concatenate([jnp.zeros_like(logits[..., :1]), logits], axis=-1), axis=-1)

    @property
    def probabilities(self) -> Array:
        """Return the probabilities."""
        return jnp.exp(self.log_probabilities)

    @property
    def mean(self) -> Array:
        """Return the mean of every entry of a draw: the probabilities."""
        return self.probabilities

    @property
    def variance(self) -> Array:
        """Return the variance of every entry of a draw."""
        return self.mean * (1 - self.mean)

    def entropy(self) -> Array:
        """Return the entropy of every label."""
        return -jnp.sum(self.probabilities * self.log_probabilities, axis=-1)

    def expected_log(self, x: Any) -> Array:
        """Return E log p(x) of every label; numbers are vectors of one 1 and zeros."""
        return jnp.sum(family.mean(x) * self.log_probabilities, axis=-1)

    def expect(self, values: Any) -> Array:
        """Return the mean of a value that depends on the label: ``values`` has one for each along its last axis."""
        return jnp.sum(self.probabilities * jnp.asarray(values), axis=-1)
