"""Small pieces of HTML that several sections use."""

import os
from html import escape
from urllib.parse import quote

from ple_compile.layer_graphs import GraphNode
from ple_compile.report import DECLINED, MATCHED

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def editor_link(file: str, line: int) -> str:
    """Opens the line in an editor that registered the scheme, as VS Code does."""
    return f"vscode://file{quote(file if file.startswith('/') else f'/{file}')}:{line}"


def place_of(file: str, line: int) -> str:
    """The last two parts of a path, and the line: enough to know where one is."""
    return f"{os.sep.join(file.split(os.sep)[-2:])}:{line}"


def source_link(file: str, line: int) -> str:
    where = escape(f"{file}:{line}")
    return f'<a href="{escape(editor_link(file, line))}" title="{where}">{escape(place_of(file, line))}</a>'


def pass_class(name: str) -> str:
    """The class that carries a pass's colour."""
    return f"p-{name}" if name else "kept"


def pass_chip(name: str) -> str:
    return f'<span class="pass {pass_class(name)}">{escape(name)}</span>' if name else ""


def status_chip(status: str, words: str = "") -> str:
    kind = {MATCHED: "good", DECLINED: "bad"}.get(status, "neutral")
    return f'<span class="chip {kind}">{escape(words or status)}</span>'


def code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def layer_name(layer: str) -> str:
    """A layer's name as code that may break at its dots."""
    return code(layer or "the model").replace(".", ".<wbr>")


def arrow(before: object, after: object) -> str:
    return f'{before} <span class="arrow">→</span> {after}'


def size_text(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def facts(pairs: list[tuple[str, str]]) -> str:
    """A list of names with their values, which are HTML."""
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">{rows}</dl>' if rows else ""


def tensor_text(node: GraphNode) -> str:
    """`[2, s27, 128] bf16`"""
    if node.shape is None:
        return "several results"
    name = node.dtype.rstrip("0123456789")
    short = f"{_SHORT[name]}{node.dtype[len(name) :]}" if name in _SHORT else node.dtype
    return f"[{', '.join(map(str, node.shape))}] {short}"
