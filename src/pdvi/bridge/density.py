"""The log density of a NumPyro model, site by site, for some of the rows of its data."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from pdvi._base.types import Array
from pdvi.bridge.sites import Function, Site


class Terms(NamedTuple):
    """Log densities of one draw by site, Jacobians included."""

    rows: dict[str, Array]  # sites inside the plate: a number for each row
    outside: dict[str, Array]  # all others: a number


class Density(eqx.Module):
    """A model, called with unknowns as flat vectors: (globals,), and (rows, locals) of the rows of a shard."""

    function: Function = eqx.field(static=True)
    plate: str = eqx.field(static=True)
    ragged: str | None = eqx.field(static=True)  # the nested plate whose size differs from row to row
    globals_: tuple[Site, ...] = eqx.field(static=True)
    locals_: tuple[Site, ...] = eqx.field(static=True)
    observed: tuple[Site, ...] = eqx.field(static=True)  # sites in the plate that have data
    deterministic: tuple[tuple[str, int | None], ...] = eqx.field(static=True)  # and the axis of their rows, if any
    plain: tuple[tuple[str, Any], ...] = eqx.field(static=True)
    constants: dict[str, Array]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all unknowns: globals, locals, and what is computed of them."""
        return (*(site.name for site in (*self.globals_, *self.locals_)), *(name for name, _ in self.deterministic))

    @property
    def n_global(self) -> int:
        """Return the number of unknowns outside the plate."""
        return sum(math.prod(site.shape) for site in self.globals_)

    @property
    def n_local(self) -> int:
        """Return the number of unknowns of a row."""
        return sum(math.prod(site.by_row(self.plate)) for site in self.locals_)

    def weights(self, shard: Any) -> Array:
        """Return 1 for unknowns of a row and 0 for those that padding made, (rows, locals)."""
        rows, parts = shard["weight"].shape[0], []
        for site in self.locals_:
            there = jnp.ones((rows, *site.by_row(self.plate)))
            if self.ragged is not None and site.inside(self.ragged):
                nested = site.axis(self.ragged)
                nested = nested + 1 if nested < site.axis(self.plate) else nested  # the rows come first here
                there *= _laid(shard["mask"], there.ndim, 0, nested)
            parts.append(there.reshape(rows, -1))
        return shard["weight"][:, None] * jnp.concatenate(parts, axis=1)

    def terms(self, z: Array, z_local: Array, shard: Any) -> Terms:
        """Return log densities by site at one draw of all unknowns, (globals,) and (rows, locals)."""
        from numpyro.distributions import biject_to
        from numpyro.distributions.util import sum_rightmost

        unknown = self.values(z, z_local)
        rows, outside = {}, {}
        for site_name, site in self.trace(z, z_local, shard).items():
            if site["type"] != "sample":
                continue
            log_prob = site["fn"].log_prob(site["value"])
            if site_name in unknown:
                bent = biject_to(site["fn"].support).log_abs_det_jacobian(unknown[site_name], site["value"])
                log_prob = log_prob + sum_rightmost(bent, jnp.ndim(bent) - jnp.ndim(log_prob))
            if site["scale"] is not None:
                log_prob = log_prob * site["scale"]
            dims = {frame.name: frame.dim for frame in site["cond_indep_stack"]}
            if self.plate in dims:
                if self.ragged in dims:
                    axes = (log_prob.ndim + dims[name] for name in (self.plate, self.ragged))
                    log_prob = jnp.where(_laid(shard["mask"], log_prob.ndim, *axes) > 0, log_prob, 0)
                by_row = jnp.moveaxis(log_prob, dims[self.plate], 0)
                rows[site_name] = by_row.reshape(by_row.shape[0], -1).sum(1)
            else:
                outside[site_name] = jnp.sum(log_prob)
        return Terms(rows, outside)

    def trace(self, z: Array, z_local: Array, shard: Any, key: Array | None = None, *, observed: bool = True) -> Any:
        """Return NumPyro's trace of the model at these unknowns; ``observed=False`` draws the data anew."""
        from numpyro import handlers
        from numpyro.distributions import biject_to

        unknown = self.values(z, z_local)

        def value(site: dict[str, Any]) -> Array | None:
            if site["type"] != "sample" or site["name"] not in unknown:
                return None
            return biject_to(site["fn"].support)(unknown[site["name"]])

        key = jax.random.key(0) if key is None else key
        call = handlers.substitute(handlers.seed(self.function, key), substitute_fn=value)
        if not observed:
            call = handlers.uncondition(call)
        return handlers.trace(call).get_trace(**dict(self.plain), **self.constants, **shard["data"])

    def values(self, z: Array, z_local: Array) -> dict[str, Array]:
        """Return flat unknowns by site, without constraints."""
        found, at = {}, 0
        for site in self.globals_:
            size = math.prod(site.shape)
            found[site.name] = z[at : at + size].reshape(site.shape)
            at += size
        at = 0
        for site in self.locals_:
            shape = site.by_row(self.plate)
            size = math.prod(shape)
            part = z_local[:, at : at + size].reshape(-1, *shape)
            found[site.name] = jnp.moveaxis(part, 0, site.axis(self.plate))
            at += size
        return found

    def by_row(self, z: Array, z_local: Array, shard: Any) -> tuple[Array, Array]:
        """Return the log density of each row, and that of all sites outside the plate."""
        terms = self.terms(z, z_local, shard)
        rows = sum(terms.rows.values(), start=jnp.zeros_like(shard["weight"]))
        return rows, sum(terms.outside.values(), start=jnp.zeros(()))

    def present(self, site: Site, value: Array, shard: Any) -> Array:
        """Return the value of a site inside the plate, NaN where ragged groups were padded."""
        if self.ragged is None or not site.inside(self.ragged):
            return value
        there = _laid(shard["mask"], jnp.ndim(value), site.axis(self.plate), site.axis(self.ragged))
        return jnp.where(there > 0, value, jnp.nan)


def _laid(mask: Array, ndim: int, rows: int, nested: int) -> Array:
    """Return a mask of (rows, nested) laid along these axes of an array."""
    sizes = [1] * ndim
    sizes[rows], sizes[nested] = mask.shape
    return (mask if rows < nested else mask.T).reshape(sizes)
