"""pdvi: large-scale mean-field variational inference by primal-dual optimisation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdvi import datasets, gr, graphs, metrics, mixtures, pl, pp, q, report, solvers, theory, tl
    from pdvi._anndata.slide_store import write_store
    from pdvi._base.compiled import keep_compiled
    from pdvi.bridge.adequacy import check_draws
    from pdvi.bridge.build import from_numpyro
    from pdvi.core.executor import Executor
    from pdvi.core.model import Augmentation, Model
    from pdvi.core.result import Point, Result, Status, load_result
    from pdvi.core.solver import Solver
    from pdvi.estimators import CountMixture, FactorAnalysis, LatentDirichlet, MixedGLM
    from pdvi.executors import Dask, Disk, Memory
    from pdvi.mixtures.estimators import GaussianMixture
    from pdvi.mixtures.graph_estimators import PottsMixture, TwoLevelMixture
    from pdvi.models import Problem
    from pdvi.run import sampling
    from pdvi.run.checkpoint import Checkpoint, CheckpointWarning
    from pdvi.run.fit import Progress, fit
    from pdvi.run.running import SafeguardWarning
    from pdvi.run.tune import TuningResult, tune
    from pdvi.shards import partition
    from pdvi.solvers import CAVI, P2DVI, PDVI, PGSVI, SGD, SNGVI, SVI, Adam, ControlVariates, MemoizedVB, RMSProp
    from pdvi.solvers.primal_dual.oracles import LBFGS, CoordinateDescent, JointStep, Newton

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
    "CountMixture",
    "Dask",
    "Disk",
    "Executor",
    "FactorAnalysis",
    "GaussianMixture",
    "JointStep",
    "LatentDirichlet",
    "MemoizedVB",
    "Memory",
    "MixedGLM",
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
    "TwoLevelMixture",
    "check_draws",
    "datasets",
    "fit",
    "from_numpyro",
    "gr",
    "graphs",
    "keep_compiled",
    "load_result",
    "metrics",
    "mixtures",
    "partition",
    "pl",
    "pp",
    "q",
    "report",
    "sampling",
    "solvers",
    "theory",
    "tl",
    "tune",
    "write_store",
]

# Where a public name is, as "module" or "module:name". It is imported when it is first asked for: JAX, pandas and
# scikit-learn take seconds, and `pdvi --help` needs none of them.
_LATER = {
    "CAVI": "pdvi.solvers:CAVI",
    "LBFGS": "pdvi.solvers.primal_dual.oracles:LBFGS",
    "P2DVI": "pdvi.solvers:P2DVI",
    "PDVI": "pdvi.solvers:PDVI",
    "PGSVI": "pdvi.solvers:PGSVI",
    "SGD": "pdvi.solvers:SGD",
    "SNGVI": "pdvi.solvers:SNGVI",
    "SVI": "pdvi.solvers:SVI",
    "Adam": "pdvi.solvers:Adam",
    "Augmentation": "pdvi.core.model:Augmentation",
    "Checkpoint": "pdvi.run.checkpoint:Checkpoint",
    "CheckpointWarning": "pdvi.run.checkpoint:CheckpointWarning",
    "ControlVariates": "pdvi.solvers:ControlVariates",
    "CoordinateDescent": "pdvi.solvers.primal_dual.oracles:CoordinateDescent",
    "CountMixture": "pdvi.estimators:CountMixture",
    "Dask": "pdvi.executors:Dask",
    "Disk": "pdvi.executors:Disk",
    "Executor": "pdvi.core.executor:Executor",
    "FactorAnalysis": "pdvi.estimators:FactorAnalysis",
    "GaussianMixture": "pdvi.mixtures.estimators:GaussianMixture",
    "JointStep": "pdvi.solvers.primal_dual.oracles:JointStep",
    "LatentDirichlet": "pdvi.estimators:LatentDirichlet",
    "MemoizedVB": "pdvi.solvers:MemoizedVB",
    "Memory": "pdvi.executors:Memory",
    "MixedGLM": "pdvi.estimators:MixedGLM",
    "Model": "pdvi.core.model:Model",
    "Newton": "pdvi.solvers.primal_dual.oracles:Newton",
    "Point": "pdvi.core.result:Point",
    "PottsMixture": "pdvi.mixtures.graph_estimators:PottsMixture",
    "Problem": "pdvi.models:Problem",  # with it come the models that a store can name
    "Progress": "pdvi.run.fit:Progress",
    "RMSProp": "pdvi.solvers:RMSProp",
    "Result": "pdvi.core.result:Result",
    "SafeguardWarning": "pdvi.run.running:SafeguardWarning",
    "Solver": "pdvi.core.solver:Solver",
    "Status": "pdvi.core.result:Status",
    "TuningResult": "pdvi.run.tune:TuningResult",
    "TwoLevelMixture": "pdvi.mixtures.graph_estimators:TwoLevelMixture",
    "check_draws": "pdvi.bridge.adequacy:check_draws",
    "datasets": "pdvi.datasets",
    "fit": "pdvi.run.fit:fit",
    "from_numpyro": "pdvi.bridge.build:from_numpyro",
    "gr": "pdvi.gr",
    "graphs": "pdvi.graphs",
    "keep_compiled": "pdvi._base.compiled:keep_compiled",
    "load_result": "pdvi.core.result:load_result",
    "metrics": "pdvi.metrics",
    "mixtures": "pdvi.mixtures",
    "partition": "pdvi.shards.partition",
    "pl": "pdvi.pl",
    "pp": "pdvi.pp",
    "q": "pdvi.q",
    "report": "pdvi.report",
    "sampling": "pdvi.run.sampling",
    "solvers": "pdvi.solvers",
    "theory": "pdvi.theory",
    "tl": "pdvi.tl",
    "tune": "pdvi.run.tune:tune",
    "write_store": "pdvi._anndata.slide_store:write_store",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    module, _, attribute = _LATER[name].partition(":")
    value: Any = import_module(module)
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
