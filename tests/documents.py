"""The pages for people, as code: Python blocks that run in order, and commands that run somewhere.

Blocks of one page share a namespace. What a reader need not see (small sizes, stand-ins) is in HTML comments:

    <!--- invisible-code-block: python
    ...
    --->

and a block that needs a GPU, which tests/gpu runs and the other tests skip, is marked by the comment GPU_MARK.
"""

import pathlib
import re
import shlex
from unittest import SkipTest

import pytest
import torch
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

GPU_MARK = '<!--- skip: next if(no_gpu, reason="needs a GPU") --->'

# Measurements that the text names, and how the GPU tests run each: small, into a folder of their own.
GPU_COMMANDS = {
    "python benchmarks/kernels.py --peer DIR": "benchmarks/kernels.py --out OUT/kernels.json",
    "python benchmarks/layer.py --peer DIR": "benchmarks/layer.py --rows 100000 --tokens 1 --out OUT/layer.json",
    "python benchmarks/layer.py --tables transformers": (
        "benchmarks/layer.py --tables transformers --rows 100000 --tokens 1 --ways eager ours --out OUT/layer.json"
    ),
    "python benchmarks/host_table.py": "benchmarks/host_table.py --rows 1000000 --cache-percent 1 --out OUT/host.json",
    "python benchmarks/whole_model.py --variants eager stock ple ple_whole --prompts 2048 1 8192": (
        "benchmarks/whole_model.py --variants ple --prompts 1 --out OUT/whole.json"
    ),
    "python benchmarks/packed.py --peer DIR": "benchmarks/packed.py --out OUT/packed.json",
    "python benchmarks/load_tables.py --gib 16 --parts 128": (
        "benchmarks/load_tables.py --gib 1 --parts 8 --directory OUT/checkpoint --json OUT/load.json"
    ),
    "torchrun --nproc-per-node 2 -m benchmarks.etp": (
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.etp --rows 100001 --tokens 64"
    ),
}

_FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL)
_CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_STARTS_A_COMMAND = re.compile(r"^([A-Z_]+=\S+ )*(make|python|pytest|torchrun|pip|ruff|mypy) ")


def run_python(name: str, monkeypatch: pytest.MonkeyPatch, *, no_gpu: bool) -> int:
    """Run the Python blocks of a page in the current folder; returns how many ran.

    What a page must undo, whether its blocks succeed or not, it does through `monkeypatch`.
    """
    document = Document.parse(str(ROOT / name), PythonCodeBlockParser(), SkipParser())
    document.namespace.update(no_gpu=no_gpu, monkeypatch=monkeypatch, __name__="documentation")
    ran = 0
    with torch.set_grad_enabled(torch.is_grad_enabled()):  # as it was, whatever a page sets
        for example in document.examples():
            try:
                example.evaluate()
            except SkipTest:
                continue
            ran += 1
    return ran


def blocks(name: str) -> list[tuple[str, str]]:
    """(language, text) of every fenced block of a page."""
    found = _FENCE.finditer((ROOT / name).read_text())
    return [(block["language"].strip(), block["text"]) for block in found]


def prose(name: str) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", (ROOT / name).read_text())


def commands(name: str) -> list[str]:
    """The lines of a page's `bash` blocks, without what is said about them."""
    lines = [line for language, text in blocks(name) if language == "bash" for line in text.splitlines()]
    return [" ".join(shlex.split(line, comments=True)) for line in lines if shlex.split(line, comments=True)]


def mentioned_commands(name: str) -> list[str]:
    """Commands that stand in a sentence."""
    return [span for span in _CODE_SPAN.findall(prose(name)) if _STARTS_A_COMMAND.match(span)]
