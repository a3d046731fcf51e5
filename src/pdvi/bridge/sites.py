"""What a NumPyro model consists of: its sites, read from a trace, each outside or inside the plate of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from pdvi._base.checks import key_in

Function = Callable[..., Any]


class Site(NamedTuple):
    """A site of the model as one call of it shows it."""

    name: str
    kind: str  # "latent", "observed" or "deterministic"
    frames: tuple[Any, ...]  # NumPyro's, of the plates that it is in (name, dim, size), innermost first
    batch: int  # the number of batch axes
    shape: tuple[int, ...]  # of a latent: without constraints; of others: of the value

    def inside(self, plate: str) -> bool:
        """Return whether the site is in a plate."""
        return any(frame.name == plate for frame in self.frames)

    def axis(self, plate: str) -> int:
        """Return the axis of the plate, counted from the left."""
        return self.batch + next(frame.dim for frame in self.frames if frame.name == plate)

    def by_row(self, plate: str) -> tuple[int, ...]:
        """Return the shape of one row's part."""
        axis = self.axis(plate)
        return (*self.shape[:axis], *self.shape[axis + 1 :])


class Structure(NamedTuple):
    """All sites of one call, and the plates with their sizes."""

    sites: tuple[Site, ...]
    plates: dict[str, int]

    def latent(self, plate: str, *, inside: bool) -> tuple[Site, ...]:
        """Return the globals, or the locals."""
        return tuple(site for site in self.sites if site.kind == "latent" and site.inside(plate) == inside)

    def observed(self, plate: str) -> tuple[Site, ...]:
        """Return the sites with an entry for each row: data may be the same for all, and a factor has none."""
        seen = (site for site in self.sites if site.kind == "observed" and site.inside(plate) and 0 not in site.shape)
        n = self.plates[plate]
        return tuple(site for site in seen if site.axis(plate) >= 0 and site.shape[site.axis(plate)] == n)


def structure_of(function: Function, arguments: Mapping[str, Any]) -> Structure:
    """Return the sites of a model called with these arguments; nothing is computed, shapes are enough.

    Arrays are traced, as in a compiled fit; all else reaches the model as it is.
    """
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray | jax.Array)}
    rest = {name: value for name, value in arguments.items() if name not in arrays}
    found: list[Structure] = []

    def call(arrays: dict[str, Any]) -> tuple[()]:
        from numpyro import handlers

        trace = handlers.trace(handlers.seed(function, jax.random.key(0))).get_trace(**rest, **arrays)
        found.append(_structure(trace))
        return ()

    try:
        jax.eval_shape(call, arrays)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        msg = (
            "`model` must not look at the numbers in `data`, only at their shapes: it is compiled once for all shards. "
            "Use jax.numpy in it, and give what decides about shapes as plain Python numbers. JAX says: "
            f"{str(error).splitlines()[0]}"
        )
        raise ValueError(msg) from error
    return found[0]


def check_structure(structure: Structure, plate: str) -> None:
    """Refuse what has no mean-field normal q with locals that are independent by row, and say what to do instead."""
    key_in(structure.plates, plate, "the plates of the model", "give the one whose rows are the data as `plate`")
    for site in structure.sites:
        if site.inside(plate) and site.frames[-1].name != plate:
            outer = site.frames[-1].name
            msg = (
                f"`plate` must be the outermost plate of every site that is in it: {site.name!r} is in {plate!r} "
                f"inside {outer!r}; give plate={outer!r}, or exchange the two `with` statements."
            )
            raise ValueError(msg)


def _structure(trace: dict[str, Any]) -> Structure:
    sites, plates = [], {}
    for name, site in trace.items():
        if site["type"] == "plate":
            plates[name], subsample_size = site["args"]
            if subsample_size not in (None, plates[name]):
                msg = (
                    f"`model` must not subsample: plate {name!r} has subsample_size={subsample_size} of {plates[name]};"
                    " leave it out, shards and batches are drawn by pdvi.fit."
                )
                raise ValueError(msg)
        elif site["type"] == "param":
            msg = f"`model` must have priors for all unknowns: {name!r} is a numpyro.param; make it a numpyro.sample."
            raise ValueError(msg)
        elif site["type"] in ("sample", "deterministic"):
            sites.append(_site(name, site))
    return Structure(tuple(sites), plates)


def _site(name: str, site: dict[str, Any]) -> Site:
    from numpyro.distributions import biject_to

    frames = tuple(site["cond_indep_stack"])
    shape = tuple(np.shape(site["value"]))
    if site["type"] == "deterministic":
        return Site(name, "deterministic", frames, len(shape), shape)
    batch = len(site["fn"].batch_shape)
    if site["is_observed"]:
        return Site(name, "observed", frames, len(shape) - len(site["fn"].event_shape), shape)
    support = site["fn"].support
    if support.is_discrete:
        msg = (
            f"`model` must have continuous unknowns only: {name!r} is discrete. Sum it out (a mixture as "
            "numpyro.distributions.MixtureSameFamily, or jax.scipy.special.logsumexp of the cases in numpyro.factor)."
        )
        raise ValueError(msg)
    return Site(name, "latent", frames, batch, tuple(biject_to(support).inverse_shape(shape)))
