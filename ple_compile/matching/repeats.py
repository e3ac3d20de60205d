"""Parts of a graph repeat each other: what was found out about one holds for every equal one, and some are made one."""

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import torch
from torch.fx import Graph, Node, map_arg

from ple_compile import upstream
from ple_compile.matching.graph import is_tensor

Answer = TypeVar("Answer")

_answers: "weakref.WeakKeyDictionary[Graph, dict[Hashable, Any]]" = weakref.WeakKeyDictionary()


def asked_once(graph: Graph, question: Hashable, ask: Callable[[], Answer]) -> Answer:
    """What `ask()` returns, or has returned for an equal question about this graph; it may raise each time."""
    known = _answers.setdefault(graph, {})
    if question not in known:
        known[question] = ask()
    return known[question]


def merge_equal(graph: Graph, admits: Callable[[Node], bool]) -> None:
    """Let the first of several equal calls that `admits` accepts stand for the others."""
    first: dict[Hashable, Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and is_tensor(node) and admits(node):
            known = first.setdefault((node.target, repr((node.args, node.kwargs))), node)
            if known is not node:
                node.replace_all_uses_with(known)
                graph.erase_node(node)


def signature(nodes: Iterable[Node], *roles: Any) -> Hashable:
    """Equal for equal nodes, in graph order, on inputs of equal metadata, which play equal parts in `roles`."""
    names: dict[Node, str] = {}
    lines: list[Hashable] = []
    for node in nodes:
        for each in (*node.all_input_nodes, node):
            if each not in names and (each is node or is_tensor(each)):
                names[each] = f"%{len(names)}"
                lines.append(_described(each.meta.get("val")))
        lines.append((node.target, _named((node.args, node.kwargs), names)))
    return tuple(lines), _named(roles, names)


def _named(values: Any, names: dict[Node, str]) -> str:
    return repr(map_arg(values, lambda node: names.get(node, node.name)))


def _described(val: Any) -> Hashable:
    if not isinstance(val, torch.Tensor):
        return type(val)
    return val.dtype, val.device, tuple(upstream.as_written(size) for size in (*val.shape, *val.stride()))
