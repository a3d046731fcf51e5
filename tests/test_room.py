"""Memory is said before it is taken."""

import jax.numpy as jnp
import numpy as np
import pytest

import pdvi
from pdvi._base import room


class Mean:
    """Many globals, little data."""

    def init_global(self, key):
        return {"mean": jnp.zeros(1_000)}

    def init_local(self, key, shard):
        return jnp.zeros(shard["y"].shape)

    def loss(self, local, globals_, shard):
        return jnp.sum((shard["y"] - local) ** 2) + 0.01 * jnp.sum((local[0] - globals_["mean"]) ** 2)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    def with_kilobytes(number):
        (tmp_path / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {number} kB\n")
        monkeypatch.setattr(room, "MEMINFO", tmp_path / "meminfo")

    return with_kilobytes


def test_copies_that_do_not_fit_are_refused_before_they_are_made(machine):
    problem = pdvi.Problem(Mean(), {"y": np.zeros((500, 3))})
    machine(4_000)
    wanted = "`problem` must fit into memory: what P2DVI keeps .* of 500 shards, for 1000 globals, take 8 MB, 8 kB for"
    with pytest.raises(MemoryError, match=wanted) as error:
        pdvi.fit(problem, pdvi.P2DVI(eta=1.0), max_epochs=1)
    assert "256 shards at most; or write it with pdvi.write_store and use executor=pdvi.Disk()" in str(error.value)
    machine(16_000)
    pdvi.fit(problem, pdvi.P2DVI(eta=1.0), max_epochs=1)


def test_local_variables_count_too(machine):
    problem = pdvi.Problem(Mean(), {"y": np.zeros((500, 300))})
    machine(100)
    with pytest.raises(MemoryError, match="local variables of 500 shards"):
        pdvi.fit(problem, pdvi.P2DVI(eta=1.0), max_epochs=1)


def test_a_system_that_does_not_tell_is_not_asked_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "MEMINFO", tmp_path / "nowhere")
    assert room.available() == np.inf


@pytest.mark.parametrize(
    ("size", "words"), [(12, "12 bytes"), (3_200_000_000, "3.2 GB"), (0, "0 bytes"), (2e13, "20 TB")]
)
def test_sizes_in_words(size, words):
    assert room.in_words(size) == words
