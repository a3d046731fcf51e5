"""Models: each one file."""

from pdvi.models.gaussian_mixture import GaussianMixtureModel
from pdvi.models.potts_mixture import PottsMixtureModel
from pdvi.models.quadratic import Quadratic
from pdvi.models.smooth import Quartic, TanhRegression
from pdvi.models.two_level_mixture import TwoLevelMixtureModel

__all__ = [
    "GaussianMixtureModel",
    "PottsMixtureModel",
    "Quadratic",
    "Quartic",
    "TanhRegression",
    "TwoLevelMixtureModel",
]
