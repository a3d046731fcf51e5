"""What a report says about its numbers: how far to trust them, and how to make them again."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

PACKAGES = ("pdvi", "jax", "numpy", "scipy", "scikit-learn", "anndata", "scanpy", "matplotlib")


def certainty(probability: np.ndarray | None, agreement: np.ndarray | None) -> str:
    """Return a few sentences on what is known about how sure the labels are."""
    parts = []
    if agreement is not None:
        parts.append(
            f"Certainty is the share of views, fits to differently prepared data, that by themselves give a spot the "
            f"label it has, with two undecided views added: a few that agree cannot make anybody entirely sure. It "
            f"is at its highest, {np.max(agreement):.2f}, for {100 * np.mean(agreement >= np.max(agreement)):.0f} % of "
            f"the spots, and below one half for {100 * np.mean(agreement < 0.5):.0f} %."
        )
    if probability is not None:
        best = probability.max(1)
        parts.append(
            f"The model's own probability of the label is above 0.9 for {100 * np.mean(best > 0.9):.0f} % of the spots "
            f"and below 0.5 for {100 * np.mean(best < 0.5):.0f} %."
        )
        parts.append(
            "It holds if the model does. The fit treats spots as independent given their neighbours' labels, and "
            "approximations of this kind are as a rule too sure: read it as an order of spots, those at borders last, "
            "not as a rate of errors."
        )
    return " ".join(parts)


def call(params: Mapping[str, Any], key: str) -> str:
    """Return the call that makes the same fit, as far as its settings tell."""
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in params.items()}
    n_domains = plain.pop("n_domains", "?")
    shown = {name: value for name, value in plain.items() if isinstance(value, str | int | float) and value != ""}
    settings = "".join(f", {name}={value!r}" for name, value in shown.items())
    named = "" if key == "domain" else f", key_added={key!r}"
    return f"pdvi.tl.domains(adata, {n_domains}{settings}{named})"


def versions() -> dict[str, str]:
    """Return the versions of what a fit rests on, on this machine."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
