"""From a NumPyro model and its data to a problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from pdvi._base.checks import instance, whole
from pdvi._base.checks import seed as checked_seed
from pdvi.bridge.checks import check_rows, probed, row_axes
from pdvi.bridge.density import Density
from pdvi.bridge.draws import both, global_draws, local_draws, number_of_draws
from pdvi.bridge.model import NumPyroModel
from pdvi.bridge.rows import Arguments, padded, sorted_out
from pdvi.bridge.sites import Function, Structure, check_structure, structure_of
from pdvi.core.problem import Problem

ROWS, SHARDS = 250, 20  # of a shard at least, and shards at most, where their number is not given


def from_numpyro(
    model: Function,
    data: Mapping[str, Any],
    *,
    plate: str = "data",
    axes: Mapping[str, int | None] | None = None,
    draws: int | None = None,
    n_shards: int | None = None,
    seed: int = 0,
) -> Problem:
    """Return a NumPyro model with its data as a problem for `pdvi.fit`.

    Unknowns outside the plate are globals, those inside are locals of a row. q is a normal distribution for each
    unknown, where it has no constraints (NumPyro's AutoNormal); expectations are means over fixed draws.

    Parameters
    ----------
    model
        called as ``model(**data)``, also with some of the rows only: the plate takes its size from the data
        (``numpyro.plate("data", len(y))``). Plates may be nested in it.
    data
        the model's arguments. Arrays with a row for each entry of the plate are cut into shards, other arrays are the
        same for all rows; numbers, texts and None reach the model as they are. A list of arrays of unequal length, one
        for each row, is padded to (rows, longest), and what was added does not count in the nested plate of this size.
    plate
        the name of the plate whose entries are the rows.
    axes
        for arrays whose rows are not on the first axis: the axis; None for one that has no rows although its first axis
        is as long.
    draws
        an even number; by default enough for exact second moments, 32 to 128, at least 64 where rows have several
        locals. `pdvi.check_draws` tells whether twice as many would change anything.
    n_shards
        by default what suits the number of rows.
    seed
        of the draws, and of the rows' distribution over the shards.
    """
    try:
        import numpyro  # noqa: F401
    except ImportError as error:
        msg = 'pdvi.from_numpyro needs NumPyro; install it with pip install "pdvi[numpyro]".'
        raise ImportError(msg) from error
    instance("data", data, Mapping, "a dict of the model's arguments")
    rng = np.random.default_rng(checked_seed("seed", seed))
    filled, lengths = padded(data)
    everything = structure_of(model, filled)
    check_structure(everything, plate)
    n = everything.plates[plate]
    arguments = sorted_out(filled, lengths, n, plate, axes or {})
    part = probed(model, arguments, everything, plate)
    density = _density(model, arguments, everything, part, plate)
    of_no_row = check_rows(density, arguments, n)
    kept = tuple((name, axis) for name, axis in density.deterministic if name not in of_no_row)
    density = dataclasses.replace(density, deterministic=kept)
    if draws is None:
        draws = number_of_draws(density.n_global, density.n_local, n)
    if whole("draws", draws, least=2) % 2:
        msg = f"`draws` must be even, since they come in pairs, got {draws!r}."
        raise ValueError(msg)
    if n_shards is None:
        n_shards = int(np.clip(n // ROWS, 1, SHARDS))
    whole("n_shards", n_shards, least=1, most=n, of="rows")
    return with_draws(density, _shards(arguments, n, n_shards, rng), draws, rng)


def with_draws(density: Density, shards: dict[str, Any], draws: int, rng: np.random.Generator) -> Problem:
    """Return the problem with new draws."""
    half = global_draws(rng, draws // 2, density.n_global)
    if n_local := density.n_local:
        n_shards, rows = shards["weight"].shape
        noise = both(local_draws(rng, half, n_shards * rows, n_local))
        shards = {**shards, "noise": np.moveaxis(noise.reshape(draws, n_shards, rows, n_local), 1, 0)}
    return Problem(NumPyroModel(density, both(half)), shards)


def _density(function: Function, arguments: Arguments, everything: Structure, part: Structure, plate: str) -> Density:
    density = Density(
        function=function,
        plate=plate,
        ragged=_ragged(everything, arguments, plate),
        globals_=part.latent(plate, inside=False),
        locals_=part.latent(plate, inside=True),
        observed=part.observed(plate),
        deterministic=row_axes(everything, part),
        plain=tuple(arguments.plain.items()),
        constants=arguments.constants,
    )
    if density.n_global == 0:
        msg = f"`model` must have unknowns outside the plate {plate!r}: else its rows share nothing; give one a prior."
        raise ValueError(msg)
    return density


def _ragged(structure: Structure, arguments: Arguments, plate: str) -> str | None:
    """Return the nested plate that has the length of the longest group."""
    if arguments.lengths is None:
        return None
    longest = int(arguments.lengths.max())
    nested = {frame.name for site in structure.sites if site.inside(plate) for frame in site.frames} - {plate}
    fitting = sorted(name for name in nested if structure.plates[name] == longest)
    if len(fitting) != 1:
        sizes = {name: structure.plates[name] for name in sorted(nested)}
        msg = (
            f"`model` must have one plate inside {plate!r} for the entries of a group, of the size of the longest "
            f"({longest}), got {sizes}; write numpyro.plate(name, y.shape[1], dim=-1) inside it, or pad by hand and "
            "use numpyro.handlers.mask."
        )
        raise ValueError(msg)
    return fitting[0]


def _shards(arguments: Arguments, n: int, n_shards: int, rng: np.random.Generator) -> dict[str, Any]:
    """Rows dealt at random, so that shards are alike however the data is sorted; weight 0 fills the last shard."""
    per_shard = -(-n // n_shards)
    slots = np.arange(-(-n // per_shard) * per_shard)
    places = rng.permutation(n)[np.minimum(slots, n - 1)].reshape(-1, per_shard)
    there = (slots < n).astype(float).reshape(-1, per_shard)
    by_shard = [{"data": arguments.data(rows), **arguments.mask(rows)} for rows in places]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *by_shard)
    return {**stacked, "weight": there, "fraction": there.sum(1) / n, "row": places.astype(np.int32)}
