"""Traced programs kept for the next process: found again, told apart, and never trusted blindly."""

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from pdvi._base import compiled, programs


class Pair(eqx.Module):
    one: jax.Array
    two: jax.Array
    name: str = eqx.field(static=True, default="")


@pytest.fixture
def traced(monkeypatch, tmp_path):
    """A folder for programs of its own, and how often `scaled` was traced."""
    monkeypatch.setattr(compiled, "_own", tmp_path)
    monkeypatch.setattr(programs, "_ready", {})
    count = []
    monkeypatch.setattr(np, "traced_for_test", count, raising=False)
    return count


def scaled(factor, pair):
    np.traced_for_test.append(1)
    return {"sum": factor * (pair.one + pair.two), "both": (pair.one, [pair.two])}


def pair(size=3, name=""):
    return Pair(jnp.arange(size, dtype=jnp.float32), jnp.ones(size), name)


def files(folder):
    place = folder / compiled.TRACED
    return sorted(place.iterdir()) if place.is_dir() else []


def anew():
    """Forget what this process has, as another one would."""
    programs._ready.clear()


def test_another_process_need_not_trace(traced, tmp_path):
    first = programs.run(scaled, 2.0, pair(), {})
    np.testing.assert_array_equal(first["sum"], [2.0, 4.0, 6.0])
    assert len(traced) == 1
    assert len(files(tmp_path)) == 1
    anew()
    again = programs.run(scaled, 2.0, pair(), {})
    assert len(traced) == 1
    assert jax.tree.structure(again) == jax.tree.structure(first)
    np.testing.assert_array_equal(again["sum"], first["sum"])


@pytest.mark.parametrize(
    "other",
    [
        lambda: programs.run(scaled, 3.0, pair(), {}),
        lambda: programs.run(scaled, 2.0, pair(4), {}),
        lambda: programs.run(scaled, 2.0, pair(name="another"), {}),
        lambda: programs.run(scaled, 2.0, jax.tree.map(lambda leaf: leaf.astype(jnp.float16), pair()), {}),
    ],
    ids=["settings", "shape", "what is static", "type"],
)
def test_whatever_it_depends_on_makes_another_program(traced, tmp_path, other):
    programs.run(scaled, 2.0, pair(), {})
    anew()
    other()
    assert len(traced) == 2
    assert len(files(tmp_path)) == 2


def test_other_source_makes_other_programs(traced, tmp_path, monkeypatch):
    programs.run(scaled, 2.0, pair(), {})
    anew()
    monkeypatch.setattr(programs, "_built", lambda: "another version")
    programs.run(scaled, 2.0, pair(), {})
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize("at", [3, 20, 200, -1])
def test_a_damaged_file_is_made_anew(traced, tmp_path, at):
    programs.run(scaled, 2.0, pair(), {})
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[at] ^= 1
    for content in (bytes(damaged), whole[:50], b""):
        path.write_bytes(content)
        anew()
        np.testing.assert_array_equal(programs.run(scaled, 2.0, pair(), {})["sum"], [2.0, 4.0, 6.0])
        assert programs._read(path) is not None
    assert len(traced) == 4


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(traced, tmp_path):
    (tmp_path / compiled.TRACED).write_text("a file where the folder should be")
    np.testing.assert_array_equal(programs.run(scaled, 2.0, pair(), {})["sum"], [2.0, 4.0, 6.0])
    assert len(traced) == 1


def test_a_function_that_cannot_be_kept_is_compiled_as_usual(traced, tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise NotImplementedError("no such export")

    monkeypatch.setattr(jax.export, "export", refused)
    np.testing.assert_array_equal(programs.run(scaled, 2.0, pair(), {})["sum"], [2.0, 4.0, 6.0])
    assert not files(tmp_path)


def test_old_programs_go(traced, tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "MOST", 2)
    for factor in (1.0, 2.0, 3.0):
        programs.run(scaled, factor, pair(), {})
    assert len(files(tmp_path)) == 2


def test_nothing_is_kept_unless_asked(traced, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_own", None)
    programs.run(scaled, 2.0, pair(), {})
    monkeypatch.setenv(compiled.OWN, str(tmp_path))  # the user's own cache is JAX's alone
    assert compiled.keep_compiled() == tmp_path
    assert compiled.own_folder() is None
    programs.run(scaled, 3.0, pair(), {})
    assert not files(tmp_path)
