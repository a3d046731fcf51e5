"""`pdvi.GaussianMixture` beside scikit-learn's: seconds, memory, log likelihood and labels on the same rows.

    python benchmarks/gaussian_mixture.py [--sizes 100000 500000 5000000] [--types full tied diag spherical] [--quick]

Rows are float64 (``--dtype float32`` for the other) and come from a mixture whose components overlap a little and have
sizes, feature scales and correlations of their own; ``--quick`` takes a tenth of the rows. Both tools have their
defaults, one start and ``random_state=0``.

Each tool has a process of its own for each type, which reads the rows from a file; only `fit` is timed, all imports
being done. "first" is pdvi's first fit, compilation included; "again" is a later one in the same process. scikit-learn
is timed after a fit of a few rows. "again" and scikit-learn are the fastest of three (``--repeats``): on a busy machine
one fit of scikit-learn took 42 s where the fastest took 2. More than a million rows are fitted once, not three times.
Their memory is that of the first of the three. The second ratio is that of the processor's seconds, which other
programs on the machine change less.

Memory is the peak of the resident memory during a fit (Linux's VmHWM, reset before it) minus the resident memory before
that fit plus the rows' size, in multiples of the rows' size: 1.0 is a fit that takes nothing. pdvi's "first" includes
the compiler and its programs; at "again" they are there already, as are pages that the allocator did not give back.

The log likelihood is the mean over all rows as each tool's `score` gives it; ARI is between the two labelings; a star
marks iterations that ended without convergence (pdvi's are epochs).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import adjusted_rand_score

SIZES = {100_000: (10, 5), 500_000: (20, 10), 5_000_000: (10, 5)}  # rows: features, components
MANY = 1_000_000  # rows: more are fitted once
TYPES = ("full", "tied", "diag", "spherical")
TOOLS = ("pdvi", "sklearn")


def simulate(n_rows: int, n_features: int, n_components: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Rows of a mixture; centers are about five standard deviations apart."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(n_components, n_features)) * 5 / np.sqrt(2 * n_features)
    sizes = np.geomspace(0.6, 1.5, n_components)
    scales = rng.uniform(0.7, 1.3, (n_components, 1, n_features))
    mixing = np.eye(n_features) + 0.3 * rng.normal(size=(n_components, n_features, n_features)) / np.sqrt(n_features)
    factors = sizes[:, None, None] * mixing * scales
    labels = rng.choice(n_components, n_rows, p=rng.dirichlet(np.full(n_components, 10.0)))
    X = np.empty((n_rows, n_features), dtype)
    for k in range(n_components):
        rows = np.flatnonzero(labels == k)
        X[rows] = centers[k] + rng.standard_normal((len(rows), n_features)) @ factors[k]
    return X


def status(field: str) -> int:
    """A size in bytes from Linux's table of this process: VmRSS (now) or VmHWM (the peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def estimator(tool: str) -> Any:
    """The tool's class; one tool's process does not import the other's."""
    return import_module("pdvi" if tool == "pdvi" else "sklearn.mixture").GaussianMixture


def timed_fit(mixture: Any, X: np.ndarray) -> dict[str, float]:
    """Seconds of a fit, and its memory in multiples of the rows' size."""
    gc.collect()
    resident = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    began, used = time.perf_counter(), time.process_time()
    mixture.fit(X)
    seconds, processor = time.perf_counter() - began, time.process_time() - used
    memory = (status("VmHWM") - resident + X.nbytes) / X.nbytes
    return {"seconds": seconds, "processor": processor, "memory": memory}


def measure(tool: str, folder: Path, covariance_type: str, n_components: int, n_fits: int) -> None:
    """Fit the rows of a folder with one tool; print what was measured, and leave the labels in the folder."""
    warnings.simplefilter("ignore")
    options = {"covariance_type": covariance_type, "n_init": 1, "random_state": 0}
    mixture = estimator(tool)(n_components, **options)  # imports
    X = np.load(folder / "X.npy")
    if tool == "sklearn":
        mixture.fit(X[:1000])
    fits = []
    for _ in range(n_fits):
        mixture = estimator(tool)(n_components, **options)  # a new one: what the last has found is let go
        fits.append(timed_fit(mixture, X))
    np.save(folder / f"{tool}.npy", mixture.predict(X).astype(np.int16))
    found = {"fits": fits, "score": float(mixture.score(X)), "n_iter": int(mixture.n_iter_)}
    print(json.dumps({**found, "converged": bool(mixture.converged_)}))


def in_new_process(tool: str, folder: Path, covariance_type: str, n_components: int, n_fits: int) -> dict[str, Any]:
    """What `measure` prints in a process of its own, without a cache of compiled programs."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    what = [tool, str(folder), covariance_type, str(n_components), str(n_fits)]
    command = [sys.executable, __file__, "--measure", *what]
    done = subprocess.run(command, check=True, env={**environment, "PDVI_CACHE": "off"}, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def summarize(fits: list[dict[str, float]]) -> dict[str, float]:
    """The seconds of the fastest, and the memory of the first: later ones find pages that it left."""
    fastest = {name: min(fit[name] for fit in fits) for name in ("seconds", "processor")}
    return {**fastest, "memory": fits[0]["memory"]}


def header() -> None:
    """Print the two lines above the rows: groups of columns, then columns."""
    print(
        f"{'':12}{'seconds':>27}{'again / sklearn':>20}{'memory / size of rows':>29}{'log likelihood':>24}"
        f"{'iterations':>24}\n{'':12}{'first':>9}{'again':>9}{'sklearn':>9}{'seconds':>10}{'processor':>10}"
        f"{'first':>11}{'again':>9}{'sklearn':>9}"
        f"{'pdvi':>13}{'sklearn':>11}{'ARI':>8}{'pdvi':>7}{'sklearn':>9}",
        flush=True,
    )


def compare(folder: Path, covariance_type: str, n_components: int, repeats: int) -> None:
    """Print one row of the table."""
    ours = in_new_process("pdvi", folder, covariance_type, n_components, 1 + repeats)
    theirs = in_new_process("sklearn", folder, covariance_type, n_components, repeats)
    ari = adjusted_rand_score(*(np.load(folder / f"{tool}.npy") for tool in TOOLS))
    first, *later = ours["fits"]
    again, other = summarize(later), summarize(theirs["fits"])
    iterations = [f"{found['n_iter']}{' ' if found['converged'] else '*'}" for found in (ours, theirs)]
    print(
        f"{covariance_type:12}{first['seconds']:9.2f}{again['seconds']:9.2f}{other['seconds']:9.2f}"
        f"{again['seconds'] / other['seconds']:8.2f} x{again['processor'] / other['processor']:8.2f} x"
        f"{first['memory']:11.1f}{again['memory']:9.1f}{other['memory']:9.1f}"
        f"{ours['score']:13.4f}{theirs['score']:11.4f}{ari:8.3f}{iterations[0]:>8}{iterations[1]:>9}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        tool, folder, covariance_type, n_components, n_fits = arguments.measure
        measure(tool, Path(folder), covariance_type, int(n_components), int(n_fits))
        return

    for size in arguments.sizes:
        (n_features, n_components), n_rows = SIZES[size], size // 10 if arguments.quick else size
        with tempfile.TemporaryDirectory() as place:
            X = simulate(n_rows, n_features, n_components, arguments.dtype)
            np.save(Path(place) / "X.npy", X)
            print(f"\n{n_rows:,} x {n_features}, {n_components} components, {X.dtype}, {X.nbytes / 1e6:,.0f} MB")
            del X
            header()
            for covariance_type in arguments.types:
                compare(Path(place), covariance_type, n_components, arguments.repeats if n_rows <= MANY else 1)


if __name__ == "__main__":
    main()
