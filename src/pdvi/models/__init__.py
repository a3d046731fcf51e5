"""Models: each one file."""

from pdvi.models.gaussian_mixture import GaussianMixtureModel
from pdvi.models.potts_mixture import PottsMixtureModel
from pdvi.models.quadratic import Quadratic
from pdvi.models.smooth import Quartic, TanhRegression

__all__ = ["GaussianMixtureModel", "PottsMixtureModel", "Quadratic", "Quartic", "TanhRegression"]
