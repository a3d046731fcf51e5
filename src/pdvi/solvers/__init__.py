"""The methods: each one file, each through `pdvi.fit`.

A solver is a frozen dataclass with ``init(problem, lam, local, batch_size) -> state`` and
``step(problem, state, batch) -> state``. The state is a NamedTuple whose first two fields are ``lam``, the
reported global parameters as one vector, and ``local``, the local variables of all shards. Optional:
``metrics(state) -> dict`` of scalars for the trace, ``recover(state, factor) -> state`` for the safeguard,
``tidy(state) -> state`` to undo piled-up rounding before each compiled run of steps, ``warm(problem, state)``
to make use of known locals, and ``full_batch = True`` if every step visits all shards.

Some methods need more of a model than `pdvi.Model` lists, and say so when it is missing:

``natural(globals_)``, ``from_natural(natural)``
    the natural parameters of q, as a dict with the same blocks, and back (SVI, PGSVI, SNGVI).
``natural_gradient(globals_, gradient) -> dict``
    the gradient in the expectation parameters that belong to ``natural``, from that in the globals (SNGVI; PGSVI).
``nonconjugate(local, globals_, shard)``
    the shard's share of the terms of the loss that ``statistics`` leave out (PGSVI).
``to_unconstrained(local)``, ``from_unconstrained(x, shard)``
    locals as numbers without constraints, and back (gradient methods; without them any number is a local).
``local_gradient(local, globals_, shard)``
    the gradient of F in the shard's own locals, where shards have a halo (gradient methods).
``local_sweeps``
    how many local steps optimise the locals, if one does not (SVI, SNGVI).

A solver listed in `SOLVERS` is under the contract of ``tests/contracts/test_solvers.py``.
"""

from typing import Any

from pdvi.solvers.cavi import CAVI
from pdvi.solvers.control_variates import ControlVariates
from pdvi.solvers.gradient import SGD, Adam, RMSProp
from pdvi.solvers.memoized import MemoizedVB
from pdvi.solvers.pgsvi import PGSVI
from pdvi.solvers.primal_dual.p2dvi import P2DVI, PDVI
from pdvi.solvers.sngvi import SNGVI
from pdvi.solvers.svi import SVI

# every method with its default settings
SOLVERS: dict[str, Any] = {
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
    "ControlVariates",
    "MemoizedVB",
    "RMSProp",
]
