"""Sphinx: Markdown pages, and the API from the docstrings of the installed package."""

import importlib.metadata
import re

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


def entries_as_definitions(app, what, name, obj, options, lines):
    """A paragraph of docstring that begins with `name: text` lists fields; reStructuredText wants texts indented."""
    found, in_list = [], False
    for before, line in zip(["", *lines], lines):
        entry = re.match(r"([a-z_]+(?:, [a-z_]+)*): (.+)", line)
        in_list = bool(line) and (in_list or (not before and entry is not None))
        if not in_list:
            found.append(line)
        elif entry is not None:
            found += [f"``{entry[1]}``", f"    {entry[2]}"]
        else:
            found.append(f"    {line.strip()}")
    lines[:] = found


def setup(app):
    app.connect("autodoc-process-docstring", entries_as_definitions)
