"""Formulas with random effects, "y ~ x + (1 + x | group)": the brackets are taken out, the rest is for formulaic."""

from __future__ import annotations

import re
from typing import Any

RANDOM = re.compile(r"\+?\s*\(([^()|]*)\|([^()|]*)\)")


def parsed(formula: str) -> tuple[str, str, str]:
    """Return a formula without its random effects, theirs, and the column of the groups."""
    found = RANDOM.findall(formula) if isinstance(formula, str) else []
    if len(found) != 1 or "~" not in formula or "|" in RANDOM.sub("", formula):
        msg = (
            '`formula` must have a response and one term of random effects, "y ~ x + (1 + x | group)", '
            f"got {formula!r}; for crossed or nested groups write a model of your own."
        )
        raise ValueError(msg)
    random, group = (part.strip() for part in found[0])
    fixed = RANDOM.sub("", formula).strip()
    return f"{fixed} 1" if fixed.endswith("~") else fixed, random, group


def formulaic() -> Any:
    """Return the package, or say how to get it."""
    try:
        import formulaic as package
    except ImportError:
        msg = 'formulas need the package formulaic, which is not installed; run pip install "pdvi[formula]".'
        raise ImportError(msg) from None
    return package
