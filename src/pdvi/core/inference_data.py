"""A result as ArviZ understands it."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd

from pdvi.core.model import Sampled, Variable


def inference_data(sampled: Sampled, trace: pd.DataFrame, status: str) -> Any:
    """Return draws, log likelihood, data and trace as an InferenceData."""
    rows = sampled.row_name
    statistics: dict[str, Any] = {}
    attributes: dict[str, Any] = {"inference_library": "pdvi", "status": status, "covariance": sampled.covariance}
    if sampled.log_joint is not None:
        ratio = sampled.log_joint - sampled.log_q
        statistics = {"lp": Variable(sampled.log_joint), "log_ratio": Variable(ratio)}
        attributes["khat"] = khat(ratio)
    groups = {
        "posterior": sampled.unknowns,
        "posterior_predictive": sampled.predictive,
        "log_likelihood": sampled.log_likelihood,
    }
    datasets = {name: _drawn(variables, rows) for name, variables in groups.items() if variables}
    datasets["sample_stats"] = _drawn(statistics, rows).merge(_trace(trace))
    if sampled.observed:
        datasets["observed_data"] = _dataset({k: _named(k, v, rows, 0) for k, v in sampled.observed.items()})
    return _arviz().InferenceData(attrs=attributes, **datasets)


def point_data(global_params: dict[str, np.ndarray], trace: pd.DataFrame, status: str) -> Any:
    """Return global parameters as the one draw of a posterior, and the trace."""
    unknowns = {name: Variable(np.asarray(value)[None]) for name, value in global_params.items()}
    attributes = {"inference_library": "pdvi", "status": status, "covariance": "none: fitted parameters, not draws"}
    datasets = {"posterior": _drawn(unknowns, ""), "sample_stats": _trace(trace)}
    return _arviz().InferenceData(attrs=attributes, **datasets)


def khat(log_ratio: np.ndarray) -> float:
    """Return the shape of the tail of importance weights p / q: below 0.7 q is good enough to be corrected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a tail that cannot be fitted is told by the number
        return float(_arviz().psislw(np.asarray(log_ratio, float))[1])


def _drawn(variables: dict[str, Variable], rows: str) -> Any:
    found = {}
    for name, variable in variables.items():
        dims, values = _named(name, variable, rows, 1)
        found[name] = (("chain", "draw", *dims), values[None])
    coords = {"chain": [0], "draw": np.arange(next(iter(found.values()))[1].shape[1])} if found else {}
    return _dataset(found, coords)


def _named(name: str, variable: Variable, rows: str, lead: int) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the names of the axes after the first ``lead``, and the values."""
    extra = variable.values.ndim - lead
    return tuple(rows if axis == variable.rows else f"{name}_dim_{axis}" for axis in range(extra)), variable.values


def _dataset(variables: dict[str, Any], coords: dict[str, Any] | None = None) -> Any:
    import xarray

    given = dict(coords or {})
    for dims, values in variables.values():
        given |= {dim: np.arange(size) for dim, size in zip(dims, values.shape) if dim not in given}
    return xarray.Dataset(variables, coords=given)


def _trace(trace: pd.DataFrame) -> Any:
    """Return the numbers of the trace, one for each log point."""
    numbers = trace.select_dtypes("number")
    return _dataset({str(name): (("log_point",), numbers[name].to_numpy()) for name in numbers})


def _arviz() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # that there will be another ArviZ
            import arviz
    except ImportError as error:
        msg = 'Result.to_arviz needs ArviZ; install it with pip install "pdvi[arviz]".'
        raise ImportError(msg) from error
    return arviz
