"""The command line: exit code 0, or 1 with one line that names the cause and the remedy."""

import subprocess
import sys

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from pdvi.cli import main


@pytest.fixture(scope="module")
def slide(tmp_path_factory):
    """A small simulated slide in a file."""
    path = tmp_path_factory.mktemp("slides") / "slide.h5ad"
    assert command("simulate", path, "--n-spots", 600, "--n-genes", 40, "--n-domains", 4, "--quiet") == 0
    return path


def command(*arguments):
    """The exit code of a command run in this process."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as done:
        return done.code or 0
    return 0


def failing_line(capsys, *arguments):
    assert command(*arguments) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines, "nothing was said"
    return lines[-1]


def test_domains_are_written_and_drawn(slide, tmp_path):
    out, plot = tmp_path / "out.h5ad", tmp_path / "map.png"
    assert command("domains", slide, "-o", out, "--n-domains", 4, "--plot", plot, "--quiet") == 0
    found = ad.read_h5ad(out)
    assert found.obs["domain"].dtype == "category"
    assert found.obsm["domain_probability"].shape == (600, 4)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["map.png", "out.h5ad"]


def test_quiet_says_nothing(slide, tmp_path, capsys):
    assert command("simulate", tmp_path / "again.h5ad", "--n-spots", 500, "--n-genes", 20, "--quiet") == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def test_info_names_versions(capsys):
    assert command("info") == 0
    assert "jax" in capsys.readouterr().out


def changed(slide, path, change):
    adata = ad.read_h5ad(slide)
    adata = change(adata) or adata
    adata.write_h5ad(path)
    return path


def _no_coordinates(adata):
    del adata.obsm["spatial"]


def _nan_coordinates(adata):
    adata.obsm["spatial"] = np.where(np.arange(600)[:, None] == 3, np.nan, adata.obsm["spatial"])


def _no_counts(adata):
    adata.X = sp.csr_matrix(adata.shape, dtype=np.float32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_no_coordinates, "'spatial' not in adata.obsm"),
        (_nan_coordinates, "must be finite: 1 of 600 spots are not; remove these spots"),
        (_no_counts, "at least one value that is not 0"),
        (lambda adata: adata[:1].copy(), "at least 2 spots, got 1"),
        (lambda adata: adata[:, :0].copy(), "at least one gene, got 0"),
    ],
)
def test_wrong_slides_are_named_and_nothing_is_written(slide, tmp_path, capsys, change, words):
    wrong, out = changed(slide, tmp_path / "wrong.h5ad", change), tmp_path / "out.h5ad"
    assert words in failing_line(capsys, "domains", wrong, "-o", out, "--n-domains", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.h5ad"]


def test_wrong_files_are_named(slide, tmp_path, capsys):
    out = tmp_path / "out.h5ad"
    assert "no file at" in failing_line(capsys, "domains", tmp_path / "none.h5ad", "-o", out, "--n-domains", 3)
    text = tmp_path / "text.h5ad"
    text.write_text("not a slide")
    assert "is not an h5ad file" in failing_line(capsys, "domains", text, "-o", out, "--n-domains", 3)
    cut = tmp_path / "cut.h5ad"
    cut.write_bytes(slide.read_bytes()[:20_000])
    assert "is not an h5ad file" in failing_line(capsys, "domains", cut, "-o", out, "--n-domains", 3)
    line = failing_line(capsys, "domains", slide, "-o", tmp_path / "nowhere" / "out.h5ad", "--n-domains", 3)
    assert "does not exist; create it first" in line
    assert not out.exists()


def test_a_traceback_only_with_debug(tmp_path):
    """In a process of its own, as a user runs it."""
    arguments = [sys.executable, "-m", "pdvi", "domains", "none.h5ad", "-o", "out.h5ad", "--n-domains", "3"]
    plain = subprocess.run(arguments, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert plain.returncode == 1
    assert "Traceback" not in plain.stderr
    debug = subprocess.run([*arguments, "--debug"], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert "Traceback" in debug.stderr


def test_the_demo_prints_a_table_and_draws(tmp_path, capsys):
    assert command("demo", "--n-spots", 1_500, "--n-domains", 5, "--out", tmp_path / "demo") == 0
    printed = capsys.readouterr().out
    assert "k-means" in printed
    assert "pdvi" in printed
    assert {"map.png", "truth.png", "entropy.png", "trace.png"} <= {p.name for p in (tmp_path / "demo").iterdir()}
