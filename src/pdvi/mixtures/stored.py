"""Rows that do not fit into memory: written to a store, and fitted from known probabilities by an executor."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from pdvi._base.memory import give_back
from pdvi._base.telling import tell
from pdvi.core.model import described
from pdvi.core.problem import Problem
from pdvi.core.result import Point, Result, Status
from pdvi.mixtures.build import Coupling, coupled, mixture_shards, padded_halo, potts_model, with_offsets
from pdvi.mixtures.em import epochs_of, joined, measured_in, whole_fit
from pdvi.mixtures.reestimate import labels_of
from pdvi.mixtures.samples import means_by_sample
from pdvi.mixtures.start import EmpiricalBayes, centred, from_labels, means_of, whitened, whitening_of
from pdvi.mixtures.task import Found, Rows, Start, Task
from pdvi.models import SampleOffsets
from pdvi.shards.partition import Layout, along_space, layout, median_cuts
from pdvi.shards.store import StoreWriter
from pdvi.solvers import P2DVI

SHARD = 100_000  # rows
LOOKED_AT = 200_000  # rows that noise and means are estimated from
ROUNDS = 2  # of fitting; the noise of the second is that of the labels that the first has found


class Whitened:
    """Rows minus their (sample's) mean, in a unit, with white noise: made when they are asked for."""

    def __init__(self, rows: Rows, offset: np.ndarray, unit: float, whitening: np.ndarray):
        self.rows, self.offset, self.unit, self.whitening = rows, offset, unit, whitening.astype(np.float32)

    def __len__(self) -> int:
        return len(self.rows.X)

    def __getitem__(self, index: Any) -> np.ndarray:
        sample = self.rows.sample
        shift = self.offset if sample is None else self.offset[sample[index]]
        return np.asarray((self.rows.X[index] - shift) / self.unit, np.float32) @ self.whitening.T


def fit_stored(rows: Rows, task: Task, start: Start) -> Found:
    """Fit rows from known probabilities; noise and weights are those of the labels, twice."""
    assert task.place is not None
    assert rows.graph is not None
    assert rows.coordinates is not None
    began = time.perf_counter()
    give_back()
    where = layout(median_cuts(rows.coordinates, -(-len(rows.X) // SHARD)), along_space(rows.coordinates))
    beta, halo, temperature = task.beta, task.halo, task.temperature
    coupling = coupled(rows.graph, where, beta=beta, halo=halo, temperature=temperature, recipe=task.recipe)
    some = slice(None, None, max(1, len(rows.X) // LOOKED_AT))
    offset = means_by_sample(rows.X, rows.sample)
    unit = centred(np.asarray(rows.X[some])).unit
    plain = Whitened(rows, offset, unit, np.eye(rows.X.shape[1]))[some]
    known, results = start.probabilities, []
    path = task.place.folder.new_file("rows.store")
    for number in range(ROUNDS):
        tell(f"all rows from a store, round {number + 1} of {ROUNDS}", number / ROUNDS)
        labels = np.asarray(known[some].argmax(1))
        settings = from_labels(plain, labels, means_of(plain, known[some]), task.recipe)
        whitening = np.eye(rows.X.shape[1])
        if task.covariance == "tied":
            whitening = whitening_of(plain, settings, labels, task.recipe)
            settings = whitened(settings, whitening, task.recipe)
        X = Whitened(rows, offset, unit, whitening)
        problem = _written(path, X, settings, where, coupling, task, _shares(known, task.recipe.floor))
        epochs = task.recipe.known_epochs if number == 0 else task.recipe.round_epochs
        result = whole_fit(
            problem,
            P2DVI() if task.solver is None else task.solver,
            start=Point(problem.model.init_global(None), _sharded(known, where)),
            executor=task.place.executor,
            max_epochs=epochs,
            log_every=epochs,
            tol=task.tol,
            seed=int(np.random.default_rng(task.random_state).integers(2**31)),
            batch_size=max(1, len(where.rows) // task.recipe.shards_per_batch),
        )
        before, known = labels_of(known), np.asarray(where.unshard(result.local_params))
        if (before != labels_of(known)).mean() < task.recipe.steady_labels:
            result = dataclasses.replace(result, status=Status.CONVERGED)  # of the rounds; each has few epochs
        results.append(result)
        task.place.folder.remove("rows.store")
    result = _whole(results, unit, rows.X.size)
    seconds = time.perf_counter() - began + start.seconds
    return Found(result, problem.model, offset, whitening / unit, known, epochs_of(result), seconds)


def write_shards(writer: StoreWriter, X: Any, where: Layout, coupling: Coupling, sample: Any = None) -> Any:
    """Write the shards of a Potts mixture one after the other, and return their halo."""
    halos = []
    for arrays, halo in mixture_shards(X, where, coupling, sample):
        writer.add({name: _single(np.asarray(values)) for name, values in arrays.items()})
        halos.append(halo)
    return padded_halo(halos)


def _written(
    path: Any, X: Whitened, settings: EmpiricalBayes, where: Layout, coupling: Coupling, task: Task, shares: np.ndarray
) -> Problem:
    """Write a store, and open it."""
    log_scale = float(np.linalg.slogdet(X.whitening)[1])
    temperature, damping = coupling.temperature, coupling.damping
    model = potts_model(settings, len(X), temperature=temperature, damping=damping, log_scale=log_scale)
    if task.learn_weights:
        model = dataclasses.replace(model, log_weights=jax.device_put(np.log(shares).astype(np.float32)))
    whole = with_offsets(model, X.rows.sample)
    with StoreWriter(path) as writer:
        halo = write_shards(writer, X, where, coupling, X.rows.sample)
        writer.finish(halo=halo, rows=where.rows, model=None if isinstance(whole, SampleOffsets) else described(whole))
    return Problem.from_store(path, whole, verify=False)


def _shares(known: np.ndarray, floor: float) -> np.ndarray:
    share = np.maximum(known.mean(0, dtype=float), floor / known.shape[1])
    return share / share.sum()


def _sharded(known: np.ndarray, where: Layout) -> np.ndarray:
    local = where.shard(np.asarray(known, np.float32))
    local *= where.mask[..., None]
    return local


def _whole(results: list[Result], unit: float, n_numbers: int) -> Result:
    """Return the last result with one trace, in the units of the rows."""
    whole = results[0]
    for later in results[1:]:
        whole = joined(whole, later, "hyper-parameters re-estimated")
    return measured_in(whole, unit, n_numbers)


def _single(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32) if values.dtype.kind == "f" else values
