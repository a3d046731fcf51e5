"""An executor to copy: shards in a plain Python list, visited one after the other.

It keeps what is the shards' itself, so that the state holds the server's part alone, as on a disk or a cluster. Run it:
python docs/skeletons/executor.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import pdvi
from pdvi.core.problem import with_halo, without_halo
from pdvi.core.solver import State
from pdvi.shards.stacking import take


class OneByOne(pdvi.Executor):
    """Six methods; steps, evaluation, checkpoints and all that solvers do with all shards are made of these."""

    def open(self, problem, key, local):
        """Return the model's own start of the globals, and a state without anything that is a shard's."""
        lam, own_local = problem.init(key)
        self.problem, self.started = problem, own_local if local is None else jax.tree.map(jnp.asarray, local)
        self.shards = [take(problem.shards, b) for b in range(problem.n_shards)]
        self.kept = [None] * problem.n_shards
        return lam, self.fresh(State(None, None, None))

    def fresh(self, state):
        """Set the local variables to those that the run began with."""
        self.local = [take(self.started, b) for b in range(self.problem.n_shards)]
        return state

    def begin(self, state, solver):
        """Keep for every shard what ``solver`` keeps at first."""
        self.kept = [solver.init_shard_state(self.problem, state.lam, local, None) for local in self.local]
        return state

    def visit(self, state, visitor, told, shards=None):
        """Visit these shards (None: all), which see each other's rows as they were before."""
        chosen = range(self.problem.n_shards) if shards is None else np.asarray(shards).tolist()
        seen = self.local_params(state)
        messages = []
        for b in chosen:
            local, self.kept[b], message = visitor(
                self.problem, told, self._read(seen, b), self.kept[b], self.shards[b]
            )
            self.local[b] = without_halo(local, self.local[b])
            messages.append(message)
        return state, _sum(messages), len(messages)

    def look(self, state, reader, told, shards=None):
        """Add up what ``reader`` says of these shards."""
        chosen = range(self.problem.n_shards) if shards is None else np.asarray(shards).tolist()
        seen = self.local_params(state)
        return _sum([reader(self.problem, told, self._read(seen, b), self.kept[b], self.shards[b]) for b in chosen])

    def fold(self, state, function, told):
        """Add up ``function(told, own)`` over all shards."""
        return _sum([function(told, own) for own in self.kept])

    def local_params(self, state):
        """Return the local variables of all shards, stacked."""
        return jax.tree.map(lambda *leaves: np.stack(leaves), *self.local)

    def _read(self, everyone, b):
        """A shard's local variables, with the rows of others that it reads."""
        if self.problem.halo is None:
            return self.local[b]
        rows = np.asarray(self.problem.halo[b])
        halo = jax.tree.map(lambda leaf: jnp.asarray(leaf.reshape(-1, *leaf.shape[2:])[rows]), everyone)
        return with_halo(self.local[b], halo)


def _sum(messages):
    return jax.tree.map(lambda *leaves: np.sum([np.asarray(leaf, float) for leaf in leaves], axis=0), *messages)


if __name__ == "__main__":
    problem = pdvi.datasets.quadratic(n=20)
    settings = {"batch_size": 2, "max_epochs": 5, "tol": 0}
    for executor in (OneByOne(), pdvi.Memory()):
        print(type(executor).__name__, pdvi.fit(problem, pdvi.P2DVI(), executor=executor, **settings).objective)
