"""The methods: each one file, each through `pdvi.fit`.

A solver is a frozen dataclass with ``init(problem, lam, local, batch_size) -> state`` and
``step(problem, state, batch) -> state``. The state is a NamedTuple whose first two fields are ``lam``, the
reported global parameters as one vector, and ``local``, the local variables of all shards. Optional:
``metrics(state) -> dict`` of scalars for the trace, ``recover(state, factor) -> state`` for the safeguard.
"""

from pdvi.solvers.primal_dual import P2DVI, PDVI

__all__ = ["P2DVI", "PDVI"]
