"""Models: each one file."""

from pdvi.models.quadratic import Quadratic
from pdvi.models.smooth import Quartic, TanhRegression

__all__ = ["Quadratic", "Quartic", "TanhRegression"]
