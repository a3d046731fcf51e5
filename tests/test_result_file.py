"""A result file gives the numbers that were saved, or one error that says it is damaged."""

import hashlib
import io
import json
import os
import random
import warnings
import zipfile

import jax
import numpy as np
import pandas as pd
import pytest
import zarr
from zarr.storage import ZipStore

from pdvi import Result, Status, load_result
from pdvi.core import result_file

DAMAGED = "is not a pdvi result file, or it is damaged .*; save it again"
FLIPS = 300


def small(**fields):
    trace = pd.DataFrame({"step": [0, 4], "objective": [2.5, np.nan], "event": ["", "restored"]})
    settings = {
        "global_params": {"lam": np.arange(6.0).reshape(2, 3), "m/n": np.float32([np.pi])},
        "local_params": {"phi": (np.arange(8, dtype=np.int16), [np.array([True, False])]), "none": None},
        "trace": trace,
        "status": Status.RUNNING,
        "n_steps": 4,
        "seed": 7,
        "batch_size": 2,
        "solver": {"class": "P2DVI", "eta": [0.1, 0.2]},
        "state": {"server.lam0": np.ones((3, 1)), "own.dual": np.zeros((0, 4)), "scale": np.asarray(2.0)},
        "data": "0123abcd",
    }
    return Result(**{**settings, **fields})


def spelled(result):
    """Everything in a result, as text and bytes."""
    arrays = (result.global_params, result.local_params, result.state)
    leaves = [(str(leaf.dtype), leaf.shape, leaf.tobytes()) for leaf in jax.tree.leaves(arrays)]
    rest = (list(result.state), result.trace.to_csv(), result.status, result.n_steps, result.seed, result.solver)
    return leaves, rest, result.batch_size, result.data, str(jax.tree.structure(arrays))


@pytest.fixture
def saved(tmp_path):
    small().save(tmp_path / "run")
    return tmp_path / "run"


def attempts(content, seed):
    """Flipped bits, changed bytes and cut ends, wherever they come."""
    moments = random.Random(seed)
    for number in range(FLIPS):
        at = moments.randrange(len(content))
        if number % 3 == 0:
            yield content[:at]
        else:
            changed = content[at] ^ (1 << moments.randrange(8) if number % 3 == 1 else moments.randrange(1, 256))
            yield content[:at] + bytes([changed]) + content[at + 1 :]


def test_no_flipped_byte_gives_other_numbers(saved):
    """Every byte is under the checksum, so that each must be noticed."""
    content = saved.read_bytes()
    for damaged in attempts(content, seed=0):
        saved.write_bytes(damaged)
        with pytest.raises(ValueError, match=DAMAGED):
            load_result(saved)
    saved.write_bytes(content)
    assert spelled(load_result(saved)) == spelled(small())


def test_every_byte_of_the_end_counts(saved):
    """There, in the archive's list and its comment, a reader of zip files decides what it sees."""
    content = saved.read_bytes()
    for at in range(len(content) - 120, len(content)):
        for bit in (0, 5):
            saved.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
            with pytest.raises(ValueError, match=DAMAGED):
                load_result(saved)
    saved.write_bytes(content + b" ")
    with pytest.raises(ValueError, match=DAMAGED):
        load_result(saved)


def forged(path, change=lambda meta: None, members=lambda members: members, compression=zipfile.ZIP_STORED):
    """Write a file whose checksum is right and whose content is not: what an attacker would."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
        comment = archive.comment
    root = json.loads(contents["zarr.json"])
    meta = json.loads(root["attributes"]["pdvi"])
    change(meta)
    root["attributes"]["pdvi"] = json.dumps(meta)
    contents["zarr.json"] = json.dumps(root).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members(contents).items():
            archive.writestr(name, content, zipfile.ZIP_STORED if name.endswith("zarr.json") else compression)
        archive.comment = comment
    content = path.read_bytes()[:-64]
    path.write_bytes(content + hashlib.sha256(content).hexdigest().encode())


def test_forging_nothing_changes_nothing(saved):
    """So the forgeries below are refused for what they change."""
    forged(saved)
    assert spelled(load_result(saved)) == spelled(small())


def without(name):
    return lambda members: {key: value for key, value in members.items() if key != name}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda meta: meta["arrays"].update({"global/0": ["float64", [10**6, 50]]}), "48 bytes instead of 400000000"),
        (lambda meta: meta["arrays"].update({"global/0": ["float64", [2**62, 2**62]]}), "48 bytes instead of"),
        (lambda meta: meta["arrays"].update({"global/0": ["float64", [-1, -6]]}), "a whole number is -1"),
        (lambda meta: meta["arrays"].update({"global/0": ["object", [2, 3]]}), "an array has the type 'object'"),
        (lambda meta: meta["arrays"].update({"state/1": ["float64", [4, 4]]}), "state/1/c/0/0"),
        (lambda meta: meta["arrays"].pop("local/0"), "local/0"),
        (lambda meta: meta.update(status="FINE"), "FINE"),
        (lambda meta: meta.update(n_steps="4"), "a whole number is '4'"),
        (lambda meta: meta.update(events=5), "`events` must be 2 texts"),
        (lambda meta: meta.update(events=[""]), "`events` must be 2 texts"),
        (lambda meta: meta.update(state=["a", 5, "b"]), "`state` must be texts"),
        (lambda meta: meta.update(blocks=["lam", "lam"]), "`blocks` must be texts, each once"),
        (lambda meta: meta.update(columns=["step"]), "trace has 2 arrays for"),
        (lambda meta: meta.update(solver=5), "`solver` must be"),
        (lambda meta: meta.update(data=None), "`data` must be"),
        (lambda meta: meta.update(local={"dict": [1]}), "items"),
        (lambda meta: meta.clear(), "arrays"),
    ],
)
def test_forged_descriptions_are_refused(saved, change, why):
    forged(saved, change)
    with pytest.raises(ValueError, match=rf"damaged \(.*{why}.*\)"):
        load_result(saved)


def test_a_missing_chunk_is_damage(saved):
    forged(saved, members=without("global/0/c/0/0"))
    with pytest.raises(ValueError, match=DAMAGED):
        load_result(saved)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_small_file_cannot_claim_much_memory(saved, compression):
    """Zeros, compressed a thousandfold, are refused; as many bytes that are there are not."""

    def claim(meta):
        meta["arrays"]["global/0"] = ["float64", [10**6]]

    forged(saved, claim, lambda members: {**members, "global/0/c/0": bytes(8 * 10**6)}, compression)
    if compression == zipfile.ZIP_STORED:
        assert load_result(saved).global_params["lam"].shape == (10**6,)
        return
    assert saved.stat().st_size < 50_000
    with pytest.raises(ValueError, match=r"global/0 has \d{4} bytes instead of 8000000"):
        load_result(saved)


def test_one_piece_cannot_be_claimed_by_many(saved):
    """Entries of an archive may point to the same bytes: each is there, and all together are not."""
    small(state={str(i): np.zeros(1000) for i in range(20)}).save(saved)
    claimed = {f"state/{i}": (np.dtype(float), (1000,)) for i in range(20)}
    with zipfile.ZipFile(saved) as archive:
        result_file._check_sizes(archive, claimed, saved.stat().st_size)
        with pytest.raises(ValueError, match="its arrays claim 160000 bytes, the file has 9000"):
            result_file._check_sizes(archive, claimed, 9000)


def test_deep_nesting_is_refused(saved):
    def nest(members):
        deep = "[" * 100_000 + "]" * 100_000
        return {**members, "zarr.json": json.dumps({"attributes": {"pdvi": deep}}).encode()}

    forged(saved, members=nest)
    with pytest.raises(ValueError, match=DAMAGED):
        load_result(saved)


def write_format_1(path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Duplicate name")
        with ZipStore(path, mode="w") as store:
            group = zarr.create_group(store, attributes={"pdvi": json.dumps({"format": 1, "blocks": ["lam"]})})
            group.create_array("global/0", data=np.ones(3), compressors=None)


def test_other_formats_are_named(saved, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(result_file, "FORMAT", 31)
        small().save(saved)
    with pytest.raises(ValueError, match="has format 31, written by a newer pdvi, this version reads 2"):
        load_result(saved)
    write_format_1(saved)
    with pytest.raises(ValueError, match="has format 1, written by an older pdvi, this version reads 2; run it again"):
        load_result(saved)


def test_zarr_reads_the_same_numbers(saved):
    """The file is a zarr group, to which zarr itself is the judge."""
    with ZipStore(saved, mode="r") as store:
        group = zarr.open_group(store, mode="r")
        found = {f"{part}/{name}": array[...] for part, sub in group.groups() for name, array in sub.arrays()}
    result = small()
    expected = {"global/0": result.global_params["lam"], "global/1": result.global_params["m/n"]}
    expected |= {"local/0": result.local_params["phi"][0], "local/1": result.local_params["phi"][1][0]}
    expected |= {f"state/{i}": value for i, value in enumerate(result.state.values())}
    expected |= {f"trace/{i}": result.trace[name].to_numpy() for i, name in enumerate(("step", "objective"))}
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


@pytest.mark.parametrize("kind", result_file.TYPES)
def test_every_type_is_kept_and_known_to_zarr(saved, kind):
    values = np.array([[0, 1], [1, 0]]).astype(kind)
    small(state={"plain": values, "turned": values.T, "other": values.astype(values.dtype.newbyteorder(">"))}).save(
        saved
    )
    loaded = load_result(saved).state
    with ZipStore(saved, mode="r") as store:
        kept = np.asarray(zarr.open_group(store, mode="r")["state/1"][...])
    np.testing.assert_array_equal(kept, values.T, strict=True)
    for name in ("plain", "turned", "other"):
        np.testing.assert_array_equal(loaded[name], values.T if name == "turned" else values, strict=True)
        loaded[name][0, 0] = 1  # ours, to be changed


def test_the_same_result_is_the_same_file(saved, tmp_path):
    small().save(tmp_path / "again")
    assert saved.read_bytes() == (tmp_path / "again").read_bytes()


def test_what_cannot_be_kept_is_named(tmp_path):
    with pytest.raises(ValueError, match="arrays must be of numbers to be saved, got one of object in 'state'"):
        small(state={"a": np.array([print])}).save(tmp_path / "run")
    with pytest.raises(ValueError, match=r"described by JSON to be saved \(Object of type set"):
        small(solver={"a": {1}}).save(tmp_path / "run")
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_read_is_named(saved, monkeypatch):
    def refuse(*arguments, **settings):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(io, "open", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ValueError, match="Permission denied"):
        load_result(saved)


def test_a_fifo_is_no_result(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileNotFoundError, match="no result file at"):
        load_result(tmp_path / "fifo")
    with pytest.raises(ValueError, match="it is a fifo; give a file name"):
        small().save(tmp_path / "fifo")
