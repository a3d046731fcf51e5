"""The command line: what it writes, what it says, and one clear line for each thing that is wrong."""

import io
import json
import os
import subprocess
import sys
import warnings

import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
from matplotlib.image import imread

import pdvi
from pdvi._anndata import lazy
from pdvi._anndata import read as files
from pdvi._base import atomic as paths
from pdvi._base import console
from pdvi.cli.app import main
from pdvi.pl import figures


def run(*arguments):
    """The exit code of a command, in this process."""
    with pytest.raises(SystemExit) as done:
        main([str(argument) for argument in arguments])
    return done.value.code


@pytest.fixture(scope="module")
def slide(tmp_path_factory):
    path = tmp_path_factory.mktemp("slides") / "slide.h5ad"
    pdvi.datasets.tissue(400, n_genes=40, n_domains=4, n_samples=2, seed=0).write_h5ad(path)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "pdvi", "info"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for name in ("pdvi", "jax", "anndata", "devices", "cache"):
        assert f"\n{name} " in f"\n{done.stdout}"


def test_the_demo_prints_a_table_and_writes_figures(folder, capsys):
    assert run("demo", "--n-spots", 500, "--n-domains", 3, "--out", "figures/here") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for text in ("k-means on principal components", "pdvi, second call", "ARI", "seconds", "Written to figures/here"):
        assert text in printed.out
    drawn = sorted(path.name for path in (folder / "figures" / "here").iterdir())
    assert drawn == ["entropy.png", "map.png", "overview.png", "report.html", "trace.png", "truth.png"]
    assert (imread(folder / "figures/here/map.png")[..., :3].std(axis=(0, 1)) > 0.1).any()


def test_domains_of_a_slide(slide, folder, capsys):
    command = ("domains", slide, "-o", "out.h5ad", "--n-domains", 3, "--sample-key", "sample")
    command = (*command, "--plot", "map.png", "--report", "report.html")
    assert run(*command) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "finding 3 domains in 400 spots" in printed.out
    assert "note: made what was missing" in printed.out
    assert all(line.startswith("[") for line in printed.out.splitlines())
    assert sorted(path.name for path in folder.iterdir()) == ["map.png", "out.h5ad", "report.html"]
    assert "<h1>slide.h5ad</h1>" in (folder / "report.html").read_text()
    found, before = ad.read_h5ad("out.h5ad"), ad.read_h5ad(slide)
    assert found.obs["domain"].nunique() <= 3
    assert (found.X != before.X).nnz == 0
    assert found.uns["domain"]["params"]["n_domains"] == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scanpy's own
        sc.pl.embedding(found, basis="spatial", color="domain", show=False)
    pdvi.pl.trace(found)
    plt.close("all")
    assert run(*command, "--quiet") == 0
    printed = capsys.readouterr()
    assert printed.out == printed.err == ""
    assert ad.read_h5ad("out.h5ad").obs["domain"].equals(found.obs["domain"])


def test_a_failure_at_the_end_leaves_nothing(slide, folder, capsys, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    def found(adata, n_domains, **options):
        adata.obs["domain"] = adata.obs["truth"]
        adata.uns["domain"] = {"status": "CONVERGED", "elbo": 0.0}

    monkeypatch.setattr(pdvi.tl, "domains", found)
    monkeypatch.setattr(figures, "write_figure", full)
    assert run("domains", slide, "-o", "out.h5ad", "--n-domains", 3, "--plot", "map.png") == 1
    assert capsys.readouterr().err == "pdvi: [Errno 28] No space left on device\n"
    assert os.listdir(folder) == []
    plt.close("all")


@pytest.mark.slow
def test_names_layers_and_strength_are_as_asked(slide, folder, capsys):
    """Counts in a layer and coordinates under another name, beside others that would not do."""
    adata = ad.read_h5ad(slide)
    adata.layers["counts"], adata.obsm["places"] = adata.X.copy(), adata.obsm.pop("spatial")
    adata.X = np.full(adata.shape, 5.0, np.float32)
    adata.obsm["X_neighborhood"] = np.zeros((adata.n_obs, 2), np.float32)
    adata.write_h5ad("moved.h5ad")
    options = ("--layer", "counts", "--spatial-key", "places", "--sample-key", "sample", "--key-added", "layers")
    assert run("domains", "moved.h5ad", "-o", "out.h5ad", "--n-domains", 4, *options, "--beta", 0.5, "-v") == 0
    printed = capsys.readouterr().out
    assert "beta=0.5" in printed
    assert "seconds: missing" in printed
    found = ad.read_h5ad("out.h5ad")
    assert found.uns["layers"]["params"]["beta"] == 0.5
    expected = pdvi.pp.prepare(ad.read_h5ad(slide), copy=True).obsm["X_pca"]
    np.testing.assert_allclose(found.obsm["X_pca"], expected, rtol=1e-4, atol=1e-4)
    assert found.obsm["X_neighborhood"].any()
    assert run("report", "out.h5ad", "-o", "r.html", "--key", "layers", "--spatial-key", "places", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"written": ["r.html"], "n_spots": 400, "bytes": (folder / "r.html").stat().st_size}
    assert "<h1>out.h5ad</h1>" in (folder / "r.html").read_text()


def test_choose_recommends_what_the_function_does(slide, folder, capsys):
    command = ("choose", slide, "--from", 2, "--to", 3, "--sample-key", "sample")
    assert run(*command, "--plot", "scores.png", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["n_domains"] == [2, 3]
    assert told["recommended"] == told["n_domains"][int(np.argmax(told["held_out"]))]
    assert imread(folder / "scores.png").std() > 0
    assert run(*command) == 0
    printed = capsys.readouterr().out
    assert "held out" in printed
    assert printed.endswith(f"recommended: {told['recommended']}\n")


@pytest.mark.slow
def test_machines_get_json(slide, folder, capsys):
    assert run("domains", slide, "-o", "out.h5ad", "--n-domains", 3, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    found = ad.read_h5ad("out.h5ad")
    assert told["written"] == ["out.h5ad"]
    assert told["domains"] == found.obs["domain"].value_counts(sort=False).to_dict()
    assert told["elbo"] == found.uns["domain"]["elbo"]
    assert run("info", "--json") == 0
    assert json.loads(capsys.readouterr().out)["pdvi"] == pdvi.__version__


@pytest.mark.parametrize(("typed", "offered"), [("pdvi dom", "domains"), ("pdvi domains --sam", "--sample-key")])
def test_a_shell_completes(typed, offered):
    environment = {**os.environ, "_PDVI_COMPLETE": "complete_bash", "COMP_WORDS": typed}
    environment["COMP_CWORD"] = str(len(typed.split()) - 1)
    done = subprocess.run([sys.executable, "-m", "pdvi"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == [offered]


def test_simulate_writes_a_slide(folder, capsys):
    assert run("simulate", "tissue.h5ad", "--n-spots", 300, "--n-genes", 20, "--n-domains", 5, "--seed", 3) == 0
    assert "simulating 300 spots" in capsys.readouterr().out
    written = ad.read_h5ad("tissue.h5ad")
    same = pdvi.datasets.tissue(300, n_genes=20, n_domains=5, seed=3)
    assert (written.X != same.X).nnz == 0
    assert run("simulate", "features.h5ad", "--n-spots", 300, "--n-domains", 5, "--features", 4, "--quiet") == 0
    assert capsys.readouterr().out == ""
    assert ad.read_h5ad("features.h5ad").obsm["X_pca"].shape == (300, 4)


def changed(slide, change):
    adata = ad.read_h5ad(slide)
    return change(adata) or adata


def without_coordinates(adata):
    del adata.obsm["spatial"]


def with_nan(adata):
    adata.obsm["spatial"][3] = np.nan


def without_counts(adata):
    adata.X = None


def with_text(adata):
    adata.X = np.full(adata.shape, "many")


def with_twins(adata):
    adata.var.index = pd.Index([*adata.var_names[:-1], adata.var_names[0]])


WRONG_SLIDES = {
    "no coordinates": (
        without_coordinates,
        "'spatial' not in adata.obsm (it has []); put the spots' coordinates there.",
    ),
    "NaN": (with_nan, "adata.obsm['spatial'] must be finite: 1 of 400 spots are not; remove these spots."),
    "no counts": (without_counts, "adata.X is empty; put counts there, or name the layer that has them."),
    "text": (with_text, "adata.X must hold numbers, got dtype object."),
    "twins": (with_twins, "gene names must be unique, but 'gene1' is there twice; call adata.var_names_make_unique()."),
    "one spot": (lambda adata: adata[:1].copy(), "a slide must have at least 2 spots, got 1."),
    "no genes": (lambda adata: adata[:, :0].copy(), "adata must have at least one gene, got 0."),
}


@pytest.mark.filterwarnings("ignore:Variable names are not unique")
@pytest.mark.parametrize("name", WRONG_SLIDES)
def test_a_wrong_slide_is_one_line(name, slide, folder, capsys):
    change, message = WRONG_SLIDES[name]
    changed(slide, change).write_h5ad("wrong.h5ad")
    assert run("domains", "wrong.h5ad", "-o", "out.h5ad", "--n-domains", 3, "--plot", "map.png") == 1
    assert capsys.readouterr().err == f"pdvi: 'wrong.h5ad': {message}\n"
    assert os.listdir(folder) == ["wrong.h5ad"]


def truncated(slide):
    return slide.read_bytes()[:20_000]


def headless(slide):
    return b"spot,gene\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no file at 'wrong.h5ad'; give the path of an h5ad file."),
        (truncated, "'wrong.h5ad' is not an h5ad file, or it is damaged or truncated ("),
        (headless, "'wrong.h5ad' is not an h5ad file; write one with adata.write_h5ad(path)."),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(content, message, slide, folder, capsys):
    if content is not None:
        (folder / "wrong.h5ad").write_bytes(content(slide))
    assert run("domains", "wrong.h5ad", "-o", "out.h5ad", "--n-domains", 3) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"pdvi: {message}")
    assert printed.count("\n") == 1
    assert not (folder / "out.h5ad").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "no/out.h5ad"], "cannot write 'no/out.h5ad': the folder 'no' does not exist; create it first."),
        (["-o", "."], "cannot write '.': it is a directory; give a file name."),
        (["-o", "out.h5ad", "--plot", "no/a.png"], "cannot write 'no/a.png': the folder 'no' does not exist"),
        (["-o", "out.h5ad", "--report", "no/a.html"], "cannot write 'no/a.html': the folder 'no' does not exist"),
        (["-o", "out.h5ad", "--plot", "a.doc"], "cannot draw 'a.doc': the ending must be one of "),
        (["-o", "out.h5ad", "--sample-key", "no"], "'slide.h5ad': 'no' not in adata.obs"),
        (["-o", "out.h5ad", "--n-domains", "500"], "'slide.h5ad': `n_domains` must be between 2 and"),
        (["-o", "out.h5ad", "--layer", "no"], "'slide.h5ad': 'no' not in adata.layers"),
        (["-o", "out.h5ad", "--spatial-key", "no"], "'slide.h5ad': 'no' not in adata.obsm"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, message, slide, folder, capsys):
    (folder / "slide.h5ad").write_bytes(slide.read_bytes())
    assert run("domains", "slide.h5ad", "--n-domains", 3, *arguments) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"pdvi: {message}")
    assert printed.count("\n") == 1
    assert os.listdir(folder) == ["slide.h5ad"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["domains", "slide.h5ad", "--n-domains", "3"], "Missing option"),
        (["domains", "slide.h5ad", "-o", "out.h5ad", "--n-domains", "x"], "Invalid value for '--n-domains'"),
        (["domains", "slide.h5ad", "-o", "out.h5ad", "--n-domains", "3", "--loud"], "No such option: --loud"),
        (["domains", "slide.h5ad", "-o", "out.h5ad", "--n-domains", "1"], "Invalid value for '--n-domains'"),
        (["domains", "no.h5ad", "-o", "out.h5ad", "--n-domains", "3", "--beta", "-1"], "Invalid value for '--beta'"),
        (["domains", "no.h5ad", "-o", "out.h5ad", "--n-domains", "3", "--seed", "-1"], "Invalid value for '--seed'"),
        (["choose", "no.h5ad", "--from", "5", "--to", "4"], "Invalid value: `--to` must be at least `--from`"),
        (["simulate"], "Missing argument"),
        (["reproduce", "nothing"], "Invalid value for"),
        (["dance"], "No such command 'dance'. See pdvi --help."),
        (["--dance"], "No such option: --dance"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, message, folder, capsys):
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"pdvi: {message}")
    assert printed.err.endswith("See pdvi --help.\n")
    assert printed.err.count("\n") == 1
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("option", "printed"), [("--help", "Find the spatial domains"), ("--version", f"pdvi {pdvi.__version__}\n")]
)
def test_help_and_version_import_nothing_that_takes_long(option, printed):
    command = [sys.executable, "-X", "importtime", "-m", "pdvi", option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
    seen = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "pdvi.cli.app" in seen
    for name in ("jax", "numpy", "scipy", "pandas", "anndata", "scanpy", "sklearn", "matplotlib"):
        assert name not in seen


def test_a_place_that_cannot_be_written_is_found_before_any_work(slide, folder, capsys, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(paths, "create", refuse)
    monkeypatch.setattr(files, "read_slide", None)  # not reached
    assert run("domains", slide, "-o", "out.h5ad", "--n-domains", 3) == 1
    assert capsys.readouterr().err == "pdvi: cannot write 'out.h5ad': Permission denied; choose another place.\n"


def test_nothing_half_written_stays(folder):
    (folder / "old.txt").write_text("old")

    def interrupted():
        with paths.replacing("old.txt") as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (folder / "old.txt").read_text() == "old"
    assert os.listdir(folder) == ["old.txt"]


def test_a_traceback_only_with_debug(folder, capsys):
    assert run("simulate", "a.h5ad", "--n-spots", 3) == 1
    assert capsys.readouterr().err == "pdvi: `n_spots` must be at least 50 for each of 1 sample(s), got 3.\n"
    for arguments in (
        ("--debug", "simulate", "a.h5ad", "--n-spots", "3"),
        ("simulate", "a.h5ad", "--n-spots", "3", "--debug"),
    ):
        with pytest.raises(ValueError, match="`n_spots` must be at least 50"):
            main(arguments)
    assert not os.listdir(folder)


def test_the_unexpected_says_so(folder, capsys, monkeypatch):
    monkeypatch.setattr(lazy, "check_output", lambda path: {}["boo"])
    assert run("simulate", "a.h5ad") == 1
    assert capsys.readouterr().err == (
        "pdvi: unexpected KeyError: 'boo'; run again with --debug and report what it prints.\n"
    )
    monkeypatch.setattr(lazy, "check_output", lambda path: np.empty(10**15))
    assert run("simulate", "a.h5ad") == 1
    assert capsys.readouterr().err == "pdvi: not enough memory; use fewer spots or genes.\n"


def test_commands_and_help(folder, capsys):
    assert run() == 0
    assert "domains" in capsys.readouterr().out
    assert run("domains", "--help") == 0
    capsys.readouterr()
    (folder / "taken").touch()
    assert run("demo", "--out", "taken") == 1
    assert "it is a file; give a folder with --out" in capsys.readouterr().err


def test_progress_is_silent_when_quiet(capfd):
    with console.progress(quiet=True) as say:
        say("something")
        warnings.warn("something", stacklevel=1)
        assert not sys.stderr.isatty()
    with console.progress() as say:
        warnings.warn("careful", stacklevel=1)
        warnings.warn("libraries", FutureWarning, stacklevel=1)
    out, err = capfd.readouterr()
    assert err == ""
    assert out.endswith("note: careful\n")
    assert out.count("\n") == 1


def test_a_bar_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with console.progress() as say:
        say("first [thing]")
        assert not sys.stderr.isatty()
    assert "first [thing]" in sys.stdout.getvalue()
    assert "━" in sys.stdout.getvalue()
