"""The site: every public name is in the reference, every page in the menu. Its code blocks run in `make docs`."""

import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest

import pdvi

DOCS = Path(__file__).parent.parent / "docs"
SPACES = ("datasets", "gr", "mixtures", "pl", "pp", "q", "report", "solvers", "tl")  # those that list their names
PLAIN = ("graphs", "metrics", "theory", "partition", "sampling")  # those whose public functions are their names


def documented():
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    return {*re.findall(r"^   ([\w.]+)$", text, re.MULTILINE), *re.findall(r"py:data:: pdvi\.([\w.]+)", text)}


def public():
    modules = {name for name in pdvi.__all__ if inspect.ismodule(getattr(pdvi, name))}
    assert modules == {*SPACES, *PLAIN}
    yield from (name for name in pdvi.__all__ if name not in modules)
    for space in SPACES:
        module = importlib.import_module(f"pdvi.{space}")
        yield from (
            f"{space}.{name}" for name in module.__all__ if getattr(pdvi, name, None) is not getattr(module, name)
        )
    for space in PLAIN:
        module = getattr(pdvi, space)
        for name, value in vars(module).items():
            mine = getattr(value, "__module__", None) == module.__name__
            if mine and not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value)):
                yield f"{space}.{name}"


@pytest.mark.parametrize("name", list(public()))
def test_every_public_name_is_in_the_reference(name):
    assert name in documented()


def test_the_reference_names_nothing_that_is_not_there():
    for name in documented():
        *spaces, last = name.split(".")
        assert hasattr(functools.reduce(getattr, spaces, pdvi), last), name


def test_every_page_is_in_the_menu():
    menu = set(re.findall(r"^([\w/-]+)$", (DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md") if "_build" not in page.parts}
    assert pages - {"index"} == menu


def test_links_between_pages_lead_somewhere():
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page.name, target)
