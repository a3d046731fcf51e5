"""What commands print besides their progress. What takes long to import is imported inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str | None = None, digits: int = 3
) -> None:
    """Print rows of texts and numbers; columns of numbers are aligned on the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for name, first in zip(columns, rows[0]):
        table.add_column(name, justify="left" if isinstance(first, str) else "right")
    for row in rows:
        table.add_row(*(f"{cell:,.{digits}f}" if isinstance(cell, float) else str(cell) for cell in row))
        if all(isinstance(cell, str) for cell in row):  # texts are wrapped, and need lines between them
            table.add_section()
    Console().print(table)


def print_json(**values: Any) -> None:
    """Print one object, for machines."""
    import json

    print(json.dumps(values))
