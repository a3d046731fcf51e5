"""The paper's experiments at toy size: what is written, that runs resume, that tables repeat, what is refused."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import anndata as ad
import jax
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from matplotlib.image import imread

import pdvi
from pdvi import reproduce
from pdvi.cli.app import main
from pdvi.reproduce import embryo, figures, maps, mixture, provenance, quadratic, runs, slide
from pdvi.reproduce.claims import FAILS, HOLDS, PARTLY, Claim, collected, markdown, verdict, write_page
from pdvi.reproduce.methods import BASELINES, BY_NAME, METHODS, PAPER, applicable
from pdvi.reproduce.rates import power, rate, squared_gradients

ROOT = Path(__file__).parent.parent
TINY_MIXTURE = mixture.Sizes(
    n=400, batch_size=40, biases=(0.0, 0.95), epochs=2, trials=6, tuning_epochs=4, log_every=0.5
)
TINY_EMBRYO = embryo.Sizes(n_patches=4, epochs=2, trials=6, tuning_epochs=8)
FEW = ("PD-VI", "P2D-VI", "SVI diminishing", "SVI constant")  # compiling every method would take a minute
MIXTURE_METHODS = (*FEW, mixture.UNTUNED)
RIVALS = ("SVI diminishing", "SVI constant")


def silent(line, done=None):
    pass


def command(*arguments):
    """The exit code of a command, in this process."""
    with pytest.raises(SystemExit) as done:
        main([str(argument) for argument in arguments])
    return done.value.code


def tables(folder):
    """The text of all tables but those of seconds."""
    return {path.name: path.read_text() for path in (folder / "tables").iterdir() if "seconds" not in path.name}


def toy(make=None, methods=("PD-VI", "CV"), **options):
    """A case small enough to be run many times."""
    make = make or (lambda seed: runs.Task(pdvi.datasets.quadratic(n=20, seed=seed)))
    settings = {"batch_size": 2, "epochs": 3, "trials": 6, "tuning_epochs": 2, **options}
    return runs.Case("toy", "toy", make, methods, **settings)


# -------------------------------------------------------------------------------------------- methods, figures


def test_every_method_has_a_look_of_its_own_also_in_gray():
    assert len({method.color for method in METHODS}) == len(METHODS)
    assert len({method.marker for method in METHODS}) == len(METHODS)
    assert len({method.key for method in METHODS}) == len(METHODS)
    assert set(BASELINES) < set(PAPER)


def test_methods_that_cannot_serve_a_problem_are_left_out():
    names = [method.name for method in applicable(PAPER, pdvi.datasets.quadratic(n=10))]
    assert "SVI constant" not in names  # the quadratic has no natural parameters
    assert "P2D-VI" not in names  # one block
    assert {"PD-VI", "P2D-VI automatic", "SGD", "CV"} <= set(names)


def test_curves_show_the_mean_and_one_standard_deviation():
    trace = pd.DataFrame({"step": [0, 1, 0, 1], "y": [1.0, 2.0, 3.0, 6.0], "seed": [1, 1, 2, 2], "method": "PD-VI"})
    figure, axes = figures.new(1)
    figures.curves(axes[0, 0], trace, "step", trace["y"], [BY_NAME["PD-VI"], BY_NAME["SGD"]])
    (line,) = axes[0, 0].lines
    np.testing.assert_allclose(line.get_ydata(), [2, 4])
    band = axes[0, 0].collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (1, 6)
    assert line.get_color() == BY_NAME["PD-VI"].color
    figures.legend(figure, axes)
    plt.close(figure)


# -------------------------------------------------------------------------------------------- rates


def test_a_linear_fall_is_told_from_a_power_and_from_a_floor():
    epoch = np.arange(101.0)
    linear = rate(epoch, 10 ** (-0.3 * epoch))
    assert linear.reading == "linear"
    assert linear.per_epoch == pytest.approx(-0.3)
    assert linear.arrived
    slow = rate(epoch, 1 / (1 + epoch))
    assert slow.reading.startswith("T^-0.9")
    assert slow.slope == pytest.approx(-1, abs=0.05)
    stuck = rate(epoch, np.maximum(10 ** (-0.3 * epoch), 1e-4))
    assert stuck.floor
    assert stuck.reading == "floor at 0.0001"
    assert not rate(epoch, np.full(101, 0.9)).floor  # has not begun


def test_a_diverged_run_has_no_rate():
    found = rate(np.array([0.0, 1.0, 1.0]), np.array([1.0, np.inf, 1.0]))
    assert found.reading == "diverged"
    assert not found.floor
    assert np.isnan(power(np.array([0.0, 1.0, 1.0]), np.ones(3)))


def test_squared_gradients_are_not_dominated_by_the_start():
    steps = np.arange(200.0)
    trace = pd.DataFrame({"grad_norm": np.sqrt(100 / (1 + steps) ** 2)})
    assert power(steps, squared_gradients(trace)) == pytest.approx(-2, abs=0.05)
    constant = pd.DataFrame({"grad_norm": np.where(steps < 5, 100.0, 1.0)})
    assert power(steps, squared_gradients(constant)) == pytest.approx(0, abs=0.01)


# -------------------------------------------------------------------------------------------- runs that resume


def test_an_interrupted_comparison_goes_on_where_it_was(tmp_path, monkeypatch):
    whole = runs.compare(toy(), runs.Runs(tmp_path / "whole", {}), 2, silent)
    fit, count = pdvi.fit, []

    def stops(*arguments, **options):
        count.append(1)
        if len(count) == 6:
            raise KeyboardInterrupt
        return fit(*arguments, **options)

    folder = tmp_path / "interrupted"
    with monkeypatch.context() as patch:
        patch.setattr(pdvi, "fit", stops)
        with pytest.raises(KeyboardInterrupt):
            runs.compare(toy(), runs.Runs(folder, {}), 2, silent)
    finished = {path: path.stat().st_mtime_ns for path in folder.rglob("*-?.csv")}
    assert len(finished) == 2
    said = []
    resumed = runs.compare(toy(), runs.Runs(folder, {}), 2, said.append)
    assert len(said) == 2  # of four runs, and none of the tunings
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    pd.testing.assert_frame_equal(resumed.trace.drop(columns="seconds"), whole.trace.drop(columns="seconds"))
    assert runs.Runs(folder, {}).missing([toy()], 2) == 0


def test_half_a_file_is_not_taken_for_a_finished_run(tmp_path, monkeypatch):
    store = runs.Runs(tmp_path, {})
    write = pd.DataFrame.to_csv

    def half(self, path, **options):
        text = write(self, None, **options)
        Path(path).write_text(text[: len(text) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pd.DataFrame, "to_csv", half)
        with pytest.raises(KeyboardInterrupt):
            runs.compare(toy(methods=("PD-VI",)), store, 1, silent)
    assert not list(tmp_path.rglob("*.csv"))
    done = runs.compare(toy(methods=("PD-VI",)), store, 1, silent)
    assert len(done.trace) == 4


def test_tuning_goes_on_from_its_trials(tmp_path, monkeypatch):
    store, case = runs.Runs(tmp_path, {}), toy(methods=("CV",))
    runs.compare(case, store, 1, silent)
    kept = tmp_path / "tuning" / "toy" / "cv.jsonl"
    lines = kept.read_text().splitlines()
    (tmp_path / "tuning" / "toy" / "cv.json").unlink()
    kept.write_text("\n".join([*lines[:-1], lines[-1][:9]]))  # killed while the last trial was written
    runs.compare(case, store, 1, silent)
    assert kept.read_text().splitlines() == lines
    assert store.settings(case, BY_NAME["CV"])["rate.lam"] > 0


def test_runs_of_other_settings_are_not_mixed(tmp_path):
    runs.Runs(tmp_path, {"n": 1, "m": 1})
    runs.Runs(tmp_path, {"n": 1, "m": 1})
    with pytest.raises(ValueError, match=r"holds runs with other settings \(n\); give another --out"):
        runs.Runs(tmp_path, {"n": 2, "m": 1})


def test_points_that_the_safeguard_undid_are_not_measured(tmp_path, monkeypatch):
    """A trace with an undone point has one row more than was watched."""
    fit = pdvi.fit

    def with_event(*arguments, callbacks=(), **options):
        result = fit(*arguments, callbacks=callbacks, **options)
        undone = result.trace.iloc[[-1]].assign(step=99, objective=np.nan)
        return dataclasses.replace(result, trace=pd.concat([result.trace, undone], ignore_index=True))

    monkeypatch.setattr(pdvi, "fit", with_event)
    problem = pdvi.datasets.quadratic(n=20)
    case = toy(lambda seed: runs.Task(problem, lambda progress: {"epochs": progress.record["epoch"]}), ("PD-VI",))
    trace = runs.compare(case, runs.Runs(tmp_path, {}), 1, silent).trace
    np.testing.assert_array_equal(trace["epochs"].to_numpy(), [0, 1, 2, 3, np.nan])


def test_arrivals_are_infinite_where_a_target_is_missed():
    trace = pd.DataFrame(
        {
            "seed": [1, 1, 1, 1],
            "method": ["PD-VI", "PD-VI", "SGD", "SGD"],
            "step": [0, 5, 0, 5],
            "objective": [3.0, 1.0, 3.0, 2.0],
        }
    )
    done = runs.Compared(toy(), [BY_NAME["PD-VI"], BY_NAME["SGD"]], trace)
    np.testing.assert_allclose(done.gaps(), [1, 0, 1, 0.5])
    np.testing.assert_allclose(done.gaps(0.0), [1, 1 / 3, 1, 2 / 3])
    assert done.arrivals(done.gaps(), 0.1).loc[1].tolist() == [5, np.inf]
    assert done.ends("objective").loc[1].tolist() == [1, 2]


# -------------------------------------------------------------------------------------------- claims


def test_verdicts():
    assert [verdict(True, True), verdict(True, False), verdict(False)] == [HOLDS, PARTLY, FAILS]


def test_markdown_keeps_the_columns():
    table = markdown(pd.DataFrame({"a": ["x|y"], "b": [0.123456]}))
    assert table.splitlines() == ["| a | b |", "|---|---|", "| x\\|y | 0.1235 |"]


# -------------------------------------------------------------------------------------------- the three experiments


@pytest.mark.slow
def test_a_mixture_writes_everything_is_only_read_the_second_time_and_repeats(tmp_path, monkeypatch):
    monkeypatch.setattr(mixture, "METHODS", MIXTURE_METHODS)
    monkeypatch.setattr(mixture, "BASELINES", RIVALS)
    options = {"seeds": 2, "say": silent, "command": "pdvi reproduce mixture", "sizes": TINY_MIXTURE, "quick": True}
    folder = tmp_path / "first"
    mixture.run(folder, **options)
    assert {path.name for path in folder.iterdir()} >= {"README.md", "claims.json", "traces.csv", "runs"}
    for name in ("wasserstein", "bias", "density"):
        assert (folder / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert imread(folder / "figures" / f"{name}.png")[..., :3].std() > 0.05
    traces = pd.read_csv(folder / "traces.csv")
    assert set(traces["method"]) == set(MIXTURE_METHODS)
    assert set(traces["seed"]) == {1, 2}
    assert traces["wasserstein"].notna().all()
    biased = pd.read_csv(folder / "tables" / "biased.csv").set_index("method")
    last = traces[(traces["case"] == "bias-0.95") & (traces["method"] == "PD-VI")].groupby("seed")["wasserstein"].last()
    assert biased.loc["PD-VI", "distance"] == pytest.approx(last.mean(), rel=1e-5)
    record = json.loads((folder / "claims.json").read_text())
    assert record["quick"]
    assert {claim["verdict"] for claim in record["claims"]} <= {HOLDS, PARTLY, FAILS}
    page = (folder / "README.md").read_text()
    assert all(claim["claim"] in page and claim["measured"] in page for claim in record["claims"])
    assert page.count("](figures/") == 3
    made = tables(folder)
    assert set(made) >= {"biased.csv", "biased.md", "iid.csv", "bias.csv", "random-start.csv", "sorted.csv"}

    monkeypatch.setattr(figures, "save", lambda figure, folder, name: plt.close(figure))
    shutil.copytree(folder / "tuning", tmp_path / "again" / "tuning")
    mixture.run(tmp_path / "again", **options)
    assert tables(tmp_path / "again") == made

    monkeypatch.setattr(pdvi, "fit", None)
    monkeypatch.setattr(pdvi, "tune", None)
    mixture.run(folder, **options)
    assert tables(folder) == made


def test_sorted_batches_come_component_by_component():
    case = mixture.cases(TINY_MIXTURE)[mixture.SORTED]
    order = case.make(1).sampling.epoch(0, 3, case.make(1).problem.n_shards, 1).ravel()
    data = pdvi.datasets.mixture(TINY_MIXTURE.n, batch_size=TINY_MIXTURE.batch_size, bias=TINY_MIXTURE.bias, seed=1)
    most = np.array([np.bincount(data.labels[data.batch == b]).argmax() for b in order])
    assert (np.diff(most) >= 0).all()
    assert len(set(most)) > 1
    assert mixture.cases(TINY_MIXTURE)[mixture.POOR].make(1).sampling is None


def test_collected_claims_want_folders_with_claims(tmp_path):
    with pytest.raises(FileNotFoundError, match="no claims in"):
        collected([tmp_path])


def test_the_quadratic_measures_rates(tmp_path):
    sizes = quadratic.Sizes(n=40, batch_size=4, epochs=12, small=10, long=8, rows=100, trials=6, tuning_epochs=8)
    store = runs.Runs(tmp_path, {})
    case = dataclasses.replace(quadratic.cases(sizes)["shifted"], methods=("PD-VI", "P2D-VI automatic", "memoized VB"))
    done = runs.compare(case, store, 1, silent)
    measured = quadratic._measured(done, None)
    assert measured["memoized VB"][0].arrived
    assert measured["P2D-VI automatic"][0].per_epoch < -0.3
    table = quadratic._table({"shifted": done}, {"shifted": measured}, store)
    assert table["method"].tolist() == ["PD-VI", "P2D-VI automatic", "memoized VB"]
    assert table["tuned"].str.startswith("eta").tolist() == [True, False, False]
    assert not jax.config.jax_enable_x64


def mosta(path, *, layer=True, annotated=True):
    """A small slide of the shape of a MOSTA file: normalized X, raw counts in a layer (or in X), annotated spots."""
    adata = pdvi.datasets.tissue(300, n_genes=40, n_domains=4, seed=0)
    adata.obs["annotation"] = adata.obs.pop("truth").astype(str).astype("category")
    adata.obs.loc[adata.obs_names[:20], "annotation"] = np.nan
    if layer:
        adata.layers["count"] = adata.X.copy()
        adata.X = sp.csr_matrix(adata.X).log1p()
    if not annotated:
        del adata.obs["annotation"]
    adata.write_h5ad(path)
    return adata


@pytest.mark.slow
def test_an_embryo_from_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(embryo, "PAPER", FEW)
    monkeypatch.setattr(embryo, "BASELINES", RIVALS)
    monkeypatch.setattr(embryo, "EARLY", "SVI constant")
    monkeypatch.setattr(figures, "FORMATS", ("png",))
    adata = mosta(tmp_path / "mosta.h5ad")
    out = tmp_path / "out"
    options = {"seeds": 1, "say": silent, "command": "pdvi reproduce embryo", "sizes": TINY_EMBRYO, "quick": True}
    claims = embryo.run(out, data=tmp_path / "mosta.h5ad", **options)
    assert len(claims) == 14
    for preset in embryo.PRESETS:
        table = pd.read_csv(out / "tables" / f"{preset.key}.csv").set_index("method")
        assert table.index.tolist() == list(FEW)
        assert table["ARI"].between(-1, 1).all()
        for name in ("convergence", "maps"):
            assert imread(out / "figures" / f"{name}-{preset.key}.png")[..., :3].std() > 0.05
    kept = slide.kept(out / "slide.npz", None)
    assert (kept.truth[:20] == -1).all()
    assert kept.n_domains == adata.obs["annotation"].nunique()
    labels = np.load(out / "runs" / "defaults" / "p2d-vi-1.npz")["labels"]
    ari = pdvi.metrics.ari(kept.truth[20:], labels[20:])
    trace = pd.read_csv(out / "runs" / "defaults" / "p2d-vi-1.csv")
    assert trace["ari"].iloc[-1] == pytest.approx(ari)
    before = tables(out)
    shutil.rmtree(out / "runs" / "defaults")
    monkeypatch.setattr(figures, "save", lambda figure, folder, name: plt.close(figure))
    embryo.run(out, data=tmp_path / "mosta.h5ad", **options)
    assert tables(out) == before
    with pytest.raises(ValueError, match=r"other settings \(bytes, data\)"):
        embryo.run(out, **options)


def test_counts_are_taken_from_the_layer_or_from_x(tmp_path):
    mosta(tmp_path / "layer.h5ad")
    mosta(tmp_path / "x.h5ad", layer=False)
    one, other = (slide.from_file(tmp_path / name) for name in ("layer.h5ad", "x.h5ad"))
    np.testing.assert_allclose(np.abs(one.X), np.abs(other.X), rtol=1e-3, atol=1e-3)


def test_the_published_preset_is_the_published_one():
    tissue = pdvi.datasets.tissue(400, n_genes=30, n_domains=3, seed=1)
    pdvi.pp.prepare(tissue)
    toy_slide = slide.Slide(
        tissue.obsm["X_pca"], tissue.obsm["spatial"], tissue.obs["truth"].cat.codes.to_numpy(np.int16)
    )
    published, ours = (slide.cut(toy_slide, preset, 8)[0] for preset in (slide.PUBLISHED, slide.DEFAULTS))
    assert float(published.model.temperature) == pytest.approx(1e-4)
    assert float(ours.model.temperature) == 1
    estimated = pdvi.mixtures.empirical_bayes(toy_slide.X, 3, seed=0).noise_variance
    noise = 1 / np.asarray(published.model.precision)
    np.testing.assert_allclose(noise, 100 * estimated, rtol=1e-5)  # ten times the scale
    assert published.halo is None
    assert ours.halo is not None
    assert published.n_shards <= 25
    assert ours.n_shards == 8
    assert float(published.shards["weight"].max()) <= 0.005 * 3  # |cos| + tau (cos + 1) with tau 1


def test_the_window_lies_where_domains_meet():
    xy = np.stack(np.meshgrid(np.arange(30.0), np.arange(30.0)), -1).reshape(-1, 2)
    truth = np.where(xy[:, 0] < 25, 0, np.where(xy[:, 1] < 15, 1, 2)).astype(np.int16)
    center, side = maps.window(slide.Slide(xy, xy, truth))
    inside = (np.abs(xy - center) <= side / 2).all(1)
    assert set(truth[inside]) == {0, 1, 2}


# -------------------------------------------------------------------------------------------- the command


def test_the_command_says_what_it_does_and_hands_it_on(tmp_path, monkeypatch, capsys):
    asked = {}

    def run(out, *, say, **options):
        asked.update(options)
        say("a step (1 of 2)", 0.5)
        return [Claim("it is fast", "introduction", "42", HOLDS)]

    monkeypatch.setattr(embryo, "run", run)
    monkeypatch.chdir(tmp_path)
    assert command("reproduce", "embryo", "--quick", "--data", "folder/slide.h5ad") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for text in ("a step (1 of 2)", "embryo: what the paper says", "it is fast", "42", "embryo-quick"):
        assert text in printed.out
    assert asked["command"] == "pdvi reproduce embryo --seeds 2 --data slide.h5ad --quick"
    assert asked["sizes"] is embryo.QUICK
    assert asked["data"] == Path("folder/slide.h5ad")
    assert command("reproduce", "embryo", "--seeds", 3, "--quiet") == 0
    printed = capsys.readouterr()
    assert printed.out == printed.err == ""
    assert asked["command"] == "pdvi reproduce embryo --seeds 3"
    assert asked["sizes"] is embryo.FULL


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("embryo", "--data", "nowhere.h5ad"), "no file at 'nowhere.h5ad'; give the path of an h5ad file."),
        (("embryo", "--data", "text.h5ad"), "'text.h5ad' is not an h5ad file"),
        (("embryo", "--data", "bare.h5ad"), "'annotation' not in adata.obs (it has ['cell_type', 'sample'])"),
        (("mixture", "--data", "bare.h5ad"), "`data` is for the embryo alone"),
        (("mixture", "--out", "text.h5ad"), "cannot write into 'text.h5ad': it is a file"),
        (("spheres",), "'spheres' is not one of 'quadratic', 'mixture', 'embryo'"),
        (("mixture", "--seeds", 0), "--seeds"),
    ],
)
def test_one_clear_line_for_what_is_wrong(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.h5ad").write_text("not a slide")
    mosta(tmp_path / "bare.h5ad", annotated=False)
    usage = arguments[0] == "spheres" or "--seeds" in arguments
    assert command("reproduce", *arguments) == (2 if usage else 1)
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_one_domain_is_too_few(tmp_path):
    adata = mosta(tmp_path / "one.h5ad")
    adata.obs["annotation"] = pd.Categorical(["brain"] * adata.n_obs)
    adata.write_h5ad(tmp_path / "one.h5ad")
    with pytest.raises(ValueError, match="must name at least 2 domains"):
        slide.from_file(tmp_path / "one.h5ad")
    assert isinstance(ad.read_h5ad(tmp_path / "one.h5ad"), ad.AnnData)


def test_an_unknown_experiment_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"`experiment` must be one of .*'embryo'\), got 'runs'"):
        reproduce.run("runs", tmp_path, say=print)
    with pytest.raises(ValueError, match="`seeds` must be a whole number of at least 1, got 0"):
        reproduce.run("mixture", tmp_path, say=print, seeds=0)


def test_every_experiment_has_a_full_and_a_quick_form():
    assert reproduce.SEEDS == {True: 2, False: 5}
    assert (mixture.FULL.n, mixture.FULL.batch_size) == (100_000, 1_000)
    assert (embryo.FULL.n_spots, embryo.FULL.n_domains, slide.COMPONENTS) == (150_000, 23, 50)
    assert quadratic.FULL.n == 10_000
    for module in (quadratic, mixture, embryo):
        assert module.QUICK.trials < module.FULL.trials
    assert mixture.FULL.biases[0] == 0
    assert mixture.FULL.biases[-1] == 1
    assert mixture.FULL.bias in mixture.FULL.biases


def test_the_claims_page_is_assembled_by_a_script(tmp_path):
    claims = [Claim("it is fast", "introduction", "42", PARTLY)]
    page = {"about": "Toys.", "command": "pdvi reproduce toys", "quick": True, "figures": {"loss": "A loss."}}
    (tmp_path / provenance.FILE).write_text("abc\ndef\n")
    write_page(tmp_path, "Toys", claims, **page)
    assert "![A loss.](figures/loss.png)" in (tmp_path / "README.md").read_text()
    script = ROOT / "experiments" / "claims.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "## Toys" in done.stdout
    assert "This is the **quick** form" in done.stdout
    assert "`pdvi reproduce toys`, runs made at commit abc, def." in done.stdout
    assert "| it is fast | introduction | 42 | partly |" in done.stdout


def test_a_folder_knows_what_made_its_runs(tmp_path, monkeypatch):
    for commit in ("abc", "abc", "def"):
        monkeypatch.setattr(provenance, "commit", lambda commit=commit: commit)
        provenance.sign(tmp_path)
    assert provenance.commits(tmp_path) == ["abc", "def"]
