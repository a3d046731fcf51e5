"""Imports point one way: no module imports one of a later layer."""

import ast
from pathlib import Path

import pytest

import pdvi

ROOT = Path(pdvi.__file__).parent
LAYERS = [
    {"shards", "partition", "graphs", "store", "paths", "coarsening"},
    {"problem"},
    {"algorithm", "oracles", "stepsize", "sampling", "theory", "result"},
    {"models", "solvers"},
    {"executors"},
    {"checkpoint", "fit_arguments"},
    {"fit"},
    {"mixtures", "restarts", "reestimation", "reseeding", "tuning"},
    {"anndata_checks", "datasets", "tissue", "estimators", "pp", "gr", "tl", "pl", "metrics", "report", "sharding"},
    {"pdvi"},  # the package's own __init__: the public names
    {"console", "files", "demo", "reproduce"},
    {"cli", "__main__"},
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
FILES = sorted(ROOT.rglob("*.py"))


def unit(file):
    """The module or subpackage of pdvi that a file belongs to."""
    first = file.relative_to(ROOT).parts[0].removesuffix(".py")
    return "pdvi" if first == "__init__" else first


UNITS = {unit(file) for file in FILES}


def imported(source):
    """The modules and subpackages of pdvi that a source text imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports within pdvi as `from pdvi...`"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for parts in (name.split(".") for name in names):
            if parts[0] == "pdvi":
                yield parts[1] if len(parts) > 1 and parts[1] in UNITS | set(LAYER) else "pdvi"


def wrong(name, source):
    """What is imported from later layers; a module in no layer is told by its own test."""
    return {other for other in imported(source) if LAYER.get(other, 0) > LAYER[name]}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_one_way(file):
    assert unit(file) in LAYER, f"add {unit(file)!r} to a layer in {__file__}"
    assert not wrong(unit(file), file.read_text())


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("problem", "from pdvi.run.fit import fit", {"fit"}),
        ("models", "import pdvi.executors.memory", {"executors"}),
        ("result", "def late():\n    from pdvi import solvers, shards", {"solvers"}),
        ("datasets", "import pdvi", {"pdvi"}),
        ("datasets", "from pdvi import Problem", {"pdvi"}),
        ("cli", "import numpy\nimport pdvi\nfrom pdvi.fit import fit", set()),
        ("solvers", "from pdvi.models import Quadratic\nfrom pdvi.oracles import Newton", set()),
    ],
)
def test_an_import_of_a_later_layer_is_seen(name, source, found):
    assert wrong(name, source) == found
