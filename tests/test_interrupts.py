"""Ctrl-C ends what is going on: no part of a fit passes for a whole one, no command leaves half of its files."""

import importlib

import numpy as np
import pytest

import pdvi
from pdvi.cli import main
from pdvi.executors import Memory

ROWS = np.concatenate([np.zeros((20, 2)), np.ones((20, 2))]) + np.random.default_rng(0).normal(size=(40, 2)) / 9


@pytest.fixture
def interrupted_runs(monkeypatch):
    """Every run is interrupted at its third log point, when there is something to return."""
    calls = []
    steps = Memory.run_to_stop

    def run(self, *arguments):
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return steps(self, *arguments)

    monkeypatch.setattr(Memory, "run_to_stop", run)
    monkeypatch.setattr(importlib.import_module("pdvi.run.fit"), "MAX_ROWS", 1)


def test_a_fit_returns_what_it_has(interrupted_runs):
    problem = pdvi.datasets.quadratic(n=6, condition=5, seed=0)
    assert pdvi.fit(problem, pdvi.P2DVI(), batch_size=2).status is pdvi.Status.INTERRUPTED


def test_a_mixture_is_left(interrupted_runs):
    with pytest.raises(KeyboardInterrupt):
        pdvi.GaussianMixture(2, random_state=0).fit(ROWS)


def test_a_command_ends_with_130_and_no_file(tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    pdvi.datasets.tissue(n_spots=60, n_genes=10, n_domains=2, seed=0).write_h5ad(tmp_path / "slide.h5ad")
    monkeypatch.setattr(pdvi.tl, "domains", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["domains", str(tmp_path / "slide.h5ad"), "-o", str(tmp_path / "out.h5ad"), "--n-domains", "2", "--quiet"])
    assert ended.value.code == 130
    assert capsys.readouterr().err.strip() == "pdvi: interrupted."
    assert [path.name for path in tmp_path.iterdir()] == ["slide.h5ad"]
