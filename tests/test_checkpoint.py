"""Keeping a run never ends it, and whoever reads a checkpoint finds a whole one."""

import os
import stat
import subprocess
import sys
import zipfile

import pytest

import pdvi
from pdvi import Result, load_result
from pdvi.run.checkpoint import Checkpoint, Keeper
from test_fit import SOLVER, problem
from test_result_file import small, spelled


def fit(**settings):
    return pdvi.fit(problem(), SOLVER, **{"batch_size": 3, "max_epochs": 3, "tol": 0, **settings})


def make_device(path):
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # another null device, ours to lose
    except OSError:
        pytest.skip("may not make devices")


@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "fifo"), (make_device, "device"), (os.mkdir, "directory")])
def test_a_place_that_is_no_file_is_refused_before_any_work(tmp_path, make, kind):
    path = tmp_path / "place"
    make(path)
    before = os.lstat(path)
    steps = []
    with pytest.raises(ValueError, match=f"it is a {kind}; give a file name"):
        fit(checkpoint=path, callbacks=[steps.append])
    after = os.lstat(path)
    assert (before.st_ino, before.st_mode, before.st_rdev) == (after.st_ino, after.st_mode, after.st_rdev)
    assert not steps
    assert os.listdir(tmp_path) == ["place"]


@pytest.mark.parametrize("wrong", [5, ["a"], b"run"])
def test_a_checkpoint_is_a_path(wrong):
    with pytest.raises(TypeError, match="`checkpoint` must be a path, or a Checkpoint, got"):
        Keeper(wrong)


@pytest.mark.parametrize("wrong", [-1, float("nan")])
def test_seconds_are_not_negative(tmp_path, wrong):
    with pytest.raises(ValueError, match="`every_seconds` must be at least 0"):
        Keeper(Checkpoint(tmp_path / "run", wrong))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (zipfile.BadZipFile("File is not a zip file"), "BadZipFile: File is not a zip file"),
        (ValueError("its checksum does not match"), "ValueError: its checksum does not match"),
        (MemoryError(), "MemoryError"),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_a_checkpoint_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, error, told, before):
    path = tmp_path / "run"
    if before:
        small().save(path)

    def refuse(self, path):
        raise error

    monkeypatch.setattr(Result, "save", refuse)
    kept = "the one before is kept" if before else "there is none yet"
    with pytest.warns(pdvi.CheckpointWarning, match=f"cannot write the checkpoint '.*': {told}.*; {kept}, and the run"):
        Keeper(path).now(small())
    assert os.listdir(tmp_path) == (["run"] if before else [])
    if before:
        assert spelled(load_result(path)) == spelled(small())


def test_a_run_survives_the_loss_of_its_place(tmp_path):
    """The folder goes, and a fifo comes where the checkpoint was: neither is worth the run."""
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "run"

    def disturb(progress):
        if progress.record["step"] == 4:
            path.unlink()
            os.mkfifo(path)
        if progress.record["step"] == 8:
            path.unlink()
            folder.rmdir()

    with pytest.warns(pdvi.CheckpointWarning) as told:
        result = fit(checkpoint=Checkpoint(path, every_seconds=0), callbacks=[disturb])
    assert result.n_steps == 12
    messages = [str(warning.message) for warning in told if warning.category is pdvi.CheckpointWarning]
    assert ["it is a fifo" in message for message in messages] == [True, False, False]
    assert ["does not exist" in message for message in messages] == [False, True, True]


WRITER = """
import sys
import numpy as np
import pandas as pd
from pdvi import Result, Status
from pdvi.run.checkpoint import Checkpoint, Keeper

number = int(sys.argv[2])
trace = pd.DataFrame({"step": [0], "objective": [1.0], "event": [""]})
result = Result({"lam": np.full(20_000, number)}, np.full(20_000, number), trace, Status.RUNNING, number, 0, 1, "")
keeper = Keeper(Checkpoint(sys.argv[1], 0))
keeper.now(result)
print("kept", flush=True)
while True:
    keeper.now(result)
"""


def test_two_processes_that_keep_one_checkpoint_never_show_half_of_it(tmp_path):
    path = tmp_path / "run"
    writers = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", WRITER, str(path), str(number)], stdout=subprocess.PIPE)
        for number in (1, 2)
    ]
    try:
        for writer in writers:
            assert writer.stdout.readline() == b"kept\n"
        seen = []
        while len(seen) < 50 or (len(set(seen)) < 2 and len(seen) < 1000):
            result = load_result(path)  # a damaged one raises
            assert (result.local_params == result.n_steps).all()
            seen.append(result.n_steps)
        assert set(seen) == {1, 2}
        assert all(writer.poll() is None for writer in writers)  # neither had a warning, which is an error there
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            writer.stdout.close()
    small().save(path)
    assert os.listdir(tmp_path) == ["run"]
