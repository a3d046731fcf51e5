"""Put what the paper says beside what came out: as tables, as a page, and collected from several experiments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from pdvi.reproduce.provenance import commits
from pdvi.reproduce.runs import write_text

HOLDS, PARTLY, FAILS = "holds", "partly", "does not hold"


class Claim(NamedTuple):
    """A sentence of the paper in our words, where it is, the numbers, and the verdict."""

    claim: str
    where: str
    measured: str
    verdict: str


def verdict(*parts: bool) -> str:
    """Return the verdict on a claim with several parts."""
    return HOLDS if all(parts) else PARTLY if any(parts) else FAILS


def listed(values: pd.Series, style: str = ".3g") -> str:
    """Return the numbers of several methods as text."""
    return ", ".join(f"{name} {value:{style}}" for name, value in values.items())


def markdown(table: pd.DataFrame) -> str:
    """Return a table as markdown, numbers with four digits."""

    def cell(value: Any) -> str:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        return text.replace("|", "\\|").replace("\n", " ")

    rows = [[*map(str, table.columns)], *([cell(value) for value in row] for row in table.itertuples(index=False))]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * table.shape[1], *lines[1:]])


def write_table(table: pd.DataFrame, out: Path, name: str) -> None:
    """Write a table among those of a folder, as csv (six digits: what a second run gives too) and as markdown."""
    write_text(out / "tables" / f"{name}.csv", table.to_csv(index=False, float_format="%.6g").rstrip("\n"))
    write_text(out / "tables" / f"{name}.md", markdown(table))


def write_page(
    folder: Path, title: str, claims: Sequence[Claim], *, about: str, command: str, quick: bool, figures: dict[str, str]
) -> None:
    """Write `claims.json`, and `README.md` with the claims, the figures (name: caption) and the folder's tables."""
    record = {
        "title": title,
        "about": about,
        "command": command,
        "commit": ", ".join(commits(folder)),
        "quick": quick,
        "claims": [claim._asdict() for claim in claims],
    }
    write_text(folder / "claims.json", json.dumps(record, indent=1))
    parts = [f"# {title}", *_section(record)]
    parts += [f"![{caption}](figures/{name}.png)\n\n{caption}" for name, caption in figures.items()]
    for path in sorted((folder / "tables").glob("*.md")):
        parts += [f"## {path.stem.replace('-', ' ').capitalize()}", path.read_text().strip()]
    write_text(folder / "README.md", "\n\n".join(parts))


def collected(folders: Sequence[Path]) -> str:
    """Return the claims of several experiments as one page."""
    parts = [
        "# The paper's claims, and what came out",
        "Assembled by `python experiments/claims.py FOLDER ...` from folders that `pdvi reproduce` wrote. A verdict"
        " says what these runs show, for the paper or against it.",
    ]
    for folder in folders:
        path = Path(folder) / "claims.json"
        if not path.exists():
            msg = f"no claims in {str(folder)!r}; give folders that pdvi reproduce has written."
            raise FileNotFoundError(msg)
        record = json.loads(path.read_text())
        parts += [f"## {record['title']}", *_section(record)]
    return "\n\n".join(parts)


def _section(record: dict[str, Any]) -> list[str]:
    quick = "This is the **quick** form: small data, few trials; the full one may end otherwise."
    made = f"`{record['command']}`, runs made at commit {record['commit']}."
    table = pd.DataFrame(record["claims"]).rename(columns={"where": "where in the paper"})
    return [*([quick] if record["quick"] else []), made, record["about"], markdown(table)]
