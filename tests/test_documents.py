"""What the documents show must run."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pdvi
from models_for_tests import tissue_problem

ROOT = Path(__file__).parent.parent


def test_the_readme_example_runs(capsys):
    code = re.search(r"## Five lines\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(code.group(1), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "MAX_EPOCHS: " in printed
    assert "[31 rows x 8 columns]" in printed


def test_the_readme_mixtures_run(capsys):
    code = re.search(r"scikit-learn estimators:\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(code.group(1), "README.md", "exec"), {})
    assert float(capsys.readouterr().out.splitlines()[-1]) > 0.8


@pytest.mark.filterwarnings("ignore")  # of dask, on leaving
def test_the_readme_executors_agree(tmp_path):
    """As a script of its own, as a user would run it: workers import the main module."""
    code = re.search(r"the numbers are the same:\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    indented = "".join(f"    {line}\n" for line in code.group(1).splitlines())
    (tmp_path / "script.py").write_text(f'if __name__ == "__main__":\n{indented}')
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    on_disk, on_workers = map(float, done.stdout.split())
    assert on_disk == on_workers


@pytest.mark.slow
def test_the_cluster_script_runs_and_goes_on(tmp_path):
    """On two local workers, with the calls that it makes on any cluster; and once more from its checkpoint."""
    pdvi.write_store(tmp_path / "slide.pdvi", tissue_problem(400, 4))
    for epochs in (3, 6):
        command = [sys.executable, str(ROOT / "docs/skeletons/cluster.py"), "slide.pdvi", "--epochs", str(epochs)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        result = pdvi.load_result(tmp_path / "slide.result.zarr")
        assert done.stdout.startswith(f"{result.status.name} {result.objective:.8g}\n")
        assert result.trace["epoch"].iloc[-1] == epochs
    expected = pdvi.fit(tissue_problem(400, 4), pdvi.P2DVI(), max_epochs=6)
    assert result.objective == pytest.approx(expected.objective, rel=1e-4)


def test_the_model_skeleton_finds_the_truth():
    module = runpy.run_path(str(ROOT / "docs/skeletons/model.py"))
    shards, beta = module["simulate"]()
    result = pdvi.fit(pdvi.Problem(module["RobustRegression"](3), shards), pdvi.P2DVI())
    assert result.converged
    np.testing.assert_allclose(result.global_params["beta"], beta, atol=0.05)


@pytest.mark.slow
def test_the_tutorial_of_own_models_runs(capsys):
    """As written, and it comes to what the data were made with."""
    text = (ROOT / "docs/tutorials/own-model.md").read_text()
    blocks = re.findall(r"```\{code-cell\}\n(.*?)```", text, re.DOTALL)
    model = re.search(r"class MixedLogistic.*?\n\n\n", blocks[0], re.DOTALL).group(0)
    assert len([line for line in model.splitlines() if line.strip()]) <= 20
    names = {}
    for block in blocks:
        exec(compile(block, "own-model.md", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.count("CONVERGED: ") == 3
    np.testing.assert_allclose(names["posterior"]["beta"].mean, [0.5, 1.0, -1.0], atol=0.2)
    np.testing.assert_allclose(np.exp(names["result"].global_params["log_sd"]), [3, 1, 0.5], rtol=0.25)
    np.testing.assert_allclose(names["robust"].global_params["mean"], [3, -1], atol=0.3)
    assert names["by_school"].shape == (60,)


def test_the_solver_skeleton_descends():
    module = runpy.run_path(str(ROOT / "docs/skeletons/solver.py"))
    trace = pdvi.fit(pdvi.datasets.quadratic(n=200), module["Descent"](), max_epochs=10).trace
    assert trace["objective"].iloc[-1] < 0.5 * trace["objective"].iloc[0]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / name).read_text()):
        assert (ROOT / target).exists(), target
