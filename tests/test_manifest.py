"""A store is opened as it was written, or one error says what is wrong; it is replaced without a moment of loss."""

import hashlib
import json
import os
import random
import signal
import stat
import subprocess
import sys
import zlib

import numpy as np
import pytest

import pdvi
from pdvi.shards.manifest import decode
from pdvi.shards.store import Store, StoreWriter

FLIPS = 300


def write(path, value=0.0, **settings):
    with StoreWriter(path, **settings) as writer:
        for b in range(3):
            writer.add({"x": np.full((5, 2), value + b), "n": np.arange(4, dtype=np.int32)})
        model = {"class": "Quadratic", "fields": {"scale": 1.5, "a": {"dtype": "<f4", "values": [1.0, 2.5]}}}
        writer.finish(halo=np.array([[1], [2], [0]]), rows=np.arange(6).reshape(3, 2), model=model)


@pytest.fixture
def store(tmp_path):
    write(tmp_path / "store")
    return tmp_path / "store"


def spelled(store):
    shards = {name: leaf.tolist() for name, leaf in store.load().items()}
    return shards, store.model, store.halo.tolist(), store.rows.tolist(), store.checksums


def test_no_flipped_byte_of_a_manifest_gives_another_store(store):
    manifest = store / "manifest.json"
    content, expected = manifest.read_bytes(), spelled(Store(store))
    moments = random.Random(0)
    refused = 0
    for number in range(FLIPS):
        at = moments.randrange(len(content))
        flipped = bytes([content[at] ^ (1 << number % 8)])
        manifest.write_bytes(content[:at] + (flipped + content[at + 1 :] if number % 4 else b""))
        try:
            assert spelled(Store(store)) == expected
        except ValueError as error:
            assert "the store" in str(error)  # noqa: PT017
            assert type(error) is ValueError  # noqa: PT017
            refused += 1
    assert refused > 0.9 * FLIPS  # only blanks may change


def forge(store, **fields):
    """Change a manifest and make its checksum right: what an attacker would."""
    content = json.loads((store / "manifest.json").read_text())
    del content["manifest"]
    content |= fields
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (store / "manifest.json").write_text(json.dumps({**content, "manifest": digest}))


def leaf(**fields):
    return {"leaves": {"x": {"offset": 0, "bytes": 80, "dtype": "<f8", "shape": [5, 2], **fields}}}


def test_forging_nothing_changes_nothing(store):
    expected = spelled(Store(store))
    forge(store)
    assert spelled(Store(store)) == expected
    forge(store, **leaf())
    assert list(Store(store).read(0)) == ["x"]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"shard_bytes": 10**13}, "'shard-00000.bin': it has 192 bytes instead of 10000000000000"),
        ({"shard_bytes": 10**13, **leaf(bytes=8 * 10**12, shape=[10**12])}, "192 bytes instead of 10000000000000"),
        ({"shard_bytes": "192"}, "`shard_bytes` must be a whole number"),
        ({"shard_bytes": True}, "`shard_bytes` must be a whole number"),
        ({"checksums": []}, "`checksums` must have one entry per shard"),
        ({"checksums": [0] * 4}, "'shard-00003.bin': it is missing"),
        ({"checksums": [0, 1, 2**32]}, "`checksums` must be checksums"),
        ({"checksums": {"0": 1}}, "`checksums` must have one entry per shard"),
        ({"leaves": []}, "`leaves` must be an object"),
        ({"leaves": {"x": {"offset": 0}}}, "leaf 'x' must have"),
        (leaf(offset=128), "leaf 'x' must lie within its shard"),
        (leaf(offset=-64), "leaf 'x' must have whole offset"),
        (leaf(offset=8), "leaf 'x' must begin at a multiple of 64"),
        (leaf(shape=[5, 3]), "leaf 'x' has another size"),
        (leaf(shape=[-5, -2]), "leaf 'x' must have a shape of whole numbers"),
        (leaf(shape=10), "leaf 'x' must have a shape of whole numbers"),
        (leaf(dtype="O"), "leaf 'x' must be of numbers, not 'O'"),
        (leaf(dtype="<M8[ns]"), "leaf 'x' must be of numbers"),
        (leaf(dtype="f8,f8"), "leaf 'x' must be of numbers"),
        (leaf(dtype="(10000000,)f8"), "leaf 'x' must be of numbers"),
        (leaf(dtype=["f8"]), "leaf 'x' must be of numbers"),
        (leaf(dtype="f8 ("), "leaf 'x' must be of numbers"),
        ({"model": "Quadratic"}, "`model` must have class and fields"),
        ({"model": {"class": "__loader__", "fields": {}}}, "`model` must name a class"),
        ({"model": {"class": "Quadratic", "fields": {"a": {"dtype": "O", "values": []}}}}, "'a' of `model` must be an"),
        ({"halo": "1"}, "`halo` must be a checksum or null"),
        ({"rows": -1}, "`rows` must be a checksum or null"),
        ({"rows": 5}, "'rows.npy': its checksum does not match"),
        ({"other": 5}, "it must have the fields"),
    ],
)
def test_forged_manifests_are_refused(store, fields, why, verify):
    forge(store, **fields)
    with pytest.raises(ValueError, match=rf"the store '.*store' is damaged in .*{why}.*; write the store again"):
        Store(store, verify=verify)


@pytest.mark.parametrize("text", ["[]", "5", "null", "[" * 100_000, '{"format": 2}', "\xff", ""])
def test_other_texts_are_no_manifest(store, text):
    (store / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"damaged in 'manifest\.json'"):
        Store(store)


def npy(shape, dtype, content):
    header = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


@pytest.mark.parametrize(
    "content",
    [
        npy((3, 10**12), "<i8", bytes(24)),
        npy((3, 1), "|O", bytes(24)),
        npy((3,), "<i8", bytes(24)),
        npy((2, 1), "<i8", bytes(16)),
        npy((3, 1), "<f8", bytes(24)),
        b"PK\x03\x04",
        b"",
    ],
)
def test_forged_tables_are_refused(store, content):
    good = npy((3, 1), "<i8", np.array([1, 2, 0]).tobytes())
    (store / "halo.npy").write_bytes(good)
    forge(store, halo=zlib.crc32(good))
    assert Store(store).halo.tolist() == [[1], [2], [0]]
    (store / "halo.npy").write_bytes(content)
    forge(store, halo=zlib.crc32(content))
    with pytest.raises(ValueError, match=r"damaged in 'halo\.npy'"):
        Store(store)


@pytest.mark.parametrize("name", ["manifest.json", "halo.npy", "shard-00001.bin"])
def test_a_store_is_made_of_regular_files(store, name):
    (store / name).unlink()
    os.mkfifo(store / name)  # reading it would wait for ever
    with pytest.raises(ValueError, match=f"damaged in '{name}': it is not a regular file"):
        Store(store)


def test_stores_of_before_are_named(store):
    (store / "manifest.json").write_text(json.dumps({"format": 1, "shard_bytes": 64}))
    with pytest.raises(ValueError, match="has format 1, this version reads 2; write it again"):
        Store(store)


def test_only_numbers_become_shards(tmp_path):
    with StoreWriter(tmp_path / "store") as writer:
        with pytest.raises(ValueError, match="`shards` must be of numbers, but 'x' has type <U1"):
            writer.add({"x": np.array(["a"])})
        with pytest.raises(ValueError, match="at least one shard, got none"):
            writer.finish()


def test_an_empty_halo_is_kept(tmp_path):
    with StoreWriter(tmp_path / "store") as writer:
        writer.add({"x": np.zeros(3)})
        writer.finish(halo=np.zeros((1, 0), np.int32))
    assert Store(tmp_path / "store").halo.shape == (1, 0)


def test_a_store_keeps_its_mode_and_no_scratch(store):
    store.chmod(0o750)
    with StoreWriter(store, overwrite=True) as writer:
        assert stat.S_IMODE(writer.folder.stat().st_mode) == 0o700
        (writer.folder / "rows.tmp").write_bytes(b"scratch")
        writer.add({"x": np.zeros(3)})
        writer.finish()
    assert stat.S_IMODE(store.stat().st_mode) == 0o750
    assert sorted(os.listdir(store)) == ["manifest.json", "shard-00000.bin"]
    assert os.listdir(store.parent) == ["store"]


def test_a_linked_store_is_replaced_where_it_is(tmp_path):
    (tmp_path / "scratch").mkdir()
    write(tmp_path / "scratch" / "store")
    (tmp_path / "link").symlink_to("scratch/store")
    write(tmp_path / "link", 7.0, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert Store(tmp_path / "scratch" / "store").read(0)["x"][0, 0] == 7
    assert os.listdir(tmp_path / "scratch") == ["store"]
    (tmp_path / "lost").symlink_to("nowhere/store")
    with pytest.raises(ValueError, match=r"in a folder that exists, but '.*nowhere' does not"):
        StoreWriter(tmp_path / "lost")


def test_links_in_a_replaced_store_are_not_followed(store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    (store / "link").symlink_to(outside)
    (tmp_path / ".tmp-store").symlink_to(outside)  # the name that writers once had
    write(store, 1.0, overwrite=True)
    assert os.listdir(outside) == ["file"]
    assert (outside / "file").read_text() == "mine"
    assert Store(store).read(0)["x"][0, 0] == 1


KILLED = """
import os, signal, sys
import numpy as np
from pdvi.shards.store import StoreWriter

calls, rename = [], os.rename

def last(*names):
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    calls.append(names)
    rename(*names)

os.rename = last
with StoreWriter(sys.argv[1], overwrite=True) as writer:
    writer.add({"x": np.ones(3)})
    writer.finish()
"""


@pytest.mark.parametrize("renames", [0, 1])
def test_a_writer_killed_while_it_replaces_loses_nothing(store, renames):
    child = subprocess.run([sys.executable, "-c", KILLED, str(store), str(renames)], check=False)
    assert child.returncode == -signal.SIGKILL
    expected = np.full((5, 2), 0.0)
    if renames == 0:
        np.testing.assert_array_equal(Store(store).read(0)["x"], expected)
    else:
        with pytest.raises(FileNotFoundError, match="killed while it replaced it; the one before is whole at") as error:
            pdvi.Problem.from_store(store)
        (aside,) = (name for name in store.parent.iterdir() if name.name.startswith(".old-"))
        assert repr(str(aside)) in str(error.value)
        np.testing.assert_array_equal(Store(aside).read(0)["x"], expected)
    write(store, 4.0, overwrite=True)
    assert Store(store).read(0)["x"][0, 0] == 4
    assert os.listdir(store.parent) == ["store"]


def test_a_name_taken_meanwhile_is_not_overwritten(tmp_path):
    with StoreWriter(tmp_path / "store") as writer:
        writer.add({"x": np.zeros(3)})
        write(tmp_path / "store", 5.0)
        with pytest.raises(ValueError, match=r"`path` must not exist yet, but '.*store' does"):
            writer.finish()
    assert Store(tmp_path / "store").read(0)["x"][0, 0] == 5
    assert os.listdir(tmp_path) == ["store"]


def test_a_manifest_is_what_was_encoded(store):
    decoded = decode((store / "manifest.json").read_bytes())
    assert decode(decoded.encode()) == decoded
    assert decoded.leaves["n"].shape == (4,)
