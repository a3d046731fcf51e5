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
    attributes: dict[str, Any] = {"inference_library": "pdvi", "status": status, "covariance": sampled.covariance}
    statistics = _trace(trace)
    if sampled.log_joint is not None:
        ratio = sampled.log_joint - sampled.log_q
        drawn = {"lp": Variable(sampled.log_joint), "log_ratio": Variable(ratio)}
        statistics = _dataset(drawn, rows).merge(statistics)
        attributes["khat"] = khat(ratio)
    groups = {
        "posterior": sampled.unknowns,
        "posterior_predictive": sampled.predictive,
        "log_likelihood": sampled.log_likelihood,
    }
    datasets = {name: _dataset(variables, rows) for name, variables in groups.items() if variables}
    if sampled.observed:
        datasets["observed_data"] = _dataset(sampled.observed, rows, drawn=False)
    return _arviz().InferenceData(attrs=attributes, sample_stats=statistics, **datasets)


def point_data(global_params: dict[str, np.ndarray], trace: pd.DataFrame, status: str) -> Any:
    """Return global parameters as the one draw of a posterior, and the trace."""
    unknowns = {name: Variable(np.asarray(value)[None]) for name, value in global_params.items()}
    attributes = {"inference_library": "pdvi", "status": status, "covariance": "none: fitted parameters, not draws"}
    return _arviz().InferenceData(attrs=attributes, posterior=_dataset(unknowns, ""), sample_stats=_trace(trace))


def khat(log_ratio: np.ndarray) -> float:
    """Return the shape of the tail of importance weights p / q: below 0.7 q is good enough to be corrected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a tail that cannot be fitted is told by the number
        return float(_arviz().psislw(np.asarray(log_ratio, float))[1])


def _dataset(variables: dict[str, Variable], rows: str, *, drawn: bool = True) -> Any:
    """Return variables with the names of their axes; those that are drawn have one more, for the draws of one chain."""
    dims = {
        name: [rows if axis == variable.rows else f"{name}_dim_{axis}" for axis in range(variable.values.ndim - drawn)]
        for name, variable in variables.items()
    }
    values = {name: variable.values[None] if drawn else variable.values for name, variable in variables.items()}
    return _arviz().dict_to_dataset(values, dims=dims, default_dims=None if drawn else [])


def _trace(trace: pd.DataFrame) -> Any:
    """Return the numbers of the trace, one for each log point."""
    return trace.select_dtypes("number").rename_axis("log_point").to_xarray()


def _arviz() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # that there will be another ArviZ
            import arviz
    except ImportError as error:
        msg = 'Result.to_arviz needs ArviZ; install it with pip install "pdvi[arviz]".'
        raise ImportError(msg) from error
    return arviz
