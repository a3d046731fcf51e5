"""A model by its posterior families, its prior and its likelihood; the loss is made of them."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array, Globals, PyTree
from pdvi.core.result import Point, Result
from pdvi.q.family import Family
from pdvi.shards.stacking import FRACTION, mask_name

Variables = dict[str, Any]  # a distribution for each variable; an array where it is a point estimate


class Model(abc.ABC):
    """Inherit from it, name the posteriors, write prior and likelihood: `init_global`, `init_local`, `loss` follow.

        -ELBO = sum over shards of  - E log likelihood - E log local prior - entropy of the locals
                                    - fraction (E log prior + entropy of the globals)

    ``globals_`` is a dict of distributions (`Normal`, `Gamma`, ...) as they are at the start; their class is the family
    of the posterior. An array stands for a point estimate, moved freely. ``locals_`` is the same for one row of the
    data, every row having its own. Rows within rows have a dict of their own: ``locals_ = ({...}, {...})``, the
    outermost first. The methods see the posteriors by the same names, locals with an axis for the rows in front.

    Shards are dicts of arrays that begin with the rows, and may be of unequal length: the methods return a term for
    each row and add nothing up, since what was padded is left out here. Closed forms, and any ability that
    `pdvi.core.model` lists, are added to the class as to any other model.
    """

    globals_: Mapping[str, Any]
    locals_: Mapping[str, Any] | tuple[Mapping[str, Any], ...] = ()

    @abc.abstractmethod
    def log_prior(self, g: Variables) -> PyTree:
        """Return E log p(globals): terms of any shape, or several in a tuple; they are added up."""

    def log_local_prior(self, g: Variables, local: Variables) -> PyTree:
        """Return E log p(locals | globals): a term for each row, or several such arrays in a tuple."""
        msg = f"{type(self).__name__} has `locals_` and so needs a method `log_local_prior(self, g, local)`."
        raise NotImplementedError(msg)

    @abc.abstractmethod
    def log_likelihood(self, g: Variables, local: Variables, shard: Any) -> PyTree:
        """Return E log p(data | globals, locals): a term for each row, or several such arrays in a tuple."""

    def start(self, key: Array) -> Variables:
        """Return where the globals start; a random start (`standard_normal`) takes what it needs from the key."""
        return dict(self.globals_)

    def sizes(self, shard: Any) -> tuple[int, ...]:
        """Return how many rows a shard has, how many rows a row has, and so on, a number for each dict of locals."""
        return row_sizes(shard, len(self._levels()))

    def posterior(self, result: Result | Point) -> Variables:
        """Return the distributions of the globals that a fit has found."""
        return self._globals(result.global_params)

    def local_posterior(self, result: Result | Point) -> Variables:
        """Return the distributions of the locals that a fit has found, shards and then rows in front.

        Padding is among them: ``posterior[problem.shards["mask"] > 0]`` has the real rows, in their order.
        """
        return self._locals(result.local_params)

    # What solvers see.

    def init_global(self, key: Array) -> Globals:
        """Return the unconstrained numbers of all globals to start from, a block for each kind."""
        return dict(_unfolded(self.start(key)))

    def init_local(self, key: Array, shard: Any) -> PyTree:
        """Return the unconstrained numbers of all locals of a shard to start from."""
        levels = self._levels()
        lengths = self.sizes(shard) if levels else ()
        return {
            name: jnp.broadcast_to(jnp.asarray(value), (*lengths[:depth], *np.shape(value)))
            for depth, level in enumerate(levels, 1)
            for name, value in _unfolded(level)
        }

    def loss(self, local: PyTree, globals_: Globals, shard: Any) -> Array:
        """Return this shard's share of the negative ELBO."""
        g, own = self._globals(globals_), self._locals(local)
        elbo = row_total("log_likelihood", self.log_likelihood(g, own, shard), shard, all_levels=True)
        if own:
            elbo += row_total("log_local_prior", self.log_local_prior(g, own), shard)
            elbo += row_total("locals_", _entropies(own), shard)
        once = row_total("log_prior", (self.log_prior(g), _entropies(g)), {})
        return -(elbo + shard[FRACTION] * once)

    def _globals(self, parts: Mapping[str, Any]) -> Variables:
        return _folded(self.globals_, parts)

    def _locals(self, parts: Mapping[str, Any]) -> Variables:
        found: Variables = {}
        for level in self._levels():
            found.update(_folded(level, parts))
        return found

    def _levels(self) -> tuple[Mapping[str, Any], ...]:
        return (self.locals_,) if isinstance(self.locals_, Mapping) else tuple(self.locals_)


def _unfolded(variables: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The unconstrained numbers of variables: "beta.location" and "beta.log_sd" for a normal beta."""
    return [
        (f"{name}.{part}", numbers) if part else (name, numbers)
        for name, variable in variables.items()
        for part, numbers in _parts(variable).items()
    ]


def _folded(variables: Mapping[str, Any], parts: Mapping[str, Any]) -> Variables:
    """The variables that these unconstrained numbers stand for, of the same families."""
    return {
        name: type(variable)(**{part: parts[f"{name}.{part}"] for part in variable.unconstrained()})
        if isinstance(variable, Family)
        else parts[name]
        for name, variable in variables.items()
    }


def _parts(variable: Any) -> dict[str, Any]:
    return variable.unconstrained() if isinstance(variable, Family) else {"": jnp.asarray(variable, float)}


def _entropies(variables: Variables) -> list[Array]:
    return [variable.entropy() for variable in variables.values() if isinstance(variable, Family)]


def _masks(shard: Mapping[str, Any]) -> list[Array]:
    """The masks of a shard, the outermost rows first: ``mask`` (rows,), ``mask2`` (rows, rows of a row), and so on."""
    found: list[Array] = []
    while mask_name(len(found) + 1) in shard:
        found.append(shard[mask_name(len(found) + 1)])
    return found


def row_sizes(shard: Mapping[str, Any], levels: int) -> tuple[int, ...]:
    """Return how many rows a shard has, how many rows each of these, and so on for so many levels.

    Told by masks, and where there are none by the leading axes that all arrays of the shard share.
    """
    known = _masks(shard)
    if len(known) >= levels:
        return known[levels - 1].shape
    leaves = [leaf for name, part in shard.items() if name != FRACTION for leaf in jax.tree.leaves(part)]
    shapes = {leaf.shape[:levels] for leaf in leaves if leaf.ndim}
    if len(shapes) != 1 or len(next(iter(shapes))) != levels:
        told = {name: tuple(jnp.shape(part)) for name, part in shard.items() if name != FRACTION}
        msg = (
            f"every array of a shard must begin with its rows, for {levels} level(s) of local variables, got the "
            f"shapes {told}; override `sizes` to say how many rows a shard has."
        )
        raise ValueError(msg)
    return next(iter(shapes))


def row_total(what: str, terms: PyTree, shard: Mapping[str, Any], *, all_levels: bool = False) -> Array:
    """Return the sum of terms over real rows: each array times the deepest mask whose shape it begins with.

    ``all_levels``: one of them must reach the innermost rows, since a sum over padded ones would go unnoticed.
    """
    known = _masks(shard)
    arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(terms)]
    fitting = [[d for d, mask in enumerate(known, 1) if array.shape[:d] == mask.shape] for array in arrays]
    depths = [max(fits, default=0) for fits in fitting]  # of the deepest mask whose shape an array begins with
    deepest = len(known) if all_levels else min(1, len(known))
    if known and arrays and (min(depths) < 1 or max(depths) < deepest):
        wanted = known[deepest - 1].shape
        msg = (
            f"`{what}` must return a term for each row, of shape {wanted} or with more axes, since rows were padded, "
            f"got {[array.shape for array in arrays]}; leave the sum over rows to pdvi."
        )
        raise ValueError(msg)
    summed = jnp.asarray(0.0)
    for array, depth in zip(arrays, depths):
        mask = known[depth - 1] if depth else jnp.asarray(1.0)
        summed += jnp.sum(array * mask.reshape(*mask.shape, *[1] * (array.ndim - mask.ndim)))
    return summed
