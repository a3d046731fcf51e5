"""pdvi: large-scale mean-field variational inference by primal-dual optimisation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pdvi import solvers, theory
from pdvi._anndata.slide_store import write_store
from pdvi.core.executor import Executor
from pdvi.core.model import Augmentation, Model
from pdvi.core.problem import Problem
from pdvi.core.result import Point, Result, Status, load_result
from pdvi.core.solver import Solver
from pdvi.executors import Dask, Disk, Memory
from pdvi.run import sampling
from pdvi.run.checkpoint import Checkpoint, CheckpointWarning
from pdvi.run.fit import Progress, fit
from pdvi.run.running import SafeguardWarning
from pdvi.run.tune import TuningResult, tune
from pdvi.shards import partition
from pdvi.solvers import CAVI, P2DVI, PDVI, PGSVI, SGD, SNGVI, SVI, Adam, ControlVariates, MemoizedVB, RMSProp
from pdvi.solvers.primal_dual.oracles import LBFGS, CoordinateDescent, JointStep, Newton

if TYPE_CHECKING:
    from pdvi import datasets, gr, graphs, metrics, mixtures, pl, pp, tl
    from pdvi.mixtures.estimators import GaussianMixture, PottsMixture

__version__ = "0.1.0"

__all__ = [
    "CAVI",
    "LBFGS",
    "P2DVI",
    "PDVI",
    "PGSVI",
    "SGD",
    "SNGVI",
    "SVI",
    "Adam",
    "Augmentation",
    "Checkpoint",
    "CheckpointWarning",
    "ControlVariates",
    "CoordinateDescent",
    "Dask",
    "Disk",
    "Executor",
    "GaussianMixture",
    "JointStep",
    "MemoizedVB",
    "Memory",
    "Model",
    "Newton",
    "Point",
    "PottsMixture",
    "Problem",
    "Progress",
    "RMSProp",
    "Result",
    "SafeguardWarning",
    "Solver",
    "Status",
    "TuningResult",
    "datasets",
    "fit",
    "gr",
    "graphs",
    "load_result",
    "metrics",
    "mixtures",
    "partition",
    "pl",
    "pp",
    "sampling",
    "solvers",
    "theory",
    "tl",
    "tune",
    "write_store",
]

# Imported when they are first asked for: scikit-learn takes longer than all that a fit needs.
_LATER = {
    "GaussianMixture": "pdvi.mixtures.estimators",
    "PottsMixture": "pdvi.mixtures.estimators",
    **{name: f"pdvi.{name}" for name in ("datasets", "gr", "graphs", "metrics", "mixtures", "pl", "pp", "tl")},
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    module = import_module(_LATER[name])
    value = module if _LATER[name] == f"pdvi.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
