"""What is asked of a model before it is fitted: that it follows the size of its data, and that rows do not meet."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdvi._base.types import Array
from pdvi.bridge.density import Density, Terms
from pdvi.bridge.rows import Arguments
from pdvi.bridge.sites import Function, Structure, structure_of

PROBED = 16  # rows of a trial
CLOSE = 1e-4  # relative: single precision adds the same numbers in another order


def probed(function: Function, arguments: Arguments, whole: Structure, plate: str) -> Structure:
    """Return the structure for a few rows, if it is the same but for their number."""
    n = whole.plates[plate]
    rows = np.arange(PROBED if n != PROBED else PROBED + 1) % n
    remedy = "take the size from the data, as in numpyro.plate(name, len(y))"
    try:
        part = structure_of(function, {**arguments.plain, **arguments.constants, **arguments.data(rows)})
    except ValueError as error:
        msg = (
            f"`model` must work with some of the rows of `data`: it does with all {n}, and with {len(rows)} it raises "
            f"{type(error).__name__}: {error}. Where the size of plate {plate!r} is written down, {remedy}."
        )
        raise ValueError(msg) from error
    if part.plates[plate] != len(rows):
        msg = (
            f"`model` must work with some of the rows of `data`: plate {plate!r} has size {part.plates[plate]} for "
            f"data of {len(rows)} rows; {remedy}."
        )
        raise ValueError(msg)
    for site, other in zip(whole.latent(plate, inside=False), part.latent(plate, inside=False)):
        if site.shape != other.shape:
            msg = (
                f"`model` must have unknowns of rows in the plate: {site.name!r} has shape {site.shape} for {n} rows "
                f"and {other.shape} for {len(rows)}; sample it within numpyro.plate({plate!r}, ...)."
            )
            raise ValueError(msg)
    return part


def row_axes(whole: Structure, part: Structure) -> tuple[tuple[str, int | None], ...]:
    """Return the deterministic sites, with the axis that grows with the rows."""
    found: list[tuple[str, int | None]] = []
    for site, other in zip(whole.sites, part.sites):
        if site.kind == "deterministic":
            grown = [axis for axis, (a, b) in enumerate(zip(site.shape, other.shape)) if a != b]
            if len(grown) <= 1:
                found.append((site.name, grown[0] if grown else None))
    return tuple(found)


def check_rows(model: Density, arguments: Arguments, n: int) -> tuple[str, ...]:
    """Refuse a model in which rows meet elsewhere than in the globals.

    Seen by numbers: other unknowns, then other data, in half of the rows must not change the terms of the other half,
    nor those outside the plate. Returns the deterministic sites that such changes do change: they are of no one row.
    """
    half = PROBED // 2
    rng = np.random.default_rng(0)
    rows = rng.permutation(n)[np.arange(PROBED) % n]
    others = np.concatenate([rows[:half], rng.permutation(n)[np.arange(half) % n]])
    working = jnp.result_type(float)
    z = jnp.asarray(0.3 * rng.standard_normal(model.n_global), working)
    local = 0.3 * rng.standard_normal((2, PROBED, model.n_local))
    local[1, :half] = local[0, :half]
    first, moved = jnp.asarray(local, working)
    here, there = _trial(arguments, rows), _trial(arguments, others)

    def unrowed(at: Array, shard: Any) -> dict[str, Array]:
        trace = model.trace(z, at, shard)
        return {name: trace[name]["value"] for name, axis in model.deterministic if axis is None}

    @jax.jit
    def compared(first: Array, moved: Array, here: Any, there: Any) -> list[tuple[Terms, dict[str, Array]]]:
        cases = ((first, here), (moved, here), (first, there))
        return [(model.terms(z, at, shard), unrowed(at, shard)) for at, shard in cases]

    (base, told), *changed = compared(first, moved, here, there)
    for name, term in (*base.rows.items(), *base.outside.items()):
        if not np.isfinite(term).all():
            msg = (
                f"`model` must have a finite log density near the start: that of site {name!r} is not; is the data "
                "within its support?"
            )
            raise ValueError(msg)
    whats = ("unknowns", "data")
    remedies = ("make what rows share a global", "compute what is of all rows (a mean, say) beforehand")
    for (terms, _), what, remedy in zip(changed, whats, remedies):
        for name, term in terms.rows.items():
            if not _close(term[:half], base.rows[name][:half]):
                msg = (
                    f"`model` must have rows that meet in the globals only: at site {name!r} the log density of a row "
                    f"changes with {what} of other rows; {remedy}."
                )
                raise ValueError(msg)
        for name, term in terms.outside.items():
            if not _close(term, base.outside[name]):
                msg = (
                    f"`model` must have all that is of rows inside the plate: site {name!r} is outside of "
                    f"{model.plate!r} and its log density changes with {what} of rows; put it inside "
                    f"numpyro.plate({model.plate!r}, ...), with a nested plate for several observations a row."
                )
                raise ValueError(msg)
    return tuple(name for name in told if not all(_close(other[name], told[name]) for _, other in changed))


def _trial(arguments: Arguments, rows: np.ndarray) -> dict[str, Any]:
    shard = {"data": arguments.data(rows), "weight": np.ones(len(rows)), **arguments.mask(rows)}
    working = np.dtype(jnp.result_type(float))
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, working if leaf.dtype.kind == "f" else None), shard)


def _close(a: Any, b: Any) -> bool:
    a, b = np.asarray(a, float), np.asarray(b, float)
    return bool((np.abs(a - b) <= CLOSE * (1 + np.abs(b))).all())
