"""A solver to copy: stochastic gradient descent on all variables.

    lam <- lam - rate (B / |S|) sum_{b in S} grad_lam f_b,    phi_b <- phi_b - local_rate grad_phi F  for b in S

Run it: python docs/skeletons/solver.py
"""

from typing import NamedTuple

import jax

import pdvi
from pdvi.solvers.local_variables import constrained, gradients, require_gradients


class Server(NamedTuple):
    """What the server holds: the field ``lam`` is the reported global parameters; add what the method carries along."""

    lam: jax.Array


class Descent(pdvi.Solver):
    """Settings are fields; real numbers among them may change without recompilation."""

    rate: float = 1e-3
    local_rate: float = 0.1

    def init(self, problem, shards, lam, batch_size):
        """Return what the server holds before the first step; refuse a model that lacks what the method needs."""
        require_gradients("Descent", problem)
        return Server(lam)

    def local_update(self, problem, broadcast, local, shard_state, shard):
        """Return one shard's new local variables, its shard state (here nothing), and its message.

        ``broadcast`` is ``lam`` (see `Solver.broadcast`). ``local`` comes with the rows of other shards that this one
        reads; `gradients` gives the gradient of the whole objective in the shard's own ones.
        """
        x, by_x, by_lam = gradients(problem, local, broadcast, shard)
        x = jax.tree.map(lambda value, slope: value - self.local_rate * slope, x, by_x)
        return constrained(problem, x, shard), shard_state, by_lam

    def server_update(self, problem, server, total, count, broadcast):
        """Return what the server holds after ``count`` local updates, from the sum of their messages."""
        return Server(server.lam - self.rate * problem.n_shards / count * total)


if __name__ == "__main__":
    problem = pdvi.datasets.quadratic(n=1_000)
    print(pdvi.fit(problem, Descent(), max_epochs=20).trace[["epoch", "objective"]].iloc[::5])
