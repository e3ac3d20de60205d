"""A report as one self-contained page: no script, no network, readable on a phone and in dark mode."""

import importlib.resources
from html import escape
from typing import TYPE_CHECKING

from ple_compile.page import sections
from ple_compile.page.pieces import pass_class
from ple_compile.pipeline import PASS_NAMES

if TYPE_CHECKING:
    from ple_compile.explain import Report

# The browser itself then refuses whatever would leave the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render(report: "Report") -> str:
    """The page of a report."""
    style = importlib.resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    hues = "".join(
        f".{pass_class(name)}{{--hue:{(205 + 360 * index // len(PASS_NAMES)) % 360}}}"
        for index, name in enumerate(PASS_NAMES)
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(report.model)}: ple-compile report</title>
<style>{style}{hues}</style>
</head>
<body>
<main>
{sections.render(report)}
</main>
</body>
</html>
"""
