"""Files and folders are written whole or not at all, and only where a regular file may be."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time

import pytest

from pdvi._base.atomic import check_path, check_writable, replacing
from pdvi._base.atomic_folder import begin_folder, set_aside, settle_folder
from pdvi._base.temporary import find, fresh_name

DEAD = 999_999_999  # no system has a process of this number


def write(path, text):
    with replacing(path) as temporary:
        temporary.write_text(text)


def abandoned_name(target, suffix=""):
    """The name that a process had which no longer exists."""
    name = fresh_name(target, suffix=suffix).name
    return target.with_name(name.replace(f"-{os.getpid()}-", f"-{DEAD}-"))


def make_fifo(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # such names must be short


def make_device(path):
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # another null device, ours to lose
    except OSError:
        pytest.skip("may not make devices")


MAKERS = {"a fifo": make_fifo, "a socket": make_socket, "a device": make_device, "a directory": os.mkdir}


@pytest.mark.parametrize("through_link", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_only_regular_files_are_replaced(tmp_path, monkeypatch, kind, through_link):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "place"
    MAKERS[kind](path)
    before = os.lstat(path)
    if through_link:
        path = tmp_path / "link"
        path.symlink_to("place")
    names = sorted(os.listdir(tmp_path))
    for function in (check_path, check_writable, lambda path: write(path, "text")):
        with pytest.raises(ValueError, match=rf"cannot write '.*': it is {kind}; give a file name"):
            function(path)
    after = os.lstat(tmp_path / "place")
    assert (before.st_ino, before.st_mode, before.st_mtime_ns) == (after.st_ino, after.st_mode, after.st_mtime_ns)
    assert sorted(os.listdir(tmp_path)) == names


def test_what_becomes_a_fifo_meanwhile_is_not_replaced(tmp_path):
    path = tmp_path / "place"
    with pytest.raises(ValueError, match="it is a fifo"), replacing(path):
        os.mkfifo(path)
    assert stat.S_ISFIFO(os.lstat(path).st_mode)
    assert os.listdir(tmp_path) == ["place"]


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "far").mkdir()
    target, link, chain = tmp_path / "far" / "data.txt", tmp_path / "link.txt", tmp_path / "chain.txt"
    target.write_text("old")
    link.symlink_to("far/data.txt")
    chain.symlink_to("link.txt")
    write(chain, "new")
    assert link.is_symlink()
    assert chain.is_symlink()
    assert target.read_text() == "new"
    assert os.listdir(tmp_path / "far") == ["data.txt"]
    assert sorted(os.listdir(tmp_path)) == ["chain.txt", "far", "link.txt"]


def test_a_link_to_nothing_gets_its_target(tmp_path):
    (tmp_path / "link").symlink_to("target")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"
    (tmp_path / "lost").symlink_to("nowhere/target")
    with pytest.raises(ValueError, match=r"the folder '.*nowhere' does not exist; create it first"):
        write(tmp_path / "lost", "new")


def test_links_in_a_circle_are_named(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ValueError, match=r"cannot write '.*a': Too many levels of symbolic links; choose another"):
        check_path(tmp_path / "a")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o666])
def test_a_replaced_file_keeps_its_mode(tmp_path, mode):
    path = tmp_path / "data.txt"
    path.write_text("old")
    path.chmod(mode)
    with replacing(path) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600  # nobody reads earlier what is not for all
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_usual_mode(tmp_path):
    (tmp_path / "usual").write_text("")
    write(tmp_path / "new", "")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_temporary_names_are_unique_and_tell_the_format(tmp_path):
    with replacing(tmp_path / "map.png") as one, replacing(tmp_path / "map.png") as two:
        assert one != two
        assert one.parent == two.parent == tmp_path
        assert one.suffix == two.suffix == ".png"
        for name in (one, two):
            assert name.is_file()  # the entry is taken: nothing can be planted there
        two.write_text("two")
        one.write_text("one")
    assert (tmp_path / "map.png").read_text() == "one"  # left last
    assert os.listdir(tmp_path) == ["map.png"]


@pytest.mark.parametrize("name", ["é" * 120, "x" * 255, "a." + "b" * 200])
def test_long_names_can_be_replaced(tmp_path, name):
    write(tmp_path / name, "text")
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "data.txt"
    path.write_text("old")

    def fail():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["data.txt"]


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_an_exchanged_temporary_file_does_not_get_the_name(tmp_path, link):
    victim, path = tmp_path / "victim", tmp_path / "data.txt"
    victim.write_text("mine")
    victim.chmod(0o600)
    path.write_text("old")
    path.chmod(0o666)

    def exchange():
        with replacing(path) as temporary:
            temporary.unlink()
            link(victim, temporary)

    with pytest.raises((OSError, ValueError), match=r"exchanged|symbolic links"):
        exchange()
    assert victim.read_text() == "mine"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600
    assert path.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["data.txt", "victim"]


def test_planted_links_are_not_followed(tmp_path):
    """Neither those of the old, guessable name, nor leftovers that are links: the link goes, its target stays."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    old, stale = tmp_path / ".tmp-data.txt", abandoned_name(tmp_path / "data.txt", ".txt")
    old.symlink_to(victim)
    stale.symlink_to(victim)
    write(tmp_path / "data.txt", "new")
    assert victim.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == [".tmp-data.txt", "data.txt", "victim"]


def test_leftovers_of_the_dead_are_removed_and_of_nobody_else(tmp_path):
    target = tmp_path / "data.txt"
    dead = abandoned_name(target, ".txt")
    reused = fresh_name(target, suffix=".txt")  # our number, but of a process that began at another time
    reused = reused.with_name(re.sub(rf"-{os.getpid()}-(\d+)-", rf"-{os.getpid()}-\g<1>1-", reused.name))
    alive = fresh_name(target, suffix=".txt")
    elsewhere = dead.with_name(re.sub(r"txt-[0-9a-f]{8}-", "txt-00000000-", dead.name))
    other = abandoned_name(tmp_path / "other.txt", ".txt")
    assert len({dead, reused, alive, elsewhere, other}) == 5
    for path in (dead, reused, alive, elsewhere, other):
        path.write_text("half")
    write(target, "new")
    kept = {alive, elsewhere, other, target}
    if not os.path.exists("/proc/self/stat"):
        kept.add(reused)  # nobody tells when processes began
    assert set(tmp_path.iterdir()) == kept


WRITER = """
import sys, time
from pdvi._base.atomic import replacing
with replacing(sys.argv[1]) as temporary:
    temporary.write_text("half")
    print("ready", flush=True)
    time.sleep(600)
"""


def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path):
    path = tmp_path / "data.txt"
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout.readline() == "ready\n"
        write(path, "while it lives")
        assert len(find(path, abandoned=False)) == 1
        assert find(path, abandoned=True) == []
        child.kill()
    assert child.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2
    write(path, "after its end")
    assert os.listdir(tmp_path) == ["data.txt"]
    assert path.read_text() == "after its end"


RIVAL = """
import sys
from pdvi._base.atomic import replacing
for number in range(int(sys.argv[3])):
    with replacing(sys.argv[1]) as temporary:
        with open(temporary, "w") as file:
            for _ in range(50):
                file.write(sys.argv[2] * 1000)
                file.flush()
"""


def test_rivals_end_with_one_whole_file(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("a" * 50_000)
    rivals = [subprocess.Popen([sys.executable, "-c", RIVAL, str(path), letter, "40"]) for letter in "ab"]
    seen = set()
    while any(rival.poll() is None for rival in rivals):
        seen.add(path.read_text())
        time.sleep(0.001)
    assert [rival.returncode for rival in rivals] == [0, 0]
    assert seen | {path.read_text()} <= {"a" * 50_000, "b" * 50_000}
    assert os.listdir(tmp_path) == ["data.txt"]


def filled(target, text):
    folder = begin_folder(target)
    (folder / "file").write_text(text)
    return folder


def test_a_folder_is_replaced_and_keeps_its_mode(tmp_path):
    target = tmp_path / "store"
    settle_folder(filled(target, "old"), target, replace=False)
    target.chmod(0o750)
    settle_folder(filled(target, "new"), target, replace=True)
    assert (target / "file").read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o750
    with pytest.raises(OSError, match="not empty"):
        settle_folder(filled(target, "third"), target, replace=False)
    assert (target / "file").read_text() == "new"


def test_a_folder_that_cannot_take_the_name_leaves_the_old_one(tmp_path, monkeypatch):
    target = tmp_path / "store"
    settle_folder(filled(target, "old"), target, replace=False)
    new, rename = filled(target, "new"), os.rename

    def refuse(source, destination):
        if source == new:
            raise KeyboardInterrupt
        rename(source, destination)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(KeyboardInterrupt):
        settle_folder(new, target, replace=True)
    assert (target / "file").read_text() == "old"
    assert set_aside(target) is None
