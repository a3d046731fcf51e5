"""The methods: each one file, each through `pdvi.fit`.

A solver is a frozen dataclass with ``init(problem, lam, local, batch_size) -> state`` and
``step(problem, state, batch) -> state``. The state is a NamedTuple whose first two fields are ``lam``, the
reported global parameters as one vector, and ``local``, the local variables of all shards. Optional:
``metrics(state) -> dict`` of scalars for the trace, ``recover(state, factor) -> state`` for the safeguard,
``tidy(state) -> state`` to undo piled-up rounding before each compiled run of steps, ``warm(problem, state)``
to make use of known locals, and ``full_batch = True`` if every step visits all shards.
"""

from pdvi.solvers.cavi import CAVI
from pdvi.solvers.memoized import MemoizedVB
from pdvi.solvers.primal_dual import P2DVI, PDVI
from pdvi.solvers.svi import SVI

__all__ = ["CAVI", "P2DVI", "PDVI", "SVI", "MemoizedVB"]
