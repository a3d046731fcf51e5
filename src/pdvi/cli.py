"""The command line: thin, one function per command."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
) -> None:
    """Large-scale variational inference by primal-dual optimisation."""


@app.command()
def demo(
    n: Annotated[int, typer.Option(help="Number of shards.")] = 10_000,
    epochs: Annotated[int, typer.Option(help="Epochs to run.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the data and the draws.")] = 0,
) -> None:
    """Solve the paper's quadratic problem with PD-VI and P2D-VI, nothing tuned, and print a table."""
    import pdvi

    problem = pdvi.datasets.quadratic(n, seed=seed)
    solvers = {"PD-VI": pdvi.PDVI(), "P2D-VI": pdvi.P2DVI()}
    table = Table(title=f"{n:,} shards, 5 local and 5 global variables, condition number 1,000")
    for column in ("method", "epochs", "seconds", "objective / start", "gradient / start"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, solver in solvers.items():
        trace = pdvi.fit(problem, solver, max_epochs=epochs, tol=0, seed=seed).trace
        first, last = trace.iloc[0], trace.iloc[-1]
        table.add_row(
            name,
            f"{last.epoch:g}",
            f"{last.seconds:.2f}",
            f"{last.objective / first.objective:.1e}",
            f"{last.grad_norm / first.grad_norm:.1e}",
        )
    Console().print(table)


@app.command()
def info() -> None:
    """Print versions and devices, for a bug report."""
    import jax

    lines = {"pdvi": version("pdvi"), "Python": platform.python_version(), "platform": platform.platform()}
    lines |= {name: version(name) for name in ("jax", "numpy", "scipy", "scikit-learn", "anndata", "scanpy")}
    lines["devices"] = ", ".join(str(device) for device in jax.devices())
    for name, value in lines.items():
        print(f"{name:14} {value}")


def main() -> None:
    """Exit code 0, or 1 with one line that names the cause and the remedy."""
    try:
        app(standalone_mode=True)
    except (ValueError, OSError) as error:
        if "--debug" in sys.argv:
            raise
        print(f"pdvi: {error}", file=sys.stderr)
        sys.exit(1)
