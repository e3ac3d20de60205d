"""Launches and intermediate bytes of a layer before and after the passes, from shapes alone.

Run op by op, a call that computes is one launch and writes its result to memory once. What Inductor fuses on either
side is not counted, so these are figures of the graph, not measurements.
"""

import ast
import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ple_compile.layer_graphs import AFTER, BEFORE, Drawing, GraphNode

_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


@dataclass(frozen=True)
class Savings:
    """`bytes_*` is None where a size is not known; `formula` is the difference, in the symbols of the graph."""

    launches_before: int
    launches_after: int
    bytes_before: int | None
    bytes_after: int | None
    formula: str


def savings(drawing: Drawing, sizes: dict[str, int]) -> Savings:
    """What a drawing's passes save at the given symbolic sizes."""
    before, after = (_written(drawing, state) for state in (BEFORE, AFTER))
    return Savings(
        drawing.launches(BEFORE),
        drawing.launches(AFTER),
        _total(before, sizes),
        _total(after, sizes),
        _formula(before, after),
    )


def evaluate(size: int | str, sizes: dict[str, int]) -> int | None:
    """A size at given symbols; None where a symbol is not known, or the expression is more than integer arithmetic."""
    if isinstance(size, int):
        return size
    try:
        return _evaluate(_parsed(size), sizes)
    except (SyntaxError, KeyError, ZeroDivisionError):
        return None


@functools.lru_cache(4096)
def _parsed(size: str) -> ast.expr:
    return ast.parse(size, mode="eval").body


def _evaluate(node: ast.expr, sizes: dict[str, int]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return sizes[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_evaluate(left, sizes), _evaluate(right, sizes))
        case ast.UnaryOp(op=op, operand=operand):
            return _OPERATORS[type(op)](_evaluate(operand, sizes))
    raise KeyError(type(node))


def nbytes(node: GraphNode, sizes: dict[str, int]) -> int | None:
    """Bytes of a node's tensor."""
    dims = [evaluate(size, sizes) for size in node.shape or ()]
    known = [dim for dim in dims if dim is not None]
    return math.prod(known) * _itemsize(node) if len(known) == len(dims) else None


def _itemsize(node: GraphNode) -> int:
    return getattr(torch, node.dtype).itemsize


def _written(drawing: Drawing, state: str) -> list[GraphNode]:
    return [node for _, node in drawing.present(state) if node.writes]


def _total(nodes: list[GraphNode], sizes: dict[str, int]) -> int | None:
    found = [nbytes(node, sizes) for node in nodes]
    return None if None in found else sum(filter(None, found))


def _formula(before: list[GraphNode], after: list[GraphNode]) -> str:
    """Bytes before less bytes after, as a sum: numbers multiplied out, symbolic sizes as they are, largest first."""
    terms: dict[str, int] = {}
    for sign, nodes in ((1, before), (-1, after)):
        for node in nodes:
            dims = node.shape or ()
            key = " · ".join(sorted(factor for dim in dims if isinstance(dim, str) for factor in _factors(dim)))
            terms[key] = terms.get(key, 0) + sign * math.prod(d for d in dims if isinstance(d, int)) * _itemsize(node)
    ordered = sorted(((count, symbols) for symbols, count in terms.items() if count), reverse=True)
    parts = [f"{count:,} · {symbols}" if symbols else f"{count:,}" for count, symbols in ordered]
    return " + ".join(parts).replace("+ -", "- ") or "0"


def _factors(size: str) -> list[str]:
    """`s0*s1` as two factors; a sum as one, in brackets."""
    if size.replace("*", "").isidentifier():
        return size.split("*")
    return [size if size.isidentifier() else f"({size})"]
