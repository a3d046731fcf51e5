"""Counts of the code: what one call of `tl.domains` passes through, and how much there is to read.

    python benchmarks/complexity.py [--spots 600] [--names]

Run it in a new process, as it is written here, since the first call is counted while it compiles.

- *Named functions*: distinct functions and methods of pdvi that `pdvi.tl.domains(slide, 5)` enters, in any thread;
  lambdas, comprehensions and modules that are imported are counted apart. *Deep* is the largest number of named
  functions of pdvi that are on one thread's stack at once. The slide is simulated and has counts and coordinates
  only, so that the call makes all inputs. The first call imports and compiles; the second is on a copy.
- *Lines* are those of Python files, comments and empty ones included.
- *Result containers*: classes defined in FOLDERS that are a NamedTuple or a dataclass and have a field whose annotation
  mentions `np.ndarray`, `Array`, `Result` or `Problem`. Classes inside functions do not count.
- *Numbers in the configuration*: fields of the dataclass `Config` in FOLDERS, or of `Recipe` if there is no such class.
- *Hooks of a solver*: public methods and properties that are defined on the base class of all solvers in pdvi.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from anndata import AnnData

import pdvi

PACKAGE = Path(pdvi.__file__).parent
FOLDERS = ("mixtures", "spatial", "tl")  # where domains are found; absent ones are skipped
CONFIGURATIONS = ("Config", "Recipe")  # the first that exists
HELD = re.compile(r"\b(np\.ndarray|Array|Result|Problem)\b")


class Passed(NamedTuple):
    """Functions as (file, line, qualified name), split by whether they have a name, and the depth of the stack."""

    named: set[tuple[str, int, str]]
    unnamed: set[tuple[str, int, str]]
    depth: int

    def summary(self) -> str:
        """The counts in one line."""
        files = len({function[0] for function in self.named})
        every = self.named | self.unnamed
        return (
            f"{len(self.named)} in {files} files, {self.depth} deep "
            f"({len(every)} in {len({function[0] for function in every})} with lambdas, comprehensions and imports)"
        )


class Recorder:
    """A profile function for all threads. There is one, since threads that outlive a call keep theirs."""

    def __init__(self) -> None:
        self.inside = f"{PACKAGE}/"
        self.forget()

    def forget(self) -> None:
        """Begin anew; no recorded call is running."""
        self.entered: set[tuple[str, int, str]] = set()
        self.depths: dict[int, int] = {}  # of each thread, now
        self.deepest = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Note a function that is entered or left."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self.inside):
            return
        self.entered.add((code.co_filename.removeprefix(self.inside), code.co_firstlineno, code.co_qualname))
        if not code.co_name.startswith("<"):
            thread = threading.get_ident()
            self.depths[thread] = self.depths.get(thread, 0) + (1 if event == "call" else -1)
            self.deepest = max(self.deepest, self.depths[thread])

    def record(self, call: Callable[[], Any]) -> Passed:
        """Return what a call enters, in this thread and in all that it starts or has started before."""
        self.forget()
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            call()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        named = {function for function in self.entered if not function[2].rpartition(".")[2].startswith("<")}
        return Passed(named, self.entered - named, self.deepest)


def find_domains(adata: AnnData) -> None:
    """Call `tl.domains`, whose module is imported here when it is looked up for the first time."""
    pdvi.tl.domains(adata, 5)


def calls_of_domains(n_spots: int) -> tuple[Passed, Passed]:
    """The first and the second call of `tl.domains` on a simulated slide."""
    slide = pdvi.datasets.tissue(n_spots, n_domains=5, seed=0)
    copies = [slide.copy(), slide.copy()]
    recorder = Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        first, second = (recorder.record(partial(find_domains, adata)) for adata in copies)
    return first, second


def sources(*folders: str) -> list[Path]:
    """The Python files of some folders of the package; of all of it if none is named."""
    return [path for folder in folders or (".",) for path in sorted((PACKAGE / folder).rglob("*.py"))]


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def classes(paths: list[Path]) -> Iterator[tuple[Path, ast.ClassDef]]:
    """The classes of files, without those inside functions."""
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                yield path, node


def is_record(node: ast.ClassDef) -> bool:
    """Whether a class is a NamedTuple or a dataclass."""
    parents = {ast.unparse(base).split(".")[-1] for base in node.bases}
    decorators = {ast.unparse(item).split("(")[0].split(".")[-1] for item in node.decorator_list}
    return "NamedTuple" in parents or "dataclass" in decorators


def fields(node: ast.ClassDef) -> dict[str, str]:
    """The fields of a record: name and annotation."""
    return {
        ast.unparse(item.target): ast.unparse(item.annotation) for item in node.body if isinstance(item, ast.AnnAssign)
    }


def result_containers() -> list[str]:
    """Names of the records that hold arrays or results, with their files."""
    return [
        f"{path.relative_to(PACKAGE)}:{node.name}"
        for path, node in classes(sources(*FOLDERS))
        if is_record(node) and any(HELD.search(text) for text in fields(node).values())
    ]


def configuration() -> tuple[str, list[str]]:
    """The name of the configuration's class, and its fields."""
    found = {node.name: node for _, node in classes(sources(*FOLDERS)) if is_record(node)}
    for name in CONFIGURATIONS:
        if name in found:
            return name, list(fields(found[name]))
    return "none", []


def hooks() -> tuple[str, list[str]]:
    """The base class of all solvers, and the public methods that it defines."""
    base = [cls for cls in pdvi.P2DVI.__mro__ if cls.__module__.split(".")[0] == "pdvi"][-1]
    public = {name: value for name, value in vars(base).items() if not name.startswith("_")}
    found = [name for name, value in public.items() if inspect.isroutine(value) or isinstance(value, property)]
    return f"{base.__module__}.{base.__qualname__}", found


def row(what: str, count: str | int, names: list[str] | None = None) -> None:
    """Print a count, and under it what was counted."""
    print(f"{what:58}{count if isinstance(count, str) else f'{count:,}'}", flush=True)
    for name in names or ():
        print(f"    {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spots", type=int, default=600)
    parser.add_argument("--names", action="store_true", help="print what was counted, too")
    arguments = parser.parse_args()
    first, second = calls_of_domains(arguments.spots)
    for which, passed in {"first": first, "second": second}.items():
        names = [f"{file}:{line} {name}" for file, line, name in sorted(passed.named)]
        row(
            f"named functions, {which} call, {arguments.spots} spots",
            passed.summary(),
            names if arguments.names else None,
        )
    present = [folder for folder in FOLDERS if (PACKAGE / folder).is_dir()]
    row(f"lines of {' + '.join(present)}", lines(sources(*present)))
    containers = result_containers()
    row(f"result containers in {' + '.join(present)}", len(containers), containers if arguments.names else None)
    name, numbers = configuration()
    row(f"numbers in the configuration ({name})", len(numbers), numbers if arguments.names else None)
    base, methods = hooks()
    row(f"hooks of a solver ({base})", len(methods), methods if arguments.names else None)
    row("lines of src in all", lines(sources()))


if __name__ == "__main__":
    main()
