"""Simulated problems, mixtures and tissues, with a known truth."""

from pdvi.datasets.problems import (
    MixtureData,
    TissueFeatures,
    mixture,
    quadratic,
    quartic,
    tanh_regression,
    tissue_features,
)
from pdvi.datasets.tissue import embryo, tissue

__all__ = [
    "MixtureData",
    "TissueFeatures",
    "embryo",
    "mixture",
    "quadratic",
    "quartic",
    "tanh_regression",
    "tissue",
    "tissue_features",
]
