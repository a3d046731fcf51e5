"""Attack the library: fuzzed calls, damaged files and stores, Ctrl-C at random moments.

    python benchmarks/attack.py            # a few minutes
    python benchmarks/attack.py --quick    # a part of each, as the suite runs it

Prints how often each was tried, answered (a finite, valid answer; the numbers that were saved; all files), or refused
with one clear error (a line that names the argument or the damage; exit code 130 and no file changed). Anything else is
a failure and is listed. Works in temporary folders only, and opens no connection.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import scipy.sparse as sp
from anndata import AnnData

import pdvi
from pdvi.shards.store import Store

ANSWERED, REFUSED, ELSE = "answered", "clear error", "anything else"
CLEAR = (TypeError, ValueError, FileNotFoundError, FileExistsError, ImportError)
SECONDS = 60  # that a command may take before it counts as hanging


class Tally:
    """Counts what came of each kind of attack, and keeps what should not have."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, int]] = {}
        self.failures: list[str] = []

    def add(self, kind: str, outcome: str, told: str = "") -> None:
        """Count one attempt."""
        row = self.counts.setdefault(kind, {ANSWERED: 0, REFUSED: 0, ELSE: 0})
        row[outcome] += 1
        if outcome == ELSE:
            self.failures.append(f"{kind}: {told}")

    def table(self) -> str:
        """Return the table that is printed."""
        lines = [f"{'':24}{'tried':>8}{ANSWERED:>12}{REFUSED:>14}{ELSE:>16}"]
        for kind, row in self.counts.items():
            lines.append(f"{kind:24}{sum(row.values()):8}{row[ANSWERED]:12}{row[REFUSED]:14}{row[ELSE]:16}")
        return "\n".join(lines + [f"  {failure}" for failure in self.failures[:40]])


# ------------------------------------------------------------------------------------------------------ fuzzed calls

N = 24
RNG = np.random.default_rng(0)
ROWS = np.concatenate([RNG.normal(size=(12, 3)), RNG.normal(size=(12, 3)) + 4])
PLACES = RNG.uniform(size=(N, 2))
GRAPH = np.eye(N, k=1) + np.eye(N, k=-1)
NUMBERS: list[Any] = [
    None,
    0,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    -2.0,
    "a",
    "",
    True,
    2**63,
    [],
    {},
    (1, 2),
    b"x",
    object,
    1e300,
]
NAMES: list[Any] = [None, 0, "", "no such", ["X"], 1.5, b"X", object(), "leiden", True]
ARRAYS: list[Any] = [
    None,
    5,
    "a",
    [],
    np.zeros((0, 3)),
    np.zeros((N, 0)),
    np.full((N, 3), np.nan),
    np.where(np.arange(N * 3).reshape(N, 3) == 7, np.inf, ROWS),
    np.zeros((N, 3)),
    np.ones((N, 3), bool),
    ROWS.astype(str),
    ROWS.astype(object),
    ROWS[:, 0],
    ROWS[None],
    ROWS[:2],
    ROWS[:1],
    ROWS.astype(np.float16),
    ROWS.astype(complex),
    ROWS * 1e-20,
    ROWS * 1e18,
    ROWS * 1e200,
    np.where(np.arange(N)[:, None] == 3, 1e10, ROWS),
    np.repeat(ROWS[:2], 12, axis=0),
    (ROWS > 2).astype(float),
    sp.csr_array(ROWS),
    np.ma.masked_array(ROWS, ROWS > 3),
    ROWS.tolist(),
]


def slide() -> AnnData:
    adata = AnnData(RNG.poisson(2.0, size=(N, 12)).astype(np.float32))
    adata.obsm.update({"spatial": PLACES, "X_pca": ROWS, "X_neighborhood": ROWS})
    adata.obsp["potts_weights"] = sp.csr_matrix(GRAPH)
    adata.obs["sample"] = ["a"] * 12 + ["b"] * 12
    adata.uns["leiden"] = {"params": {}}
    return adata


def _problem() -> pdvi.Problem:
    return pdvi.datasets.quadratic(n=6, dim_local=2, dim_global=2, condition=5, seed=0)


PROBLEM = _problem()


def _fit(**arguments: Any) -> Any:
    problem, solver = arguments.pop("problem", PROBLEM), arguments.pop("solver", pdvi.P2DVI())
    return pdvi.fit(problem, solver, **{"batch_size": 2, "max_epochs": 2, **arguments})


def _mixture(**arguments: Any) -> Any:
    X, weight = arguments.pop("X", ROWS), arguments.pop("sample_weight", None)
    settings = {"n_components": 2, "random_state": 0, "max_epochs": 6, **arguments}
    return pdvi.GaussianMixture(**settings).fit(X, sample_weight=weight)


def _potts(**arguments: Any) -> Any:
    given = {name: arguments.pop(name) for name in ("graph", "coordinates", "start") if name in arguments}
    X = arguments.pop("X", ROWS)
    settings = {"n_components": 2, "random_state": 0, "max_epochs": 6, "solver": "cavi", **arguments}
    return pdvi.PottsMixture(**settings).fit(X, **{"graph": GRAPH, **given})


def _on_slide(function: Callable[..., Any], **usual: Any) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        adata = arguments.pop("adata", None) if "adata" in arguments else slide()
        function(adata, **{**usual, **arguments})
        return adata

    return call


def _domains(adata: Any, n_domains: Any = 2, **arguments: Any) -> None:
    pdvi.tl.domains(adata, n_domains, **{"n_init": 1, **arguments})


COUNT = {"numbers": ("batch_size", "max_epochs", "max_steps", "max_seconds", "tol", "grad_tol", "seed", "log_every")}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, list[Any]]]] = {
    "fit": (
        _fit,
        {
            **dict.fromkeys(COUNT["numbers"], NUMBERS),
            "problem": [None, 0, "a", ROWS, object],
            "solver": [None, 0, "a", "p2dvi", "CAVI", pdvi.P2DVI, "memoized", object()],
            "executor": [0, "", False, "memory", "disk", "moon", object, pdvi.Memory],
            "sampling": [5, "a", pdvi.sampling.Uniform, pdvi.sampling.Uniform(), object()],
            "checkpoint": [5, "/dev/null", "no/such/folder/x", object(), b"\0", pdvi.Checkpoint],
            "start": [0, "no such file", {"lam": [1]}, {}, {"lam": np.full(2, np.nan)}, object(), ROWS],
            "callbacks": [5, print, [5], "ab", [lambda progress: np.True_]],
        },
    ),
    "GaussianMixture": (
        _mixture,
        {
            "X": ARRAYS,
            "sample_weight": [5, -1, "a", [1], np.zeros(N), np.ones(N), RNG.random(N), np.full(N, np.nan), ROWS],
            **dict.fromkeys(("n_components", "n_init", "max_epochs", "tol", "random_state", "reg_covar"), NUMBERS),
            "covariance": NAMES,
            "covariance_type": [*NAMES, "full", "tied", "diag", "spherical"],
            "means_init": [5, "a", ROWS, ROWS[:2], np.full((2, 3), np.nan)],
            "weights_init": [5, "a", [1, 2], [0.5, 0.5], [np.nan, 1], [2, -1]],
            "solver": ["p2dvi", "cavi", 5, "moon", object],
            "config": [5, {}, "a"],
        },
    ),
    "PottsMixture": (
        _potts,
        {
            "X": ARRAYS,
            "graph": [5, "a", GRAPH[:3], -GRAPH, np.nan * GRAPH, sp.csr_array(GRAPH), 1e300 * GRAPH, 0 * GRAPH, ROWS],
            "coordinates": [5, "a", PLACES[:3], np.nan * PLACES, np.zeros((N, 2)), PLACES.astype(str), 1e200 * PLACES],
            "start": [5, "a", ROWS, np.full((N, 2), 0.5), np.full((N, 2), np.nan), -np.ones((N, 2))],
            **dict.fromkeys(("n_components", "beta", "temperature", "n_patches", "tol"), NUMBERS),
        },
    ),
    "tl.domains": (
        _on_slide(_domains),
        {
            "adata": [None, 5, "a", ROWS, object()],
            **dict.fromkeys(("n_domains", "beta", "n_init", "seed"), NUMBERS),
            **dict.fromkeys(("use_rep", "graph_key", "sample_key", "spatial_key", "covariance"), NAMES),
        },
    ),
    "gr.knn_graph": (
        _on_slide(pdvi.gr.knn_graph),
        {**dict.fromkeys(("n_neighbors", "tau"), NUMBERS), **dict.fromkeys(("use_rep", "sample_key"), NAMES)},
    ),
    "gr.radius_graph": (_on_slide(pdvi.gr.radius_graph, radius=0.3), {"radius": NUMBERS, "tau": NUMBERS}),
    "gr.partition": (_on_slide(pdvi.gr.partition, n_patches=2), {"n_patches": NUMBERS, "cells": [*NUMBERS, (0, 1)]}),
    "pp.neighborhood": (
        _on_slide(pdvi.pp.neighborhood),
        {**dict.fromkeys(("n_neighbors", "n_components", "own", "gradient"), NUMBERS), "use_rep": NAMES},
    ),
    "pp.prepare": (
        _on_slide(pdvi.pp.prepare),
        {**dict.fromkeys(("n_genes", "n_components", "clip", "seed"), NUMBERS), "layer": NAMES},
    ),
    "report.page": (_on_slide(lambda adata, **more: pdvi_report().page(adata, **more)), {"key": NAMES}),
    "datasets.mixture": (
        lambda **more: pdvi.datasets.mixture(**{"n": 60, "dim": 2, "n_components": 2, "batch_size": 20, **more}),
        dict.fromkeys(("n", "dim", "n_components", "batch_size", "bias", "separation", "seed"), NUMBERS),
    ),
}  # fmt: skip


def pdvi_report() -> Any:
    from pdvi import report

    return report


def cases() -> list[tuple[str, str, Any]]:
    """Return every call with one argument replaced by each of its hostile values."""
    huge = {("datasets.mixture", name) for name in ("n", "dim", "n_components")}
    return [
        (call, name, value)
        for call, (_, arguments) in CALLS.items()
        for name, values in arguments.items()
        for value in values
        if not ((call, name) in huge and isinstance(value, int) and value > 10**6)  # memory is not what is attacked
    ]


def fuzz(tally: Tally, folder: Path, count: int) -> None:
    chosen = cases()
    random.Random(0).shuffle(chosen)
    for call, name, value in chosen[:count]:
        told = f"{call}({name}={' '.join(repr(value).split())[:50]})"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answer = CALLS[call][0](**{name: value})
            outcome, told = (ANSWERED, "") if is_valid(answer) else (ELSE, f"{told} gave numbers that are not finite")
        except CLEAR as error:
            outcome = REFUSED if is_clear(error, name, value) else ELSE
            told += f" raised {type(error).__name__}: {str(error)[:120]}"
        except Exception as error:
            outcome, told = ELSE, f"{told} raised {type(error).__name__}: {str(error)[:120]}"
        tally.add("fuzzed calls", outcome, told)
    left = sorted(path.name for path in folder.iterdir())
    if left:
        tally.add("fuzzed calls", ELSE, f"left files: {left}")


def is_clear(error: Exception, name: str, value: Any) -> bool:
    """Return whether a message names the argument (or what it was given), and was worded by those who check."""
    text = str(error)
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    checked = f"{os.sep}pdvi{os.sep}" in where or f"sklearn{os.sep}utils" in where
    named = (
        name in text
        or (isinstance(value, str) and repr(value) in text)
        or (name == "X" and ("array" in text or "data" in text))
    )
    return checked and (named or "adata" in text or "sample" in text.lower())


def is_valid(answer: Any) -> bool:
    """Return whether the numbers of an answer are finite, as far as they should be."""
    if isinstance(answer, pdvi.GaussianMixture | pdvi.PottsMixture):
        parts = [answer.means_, answer.covariances_, answer.weights_, answer.elbo_, answer.labels_]
    elif isinstance(answer, pdvi.Result):
        parts = [*jax.tree.leaves((answer.global_params, answer.local_params)), answer.objective]
    elif isinstance(answer, AnnData):
        graphs = [sp.csr_array(graph).data for graph in answer.obsp.values()]
        parts = [np.asarray(part) for part in answer.obsm.values()] + graphs
    elif isinstance(answer, tuple):
        parts = list(answer)
    else:
        return answer is None or isinstance(answer, str)
    return all(bool(np.isfinite(np.asarray(part, float)).all()) for part in parts)


# ------------------------------------------------------------------------------------------------------ damaged files


def flips(content: bytes, count: int) -> Iterator[bytes]:
    moments = random.Random(1)
    for number in range(count):
        at = moments.randrange(len(content))
        if number % 10 == 9:
            yield content[:at]
        else:
            yield content[:at] + bytes([content[at] ^ (1 << moments.randrange(8))]) + content[at + 1 :]


def spelled(result: Any) -> Any:
    leaves = jax.tree.leaves((result.global_params, result.local_params, result.state))
    arrays = [(str(np.asarray(leaf).dtype), np.shape(leaf), np.asarray(leaf).tobytes()) for leaf in leaves]
    rest = (
        result.trace.to_csv(),
        result.status,
        result.n_steps,
        result.seed,
        result.batch_size,
        result.solver,
        result.data,
    )
    return arrays, list(result.state), rest


def damage(tally: Tally, kind: str, file: Path, read: Callable[[], Any], count: int) -> None:
    """Flip bits of a file and cut it: what is read is what was written, or one error says so."""
    content, expected = file.read_bytes(), read()
    for number, changed in enumerate(flips(content, count)):
        file.write_bytes(changed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                same = read() == expected
            tally.add(kind, ANSWERED if same else ELSE, f"flip {number} changed what is read")
        except ValueError as error:
            clear = "damaged" in str(error) or "write it again" in str(error) or "format" in str(error)
            tally.add(kind, REFUSED if clear else ELSE, f"flip {number}: {str(error)[:100]}")
        except Exception as error:
            tally.add(kind, ELSE, f"flip {number} raised {type(error).__name__}: {str(error)[:100]}")
    file.write_bytes(content)


def files(tally: Tally, folder: Path, results: int, manifests: int, stores: int) -> None:
    file = folder / "run.pdvi"
    _fit().save(file)
    damage(tally, "flips of result files", file, lambda: spelled(pdvi.load_result(file)), results)
    path = folder / "store"
    pdvi.write_store(path, PROBLEM)

    def everything() -> Any:
        store = Store(path)
        return {name: leaf.tobytes() for name, leaf in store.load().items()}, store.model, store.checksums

    damage(tally, "flips of manifests", path / "manifest.json", everything, manifests)
    shards = sorted(path.glob("shard-*"))
    for shard in shards:
        damage(tally, "damaged stores", shard, everything, max(1, stores // len(shards)))
    for shard in shards:
        kept = shard.read_bytes()
        shard.unlink()
        try:
            everything()
            tally.add("damaged stores", ELSE, f"{shard.name} is missing, and nobody noticed")
        except ValueError as error:
            tally.add("damaged stores", REFUSED if shard.name in str(error) else ELSE, str(error))
        shard.write_bytes(kept)


# ------------------------------------------------------------------------------------------------------ Ctrl-C


# a shell lets what it runs in the background ignore Ctrl-C, and children inherit that
HEARD = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
PDVI = f"{HEARD}; from pdvi.cli import main; main()"


def interrupts(tally: Tally, folder: Path, count: int) -> None:
    """Interrupt `pdvi domains` at random moments; the first run, undisturbed, tells how long it takes."""
    source = folder / "slide.h5ad"
    adata = pdvi.datasets.tissue(n_spots=400, n_genes=40, n_domains=3, seed=0)
    adata.write_h5ad(source)
    work = folder / "out"
    work.mkdir()
    names = ["map.png", "out.h5ad", "report.html"]
    command = [sys.executable, "-c", PDVI, "domains", str(source), "-o", str(work / "out.h5ad"), "--n-domains", "3"]
    command += ["--plot", str(work / "map.png"), "--report", str(work / "report.html"), "--quiet"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONWARNINGS": "ignore"}

    def started() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def clean() -> None:
        for path in work.iterdir():
            path.unlink()

    started().communicate()  # compiles
    clean()
    began = time.perf_counter()
    started().communicate()
    whole = time.perf_counter() - began
    moments = random.Random(2)
    for number in range(count):
        clean()
        child = started()
        time.sleep(moments.uniform(0.1, 1.02) * whole)
        child.send_signal(signal.SIGINT)
        try:
            _, error = child.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            tally.add("Ctrl-C", ELSE, f"{number}: did not end in {SECONDS} s")
            continue
        found = sorted(path.name for path in work.iterdir())
        told = f"{number}: exit code {child.returncode}, files {found}, {error.decode()[-300:]!r}"
        if child.returncode == 0:
            tally.add("Ctrl-C", ANSWERED if found == names else ELSE, told)
        else:
            stopped = child.returncode in (130, -signal.SIGINT)
            tally.add("Ctrl-C", REFUSED if stopped and found in ([], names) else ELSE, told)


def attack(*, quick: bool, only: str | None = None) -> Tally:
    """Run all of it, or one part, in temporary folders."""
    tally, before = Tally(), Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        empty = folder / "empty"
        empty.mkdir()
        os.chdir(empty)
        try:
            if only in (None, "calls"):
                fuzz(tally, empty, 60 if quick else 700)
            if only in (None, "files"):
                files(tally, folder, *((60, 40, 12) if quick else (1_000, 300, 250)))
            if only in (None, "interrupts"):
                interrupts(tally, folder, 2 if quick else 20)
        finally:
            os.chdir(before)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("calls", "files", "interrupts"))
    options = parser.parse_args()
    tally = attack(quick=options.quick, only=options.only)
    print(tally.table())
    sys.exit(1 if tally.failures else 0)


if __name__ == "__main__":
    main()
