"""Formulas with random effects, "y ~ x + (1 + x | group)": the brackets are taken out, the rest is for formulaic."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

RANDOM = re.compile(r"\+?\s*\(([^()|]*)\|([^()|]*)\)")


class Parts(NamedTuple):
    """A formula without its random effects, theirs, and the column of the groups."""

    fixed: str
    random: str
    group: str


class Design(NamedTuple):
    """Matrices of a table, with the names of their columns, and how to make them again for another table."""

    y: np.ndarray
    x: pd.DataFrame
    z: pd.DataFrame
    x_spec: Any
    z_spec: Any


def parsed(formula: str) -> Parts:
    """Return the parts of a formula."""
    found = RANDOM.findall(formula) if isinstance(formula, str) else []
    if len(found) != 1 or "~" not in formula or "|" in RANDOM.sub("", formula):
        msg = (
            '`formula` must have a response and one term of random effects, "y ~ x + (1 + x | group)", '
            f"got {formula!r}; for crossed or nested groups write a model of your own."
        )
        raise ValueError(msg)
    random, group = (part.strip() for part in found[0])
    fixed = RANDOM.sub("", formula).strip()
    return Parts(f"{fixed} 1" if fixed.endswith("~") else fixed, random, group)


def design(parts: Parts, data: pd.DataFrame) -> Design:
    """Return the matrices that a table gives."""
    formula_of = formulaic().Formula
    both = formula_of(parts.fixed).get_model_matrix(data, na_action="raise")
    z = formula_of(parts.random).get_model_matrix(data, na_action="raise")
    y = np.asarray(both.lhs, float)
    if y.ndim != 1 and y.shape[1] != 1:
        msg = f"`formula` must have one number as its response, got {y.shape[1]} columns from {parts.fixed!r}."
        raise ValueError(msg)
    return Design(y.ravel(), pd.DataFrame(both.rhs), pd.DataFrame(z), both.rhs.model_spec, z.model_spec)


def formulaic() -> Any:
    """Return the package, or say how to get it."""
    try:
        import formulaic as package
    except ImportError:
        msg = 'formulas need the package formulaic, which is not installed; run pip install "pdvi[formula]".'
        raise ImportError(msg) from None
    return package
