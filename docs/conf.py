"""Sphinx: Markdown pages, and the API from the docstrings of the installed package."""

import importlib.metadata

project = "ple-compile"
author = "the ple-compile authors"
release = importlib.metadata.version("ple-compile")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
default_role = "code"

html_theme = "furo"
html_title = "ple-compile"


def fields_as_list(app, what, name, obj, options, lines):
    """Docstrings of dataclasses describe a field as `name: text`; reStructuredText writes `:name: text`."""
    fields = getattr(obj, "__dataclass_fields__", {})
    lines[:] = [f":{line}" if line.partition(": ")[0] in fields else line for line in lines]


def setup(app):
    app.connect("autodoc-process-docstring", fields_as_list)
