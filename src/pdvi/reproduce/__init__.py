"""Reproduce the paper's experiments, as three commands: `pdvi reproduce quadratic`, `mixture` and `embryo`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvi._base.checks import one_of, whole
from pdvi._base.console import Say

if TYPE_CHECKING:
    from pdvi.reproduce.claims import Claim

EXPERIMENTS = ("quadratic", "mixture", "embryo")
SEEDS = {True: 2, False: 5}  # by whether the run is a quick one


def run(
    experiment: str, out: Path, *, say: Say, seeds: int | None = None, data: Path | None = None, quick: bool = False
) -> list[Claim]:
    """Run an experiment, or finish it, and return its claims with what came out."""
    if data is not None and experiment != "embryo":
        msg = f"`data` is for the embryo alone, got {str(data)!r} for {experiment}; leave out --data."
        raise ValueError(msg)
    one_of("experiment", str(experiment), EXPERIMENTS)
    seeds = SEEDS[quick] if seeds is None else whole("seeds", seeds, least=1)
    module: Any = import_module(f"pdvi.reproduce.{experiment}")
    command = f"pdvi reproduce {experiment} --seeds {seeds}" + (f" --data {data.name}" if data else "")
    command += " --quick" if quick else ""
    sizes, more = module.QUICK if quick else module.FULL, {"data": data} if data else {}
    return module.run(out, seeds=seeds, say=say, command=command, sizes=sizes, quick=quick, **more)
