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


def fields_as_definitions(app, what, name, obj, options, lines):
    """Docstrings of dataclasses write `name: text` about a field; reStructuredText wants the text indented below."""
    fields, found = getattr(obj, "__dataclass_fields__", {}), []
    for line in lines:
        field, _, text = line.partition(": ")
        found += [f"``{field}``", f"    {text}"] if field in fields else [line]
    lines[:] = found


def setup(app):
    app.connect("autodoc-process-docstring", fields_as_definitions)
