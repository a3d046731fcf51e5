"""What a newcomer does first, with nothing but what the wheel brings: no other file of the tests is needed."""

import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest

import pdvi


def run(*arguments):
    command = [sys.executable, "-m", "pdvi", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)  # a process that waits for ever fails
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_slide_from_counts_to_a_report(tmp_path):
    run("simulate", tmp_path / "slide.h5ad", "--n-spots", 600, "--n-genes", 60, "--n-domains", 4)
    found = ("--plot", tmp_path / "map.png", "--report", tmp_path / "report.html")
    printed = run("domains", tmp_path / "slide.h5ad", "-o", tmp_path / "out.h5ad", "--n-domains", 4, *found)
    assert "CONVERGED" in printed
    assert (tmp_path / "map.png").stat().st_size > 1_000
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert 'id="tissue"' in text
    assert "putImageData" in text  # the page's program is in the wheel


def test_the_five_lines_of_the_readme():
    problem = pdvi.datasets.quadratic(n=200, dim_local=2, dim_global=3, condition=10, seed=0)
    result = pdvi.fit(problem, pdvi.P2DVI(), batch_size=20, max_epochs=5, seed=0)
    assert result.objective < result.trace["objective"].iloc[0]


def test_the_package_says_what_it_is():
    told = metadata("pdvi")
    assert told["Version"] == pdvi.__version__
    assert told["License-Expression"] == "BSD-3-Clause"
    assert (Path(pdvi.__file__).parent / "py.typed").is_file()
