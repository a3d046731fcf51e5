"""Pieces of HTML. Whatever comes from the data goes through `text`, so that it can only ever be text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape


def text(value: object) -> str:
    """Return a value as text that is safe in elements and in quoted attributes."""
    return escape(str(value), quote=True)


def dot(color: str) -> str:
    """Return a disc in a colour."""
    return f'<span class="dot" style="background:{text(color)}"></span>'


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "") -> str:
    """Return a table that scrolls sideways where it is too wide; cells are HTML, titles text."""
    head = "".join(f'<th scope="col">{text(title)}</th>' for title in titles)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cell(cell: str) -> str:
    return cell if cell.startswith("<td") else f"<td>{cell}</td>"


def settings(values: Mapping[str, object]) -> str:
    """Return a table of names and values."""
    return table(
        ("setting", "value"), ((text(name), text(_short(value))) for name, value in values.items()), kind="words"
    )


def _short(value: object) -> object:
    if isinstance(value, str) and not value:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else value


def section(name: str, title: str, *parts: str) -> str:
    """Return a section with a heading that the menu leads to; nothing if it has no parts."""
    inner = "\n".join(part for part in parts if part)
    return f'<section id="{name}"><h2>{text(title)}</h2>\n{inner}</section>' if inner else ""


def heat(matrix: Sequence[Sequence[float]], names: Sequence[str], colors: Sequence[str], corner: str, form: str) -> str:
    """Return a square of numbers, each on a ground that is the stronger the larger it is; the diagonal has none.

    What a row shares with itself is the largest number as a rule, and would leave all others pale.
    """
    top = max((value for i, row in enumerate(matrix) for j, value in enumerate(row) if i != j), default=0.0) or 1.0
    rows = []
    for i, (name, color, row) in enumerate(zip(names, colors, matrix)):
        strength = [0.0 if i == j else 0.7 * max(value, 0) / top for j, value in enumerate(row)]
        cells = [
            f'<td style="background:rgba(var(--heat),{strong:.2f})">{_unless_zero(value, form)}</td>'
            for strong, value in zip(strength, row)
        ]
        rows.append([(dot(color) if color else "") + text(name), *cells])
    return table((corner, *names), rows, kind="heat")


def _unless_zero(value: float, form: str) -> str:
    """A number in a crowded table: nothing where it would read 0."""
    shown = f"{value:{form}}"
    return "" if float(shown) == 0 else shown


def stack(shares: Iterable[tuple[str, str, float]]) -> str:
    """Return a bar cut into shares, each a name, a colour and a part of 1."""
    parts = "".join(
        f'<i style="width:{100 * share:.2f}%;background:{text(color)}" title="{text(name)}: {100 * share:.1f} %"></i>'
        for name, color, share in shares
        if share > 0
    )
    return f'<div class="stack">{parts}</div>'
