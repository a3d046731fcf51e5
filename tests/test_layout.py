"""Imports point one way, file by file; contracts are not probed; private names stay where they are."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pdvi

ROOT = Path(pdvi.__file__).parent
# Nothing imports what is named after it. An entry is a file or a package; a file goes with the longest entry that
# contains it, and files of one entry, or of one line, may import each other as long as no circle comes of it.
ORDER = [
    ["pdvi._base"],
    ["pdvi.shards"],
    ["pdvi.core.model"],
    ["pdvi.core.problem"],
    ["pdvi.core"],
    ["pdvi.q"],
    ["pdvi.models"],
    ["pdvi.solvers.primal_dual.metric"],
    ["pdvi.solvers.primal_dual.algorithm"],
    ["pdvi.solvers"],
    ["pdvi.executors"],
    ["pdvi.run"],
    ["pdvi.bridge"],
    ["pdvi.mixtures"],
    ["pdvi.spatial"],
    ["pdvi.estimators"],
    ["pdvi.graphs", "pdvi.metrics", "pdvi.theory"],
    ["pdvi._anndata"],
    ["pdvi.datasets"],
    ["pdvi.pp"],
    ["pdvi.gr"],
    ["pdvi.tl", "pdvi.pl"],
    ["pdvi.report"],
    ["pdvi"],  # the package's own __init__: the public names
    ["pdvi.reproduce"],
    ["pdvi.cli", "pdvi.__main__"],
]
PLACE = {entry: number for number, line in enumerate(ORDER) for entry in line}
CONTRACTED = ["core", "models", "solvers", "executors", "run", "bridge"]


def module_name(file):
    """The dotted name of a file; a package stands for its __init__."""
    parts = ["pdvi", *file.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(file): file.read_text() for file in sorted(ROOT.rglob("*.py"))}


def known(name):
    """The longest part of a dotted name that is a module."""
    while name not in SOURCES and "." in name:
        name = name.rpartition(".")[0]
    return name


def place(module):
    """The number of a module's line in the order; None if it is in none."""
    entry = module
    while entry not in PLACE and "." in entry:
        entry = entry.rpartition(".")[0]
    return PLACE[entry] if entry != "pdvi" or module == "pdvi" else None


def imported(source):
    """The modules of pdvi that a source text imports, wherever in it: by statements, and by names in strings.

    A string counts if it is nothing but a dotted name, with or without ":attribute", and an f-string if it begins like
    one. So remedies in messages are written as calls, "run pdvi.tl.domains(adata, ...)".
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports within pdvi as `from pdvi...`"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.JoinedStr):
            names = [begin] if (begin := text_of(node.values[0])).startswith("pdvi.") else []
        else:
            names = [text.partition(":")[0]] if re.fullmatch(r"pdvi(\.\w+)+(:\w+)?", text := text_of(node)) else []
        yield from (known(name) for name in names if name.split(".")[0] == "pdvi")


def text_of(node):
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def backwards(module, source):
    """What a module imports that comes after it."""
    return {other for other in imported(source) if place(other) > place(module)}


def circle(graph):
    """Modules that import each other in a circle, or none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def borrowed(source):
    """The private names that a source text takes from other modules of pdvi: imported, or looked up in them."""
    tree = ast.parse(source)
    modules, found = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pdvi":
            for alias in node.names:
                if f"{node.module}.{alias.name}" in SOURCES:
                    modules.add(alias.asname or alias.name)
                elif is_private(alias.name):
                    found.add(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            modules |= {a.asname or "pdvi" for a in node.names if a.name.split(".")[0] == "pdvi"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            path = ast.unparse(node)
            if path.split(".")[0] in modules and path not in SOURCES:
                found.add(path)
    return found


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def probes(source):
    """The lines that ask an object whether it has some attribute, named by a literal."""
    return sorted(
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (node.func.id == "hasattr" or (node.func.id == "getattr" and text_of(node.args[1])))
    )


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_one_way(module):
    assert place(module) is not None, f"add {module!r} to the order in {__file__}"
    assert not backwards(module, SOURCES[module])


def test_no_file_imports_itself_through_others():
    assert not circle({module: {*imported(source)} - {module} for module, source in SOURCES.items()})


@pytest.mark.parametrize("module", SOURCES)
def test_private_names_stay_in_their_module(module):
    assert not borrowed(SOURCES[module])


@pytest.mark.parametrize("package", CONTRACTED)
def test_contracts_are_not_probed(package):
    """What a model, a solver or an executor may offer is declared in core, so nothing has to be looked for."""
    found = {
        module: lines
        for module, source in SOURCES.items()
        if f"{module}.".startswith(f"pdvi.{package}.") and (lines := probes(source))
    }
    assert not found, f"{sum(map(len, found.values()))} probes"


def test_type_checkers_are_told_that_there_are_types():
    assert (ROOT / "py.typed").is_file()


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("pdvi.core.problem", "from pdvi.run.fit import fit", {"pdvi.run.fit"}),
        ("pdvi.models.quadratic", "import pdvi.executors.memory", {"pdvi.executors.memory"}),
        ("pdvi.core.result", "def late():\n    from pdvi import solvers, shards", {"pdvi.solvers"}),
        ("pdvi.core.model", "from pdvi.core import problem", {"pdvi.core.problem"}),
        ("pdvi.datasets.problems", "import pdvi", {"pdvi"}),
        ("pdvi.datasets.problems", "from pdvi import Problem", {"pdvi"}),
        ("pdvi.solvers.svi", "import_module('pdvi.run.fit')", {"pdvi.run.fit"}),
        ("pdvi.shards.store", "LATER = {'fit': 'pdvi.run.fit:fit', 'x': 'pdvi.shards'}", {"pdvi.run.fit"}),
        ("pdvi.run.fit", "import_module(f'pdvi.tl.{name}')", {"pdvi.tl"}),
        ("pdvi.run.fit", "import_module(f'pdvi.{name}')", {"pdvi"}),
        ("pdvi.pp.prepare", "msg = f'{key!r} is missing; run pdvi.tl.domains(adata, 3) first'", set()),
        ("pdvi.cli.app", "import numpy\nimport pdvi\nfrom pdvi.run.fit import fit", set()),
        ("pdvi.solvers.svi", "from pdvi.models import Quadratic\nfrom pdvi.core.problem import Problem", set()),
    ],
)
def test_an_import_of_what_comes_later_is_seen(module, source, found):
    assert backwards(module, source) == found


def test_a_circle_is_seen():
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
    assert not circle({"a": {"b"}, "b": {"c"}, "c": set()})


def test_a_module_in_no_line_of_the_order_is_seen():
    assert place("pdvi.elsewhere.file") is None
    assert place("pdvi.core.model") < place("pdvi.core.problem") < place("pdvi.core.result") < place("pdvi.run.fit")


def test_borrowed_private_names_are_seen():
    assert borrowed("from pdvi.run.fit import _Run, fit") == {"pdvi.run.fit._Run"}
    assert borrowed("from pdvi import gr\ngr.build._weigh(1)") == {"gr.build._weigh"}
    assert borrowed("import pdvi\npdvi._LATER") == {"pdvi._LATER"}
    assert not borrowed("import numpy\nfrom pdvi._base import checks\nnumpy._x, checks.whole, self._y, checks.__file__")


def test_probes_are_seen():
    assert probes("hasattr(model, 'tidy')\ngetattr(model, 'tidy', None)\ngetattr(model, name)\nmodel.tidy()") == [1, 2]
