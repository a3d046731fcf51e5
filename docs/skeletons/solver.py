"""A solver to copy: stochastic gradient descent on all variables.

    lam <- lam - rate (B / |S|) sum_{b in S} grad_lam f_b,    phi_b <- phi_b - rate grad_phi f_b  for b in S

Run it: python docs/skeletons/solver.py
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax

import pdvi
from pdvi.shards.stacking import put, take


class DescentState(NamedTuple):
    """The first two fields are always ``lam`` and ``local``; add what the method carries along."""

    lam: jax.Array
    local: Any


class Descent(eqx.Module):
    """Settings are fields; real numbers among them may change without recompilation."""

    rate: float = 1e-3

    def init(self, problem, lam, local, batch_size):
        """The state before the first step."""
        return DescentState(lam, local)

    def step(self, problem, state, batch):
        """One step on the shards in ``batch``; the others stay as they are. Must be traceable by JAX."""

        def gradients(local, shard):
            return jax.grad(problem.loss, argnums=(0, 1))(local, state.lam, shard)

        local = take(state.local, batch)
        by_local, by_lam = jax.vmap(gradients)(local, take(problem.shards, batch))
        local = jax.tree.map(lambda value, slope: value - self.rate * slope, local, by_local)
        scale = problem.n_shards / batch.shape[0]
        return DescentState(state.lam - self.rate * scale * by_lam.sum(0), put(state.local, batch, local))


if __name__ == "__main__":
    problem = pdvi.datasets.quadratic(n=1_000)
    print(pdvi.fit(problem, Descent(), max_epochs=20).trace[["epoch", "objective"]].iloc[::5])
