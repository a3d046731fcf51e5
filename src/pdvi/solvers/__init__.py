"""The methods: each one file, each through `pdvi.fit`, on every executor.

`pdvi.core.solver` says what a solver is, `pdvi.core.model` what a model may offer it. `AdaptivePenalty` and `Explored`
wrap PD-VI and P2D-VI. A solver listed in `SOLVERS` is under the contract of ``tests/contracts/test_solvers.py``.
"""

from pdvi.core.solver import Solver
from pdvi.solvers.adaptive_penalty import AdaptivePenalty
from pdvi.solvers.cavi import CAVI
from pdvi.solvers.control_variates import ControlVariates
from pdvi.solvers.explored import Explored
from pdvi.solvers.gradient import SGD, Adam, RMSProp
from pdvi.solvers.memoized import MemoizedVB
from pdvi.solvers.pgsvi import PGSVI
from pdvi.solvers.primal_dual.p2dvi import P2DVI
from pdvi.solvers.primal_dual.pdvi import PDVI
from pdvi.solvers.sngvi import SNGVI
from pdvi.solvers.svi import SVI

# every method with its default settings
SOLVERS: dict[str, Solver] = {
    solver.__name__: solver()
    for solver in (PDVI, P2DVI, SVI, PGSVI, SNGVI, SGD, RMSProp, Adam, ControlVariates, CAVI, MemoizedVB)
}

__all__ = [
    "CAVI",
    "P2DVI",
    "PDVI",
    "PGSVI",
    "SGD",
    "SNGVI",
    "SOLVERS",
    "SVI",
    "Adam",
    "AdaptivePenalty",
    "ControlVariates",
    "Explored",
    "MemoizedVB",
    "RMSProp",
]
