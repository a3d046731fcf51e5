"""Nothing of the user's is lost: outputs that are one file, outputs that are inputs, folders that are not ours."""

import os
import subprocess
import sys
import warnings

import anndata as ad
import numpy as np
import pytest

import pdvi
from pdvi._base.path_overlap import PathRole, check_no_overlap
from pdvi._base.work_dir import FILE_LIST, WorkDir
from pdvi.cli.app import main


def run(*arguments):
    with pytest.raises(SystemExit) as done:
        main([str(argument) for argument in arguments])
    return done.value.code


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("slides") / "slide.h5ad"
    pdvi.datasets.tissue(300, n_genes=30, n_domains=3, seed=0).write_h5ad(path)
    return path.read_bytes()


@pytest.fixture
def folder(tmp_path, monkeypatch, content):
    """A working directory with a slide."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slide.h5ad").write_bytes(content)
    return tmp_path


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def link(folder):
    (folder / "link.h5ad").symlink_to("slide.h5ad")


def hard_link(folder):
    os.link(folder / "slide.h5ad", folder / "link.h5ad")


def nothing(folder):
    pass


DOMAINS = ("domains", "slide.h5ad", "--n-domains", 3)


@pytest.mark.parametrize(
    ("prepare", "arguments", "message"),
    [
        (nothing, (*DOMAINS, "-o", "a.h5ad", "--report", "./a.h5ad"), "--output 'a.h5ad' is the same as --report"),
        (nothing, (*DOMAINS, "-o", "a.png", "--plot", "x/../a.png"), "--output 'a.png' is the same as --plot"),
        (nothing, (*DOMAINS, "-o", "a.h5ad", "--plot", "m.png", "--report", "m.png"), "--plot 'm.png' is the same as"),
        (nothing, (*DOMAINS, "-o", "a.h5ad", "--report", "slide.h5ad"), "the input 'slide.h5ad' is the same as"),
        (link, (*DOMAINS, "-o", "a.h5ad", "--report", "link.h5ad"), "the input 'slide.h5ad' is the same as --report"),
        (hard_link, (*DOMAINS, "-o", "a.h5ad", "--report", "link.h5ad"), "the input 'slide.h5ad' is the same as"),
        (nothing, (*DOMAINS, "-o", "a.h5ad", "--report", "a.h5ad.stages/r"), "the folder of intermediate files"),
        (nothing, (*DOMAINS, "-o", "a.zarr", "--report", "a.zarr/r.html"), "--output 'a.zarr' contains --report"),
        (nothing, ("report", "slide.h5ad", "-o", "slide.h5ad"), "the input 'slide.h5ad' is the same as --output"),
        (link, ("report", "link.h5ad", "-o", "slide.h5ad"), "the input 'link.h5ad' is the same as --output"),
        (hard_link, ("choose", "slide.h5ad", "--plot", "link.h5ad"), "the input 'slide.h5ad' is the same as --plot"),
    ],
)
def test_paths_that_overlap_are_refused_before_anything_is_read(folder, capsys, prepare, arguments, message):
    prepare(folder)
    before = files(folder)
    assert run(*arguments) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"pdvi: {message}")
    assert printed.err.count("\n") == 1
    assert "reading" not in printed.out
    assert files(folder) == before


def test_several_slides_are_not_written_onto_each_other(folder, capsys, content):
    (folder / "out").mkdir()
    (folder / "other.h5ad").write_bytes(content)
    (folder / "out" / "other.h5ad").symlink_to(folder / "slide.h5ad")
    before = files(folder)
    assert run("domains", "slide.h5ad", "other.h5ad", "--n-domains", 3, "-o", "out") == 1
    assert "the input 'slide.h5ad' is the same as --output 'out/other.h5ad'" in capsys.readouterr().err
    assert files(folder) == before


@pytest.mark.parametrize("output", ["slide.h5ad", "link.h5ad"])
def test_a_slide_may_take_its_own_place(folder, output):
    link(folder)
    assert run(*DOMAINS, "-o", output, "-q", "--report", "report.html") == 0
    assert "domain" in ad.read_h5ad("slide.h5ad").obs
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def with_files(folder):
    (folder / "out.h5ad.stages").mkdir()
    (folder / "out.h5ad.stages" / "my.array.npy").write_bytes(b"mine")


def linked(folder):
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "my.array.npy").write_bytes(b"mine")
    (folder / "out.h5ad.stages").symlink_to("elsewhere")


def linked_to_empty(folder):
    (folder / "elsewhere").mkdir()
    (folder / "out.h5ad.stages").symlink_to("elsewhere")


def a_file(folder):
    (folder / "out.h5ad.stages").write_bytes(b"mine")


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (with_files, "it is a folder with files that pdvi did not write"),
        (linked, "it is a link"),
        (linked_to_empty, "it is a link"),
        (a_file, "it is not a folder"),
    ],
)
def test_a_folder_that_is_not_ours_is_refused_before_anything_is_read(folder, capsys, prepare, why):
    prepare(folder)
    before = files(folder)
    assert run(*DOMAINS, "-o", "out.h5ad", "--memory-limit", "1MB") == 1
    printed = capsys.readouterr()
    assert printed.err == (
        f"pdvi: cannot keep intermediate files in 'out.h5ad.stages': {why}; "
        "move it elsewhere, or give another output.\n"
    )
    assert "reading" not in printed.out
    assert files(folder) == before


def test_an_empty_folder_is_taken_and_a_file_put_there_meanwhile_stays(tmp_path):
    (tmp_path / "work").mkdir()
    work = WorkDir(tmp_path / "work")
    work.new_file("ours").write_bytes(b"ours")
    work.new_file("store").mkdir()
    (tmp_path / "work" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes.txt' was not written by pdvi"):
        work.new_file("notes.txt")
    WorkDir(tmp_path / "work").remove_all()
    assert os.listdir(tmp_path / "work") == ["notes.txt"]


def test_a_folder_with_only_our_files_goes(tmp_path):
    work = WorkDir(tmp_path / "work")
    with work.lock():
        work.new_file("ours").write_bytes(b"ours")
    assert WorkDir(tmp_path / "work").names() == {"lock", "ours"}
    work.remove_all()
    assert not os.listdir(tmp_path)


def test_a_list_names_files_of_its_folder_only(tmp_path):
    (tmp_path / "victim").write_text("mine")
    work = WorkDir(tmp_path / "work")
    with open(work.path / FILE_LIST, "a") as file:
        file.write('"../victim"\n".."\n"."\n["victim"]\n"half')  # crafted, and cut off by a kill
    again = WorkDir(tmp_path / "work")
    assert again.names() == {"lock"}
    again.remove_all()
    assert (tmp_path / "victim").read_text() == "mine"


def test_the_target_of_a_link_on_the_list_stays(tmp_path):
    (tmp_path / "victim").write_text("mine")
    work = WorkDir(tmp_path / "work")
    work.file("ours").symlink_to(tmp_path / "victim")
    work.new_file("ours").write_bytes(b"ours")
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_name_is_on_the_list_before_its_file_exists(tmp_path):
    """A process that is killed at any moment leaves no file that the next one would not remove."""
    code = "import os, sys; from pdvi._base.work_dir import WorkDir; WorkDir(sys.argv[1]).file('new'); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "work")], check=False).returncode == 9
    assert "new" in WorkDir(tmp_path / "work").names()


def test_stages_in_python_follow_the_same_rule(folder):
    adata = ad.read_h5ad("slide.h5ad", backed="r")
    (folder / "mine").mkdir()
    (folder / "mine" / "my.array.npy").write_bytes(b"mine")
    with pytest.raises(ValueError, match="files that pdvi did not write"):
        pdvi.tl.domains(adata, 3, memory_limit="1MB", stages=folder / "mine")
    assert (folder / "mine" / "my.array.npy").read_bytes() == b"mine"


def test_a_zarr_folder_with_more_than_a_slide_is_not_replaced(folder, capsys):
    with warnings.catch_warnings(action="ignore"):
        ad.read_h5ad("slide.h5ad").write_zarr("out.zarr")
    (folder / "out.zarr" / "images").mkdir()
    (folder / "out.zarr" / "images" / "mine").write_bytes(b"mine")
    assert run(*DOMAINS, "-o", "out.zarr", "-q") == 1
    assert "it has 'images', which would be lost" in capsys.readouterr().err
    assert (folder / "out.zarr" / "images" / "mine").read_bytes() == b"mine"


def test_names_of_files_that_do_not_exist_yet_are_compared(tmp_path):
    roles = [PathRole("--a", tmp_path / "x" / ".." / "new", True), PathRole("--b", tmp_path / "new", True)]
    with pytest.raises(ValueError, match="is the same as"):
        check_no_overlap(roles)
    check_no_overlap([roles[0], PathRole("--b", tmp_path / "NEW", True), PathRole("--c", tmp_path / "new2")])
    check_no_overlap([PathRole("the input", tmp_path), PathRole("the input", tmp_path)])  # both are only read


def test_counts_are_not_changed_by_a_refusal(folder):
    before = ad.read_h5ad("slide.h5ad").X.toarray()
    assert run("report", "slide.h5ad", "-o", "slide.h5ad") == 1
    np.testing.assert_array_equal(ad.read_h5ad("slide.h5ad").X.toarray(), before)
