"""The site: `make docs` builds it, and runs every code block on the way."""

import os
import sys
from importlib.metadata import version as version_of

import pdvi

project = "pdvi"
copyright = "2026, the pdvi authors"
author = "the pdvi authors"
version = release = version_of("pdvi")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "skeletons"]
html_theme = "furo"
html_title = "pdvi"
html_static_path = ["_static"]
html_theme_options = {"navigation_with_keys": True}

# code blocks: run once, kept until they change; an error is an error
nb_execution_mode = "off" if os.environ.get("PDVI_DOCS_RUN") == "off" else "cache"
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_typehints = "none"  # signatures have them as written
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = True
napoleon_google_docstring = False
default_role = "literal"  # docstrings name things in single backticks

# names of other libraries become links where their lists can be fetched; without a network all else is the same
intersphinx_mapping = (
    {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "anndata": ("https://anndata.readthedocs.io/en/stable", None),
        "scanpy": ("https://scanpy.readthedocs.io/en/stable", None),
    }
    if os.environ.get("PDVI_DOCS_ONLINE")
    else {}
)

# modules that are public under a shorter name than their file's
sys.modules["pdvi.partition"] = pdvi.partition
sys.modules["pdvi.sampling"] = pdvi.sampling


def _bars_are_text(app, what, name, object_, options, lines):
    """Norms and sizes of sets are written with bars, which reStructuredText would take for substitutions."""
    lines[:] = [line.replace("|", "\\|") for line in lines]


def setup(app):
    app.connect("autodoc-process-docstring", _bars_are_text)
