"""Would compressed shards be read faster? Size, and bytes per second, of plain and compressed shards on a cold disk.

    python benchmarks/scale.py --spots 1000000 --executor memory --epochs 3    # writes the store
    python benchmarks/compression.py scale-stores/1000000-all-100000

Each array is read from disk with nothing cached and decompressed on one core; plain ones are read the same way. Weights
of the benchmark's graph are all the same number, which no tissue has, so they are replaced by different ones. The
fastest of all shards counts. Needs numcodecs (`pip install zarr` brings it).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from numcodecs import Blosc, blosc

from pdvi.shards.store import Store

CODECS = {
    "plain": None,
    "lz4": Blosc("lz4", clevel=1, shuffle=Blosc.SHUFFLE),
    "zstd": Blosc("zstd", clevel=1, shuffle=Blosc.SHUFFLE),
    "lz4, bits shuffled": Blosc("lz4", clevel=5, shuffle=Blosc.BITSHUFFLE),
}


def cold(path: Path) -> tuple[bytes, float]:
    """Return a file's content and the seconds it took to read it from the disk."""
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        content = file.read()
        return content, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--shards", type=int, default=5)
    options = parser.parse_args()
    blosc.set_nthreads(1)
    store, rng = Store(options.store, verify=False), np.random.default_rng(0)
    best: dict[str, dict[str, list[float]]] = {name: {} for name in CODECS}
    with tempfile.TemporaryDirectory(dir=options.store.parent) as folder:
        for b in range(min(options.shards, store.n_shards)):
            shard = store.read(b)
            shard["weight"] = shard["weight"] * rng.uniform(0.5, 1.5, shard["weight"].shape).astype(np.float32)
            for name, codec in CODECS.items():
                for leaf, array in shard.items():
                    array = np.ascontiguousarray(array).reshape(-1)
                    path = Path(folder) / "leaf"
                    path.write_bytes(array.tobytes() if codec is None else codec.encode(array))
                    content, read = cold(path)
                    began = time.perf_counter()
                    if codec is not None:
                        assert np.array_equal(np.frombuffer(codec.decode(content), array.dtype), array)
                    unpacked = time.perf_counter() - began if codec is not None else 0.0
                    old = best[name].get(leaf, [np.inf, np.inf, 0, 0])
                    new = [min(old[0], read), min(old[1], unpacked), len(content), array.nbytes]
                    best[name][leaf] = new
    print(f"{'':20}{'leaf':10}{'MB':>8}{'of plain':>10}{'read, s':>10}{'unpacked, s':>13}{'plain MB/s':>12}")
    for name, leaves in best.items():
        large = {leaf: found for leaf, found in leaves.items() if found[3] > 1e6}
        for leaf, (read, unpacked, size, plain) in [*large.items(), ("all", np.sum([*large.values()], 0))]:
            speed = plain / 1e6 / (read + unpacked)
            print(f"{name:20}{leaf:10}{size / 1e6:8.1f}{size / plain:10.2f}{read:10.4f}{unpacked:13.4f}{speed:12,.0f}")


if __name__ == "__main__":
    main()
