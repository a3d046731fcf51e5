"""What commands print besides their progress. What takes long to import is imported inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anndata import AnnData


def details(adata: AnnData, key: str) -> Iterator[str]:
    """Yield what --verbose adds: the settings, where the time went, the sizes of the domains."""
    fit = adata.uns[key]
    settings = {name: value for name, value in fit["params"].items() if name != "config"}
    yield "settings: " + ", ".join(f"{name}={value}" for name, value in settings.items())
    yield "seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in fit["seconds"].items())
    yield f"ELBO {fit['elbo']:,.1f}"
    sizes = adata.obs[key].value_counts(sort=False)
    yield "spots: " + ", ".join(f"{name}: {size:,}" for name, size in sizes.items())


def print_table(columns: dict[str, Any]) -> None:
    """Print columns of numbers side by side."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right")
    for row in zip(*columns.values()):
        table.add_row(*(f"{value:,.3f}" if isinstance(value, float) else str(value) for value in row))
    Console().print(table)


def print_json(**values: Any) -> None:
    """Print one object, for machines."""
    import json

    print(json.dumps(values))
