"""What a family of posteriors is: a distribution that knows its unconstrained numbers and its expectations.

Numbers that are given as Python or NumPy floats are kept in double precision until they meet JAX, so that a start is
the same in both precisions.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array


class Family(eqx.Module):
    """A distribution of independent entries (of independent vectors, where the last axis is one: `Dirichlet`).

    The fields are numbers without constraints: `unconstrained` lists them, and the class called with them by name gives
    the distribution back, ``Normal(**x.unconstrained())``.
    """

    def unconstrained(self) -> dict[str, Any]:
        """Return the numbers that a solver may move, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a draw: that of the first of its numbers."""
        return np.shape(next(iter(self.unconstrained().values())))

    @property
    @abc.abstractmethod
    def mean(self) -> Array:
        """Return the mean of every entry."""

    @property
    @abc.abstractmethod
    def variance(self) -> Array:
        """Return the variance of every entry."""

    @property
    def sd(self) -> Array:
        """Return the standard deviation of every entry."""
        return jnp.sqrt(self.variance)

    @property
    def mean_square(self) -> Array:
        """Return the mean of the square of every entry."""
        return self.mean**2 + self.variance

    @property
    def mean_log(self) -> Array:
        """Return the mean of the logarithm."""
        raise TypeError(_unknown(self, "logarithm", "use a family of positive numbers: LogNormal, Gamma, Beta"))

    @property
    def variance_log(self) -> Array:
        """Return the variance of the logarithm."""
        raise TypeError(_unknown(self, "logarithm", "use a family of positive numbers: LogNormal, Gamma"))

    @property
    def mean_log1m(self) -> Array:
        """Return the mean of log(1 - x)."""
        raise TypeError(_unknown(self, "log(1 - x)", "use Beta"))

    def mean_power(self, power: float) -> Array:
        """Return the mean of a power of every entry."""
        raise TypeError(_unknown(self, f"power {power}", "use LogNormal, or `expect`"))

    @abc.abstractmethod
    def entropy(self) -> Array:
        """Return the entropy of every entry (of every vector, where the last axis is one)."""

    @abc.abstractmethod
    def expected_log(self, x: Any) -> Array:
        """Return E log p(x), p being this distribution and ``x`` another one, or numbers."""

    def kl(self, prior: Family) -> Array:
        """Return the divergence KL(self || prior) of every entry, in closed form."""
        return -self.entropy() - prior.expected_log(self)

    def __getitem__(self, index: Any) -> Self:
        """Return the distribution of some entries, as NumPy would index a draw; a last axis that is one stays whole."""
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], self)


Function = Callable[[Array], Array]


def _unknown(x: Family, what: str, remedy: str) -> str:
    return f"the mean of the {what} is not known in closed form for {type(x).__name__}; {remedy}."


# Numbers stand for distributions without spread.


def mean(x: Any) -> Array:
    """Return E x, of a distribution or of a number."""
    return x.mean if isinstance(x, Family) else real(x)


def variance(x: Any) -> Array:
    """Return the variance of x, 0 for a number."""
    return x.variance if isinstance(x, Family) else jnp.asarray(0.0)


def mean_log(x: Any) -> Array:
    """Return E log x."""
    return x.mean_log if isinstance(x, Family) else jnp.log(real(x))


def variance_log(x: Any) -> Array:
    """Return the variance of log x."""
    return x.variance_log if isinstance(x, Family) else jnp.asarray(0.0)


def mean_log1m(x: Any) -> Array:
    """Return E log(1 - x)."""
    return x.mean_log1m if isinstance(x, Family) else jnp.log1p(-real(x))


def mean_power(x: Any, power: float) -> Array:
    """Return E x^power."""
    return x.mean_power(power) if isinstance(x, Family) else real(x) ** power


def real(x: Any) -> Array:
    """Return numbers as floats."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))


# ---------------------------------------------------------------------------------------------------------------


def numbers(name: str, value: Any, *, positive: bool = False) -> Any:
    """Return an array of floats: JAX's own as it is, any other in double precision, checked."""
    if isinstance(value, jax.Array):  # inside a compiled loss there is nothing to look at
        return value
    array = np.asarray(value, float)
    if not np.isfinite(array).all() or (positive and not (array > 0).all()):
        msg = f"`{name}` must be {'positive and ' if positive else ''}finite, got {value!r}."
        raise ValueError(msg)
    return array


def log(value: Any) -> Any:
    """Return the logarithm of what `numbers` returned."""
    return jnp.log(value) if isinstance(value, jax.Array) else np.log(value)


def together(*values: Any) -> tuple[Any, ...]:
    """Return arrays broadcast to one shape."""
    if any(isinstance(value, jax.Array) for value in values):
        return tuple(jnp.broadcast_arrays(*values))
    return tuple(np.array(value) for value in np.broadcast_arrays(*values))
