"""Simulated problems, mixtures and tissues, with a known truth."""

from pdvi.datasets.models import Counts, Documents, Factors, Grouped, counts, documents, factors, grouped
from pdvi.datasets.problems import (
    MixtureData,
    TissueFeatures,
    TwoLevelTissue,
    mixture,
    quadratic,
    quartic,
    tanh_regression,
    tissue_features,
    two_level_tissue,
)
from pdvi.datasets.tissue import embryo, tissue

__all__ = [
    "Counts",
    "Documents",
    "Factors",
    "Grouped",
    "MixtureData",
    "TissueFeatures",
    "TwoLevelTissue",
    "counts",
    "documents",
    "embryo",
    "factors",
    "grouped",
    "mixture",
    "quadratic",
    "quartic",
    "tanh_regression",
    "tissue",
    "tissue_features",
    "two_level_tissue",
]
