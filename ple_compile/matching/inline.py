"""Tracing a plain function of tensors, and putting what was traced into the middle of a graph."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import Graph, Node, map_arg
from torch.fx.experimental.proxy_tensor import make_fx

from ple_compile import upstream
from ple_compile.matching.graph import aten, value


def inline(graph: Graph, anchor: Node, function: Callable, args: Sequence) -> Any:
    """Insert `function(*args)` before `anchor`, with the anchor's provenance; returns the nodes of its results."""
    return insert_traced(graph, anchor, trace(function, args), args)


def trace(function: Callable, args: Sequence, decompositions: Mapping | None = None) -> Graph:
    """The graph of `function(*args)`; its placeholders are the nodes in `args`, each once."""
    inputs = nodes_in(args)

    def on_tensors(*tensors: Any) -> Any:
        given = dict(zip(inputs, tensors))
        return function(*map_arg(args, given.__getitem__))

    examples = [value(node) for node in inputs]
    with upstream.detect_fake_mode(examples):
        traced = make_fx(on_tensors, decompositions)(*examples).graph
    traced.eliminate_dead_code()
    return traced


def nodes_in(args: Sequence) -> list[Node]:
    """The nodes anywhere in `args`, in order, each once."""
    found: dict[Node, None] = {}
    map_arg(args, found.setdefault)
    return list(found)


def insert_traced(graph: Graph, anchor: Node, traced: Graph, args: Sequence) -> Any:
    """Insert what was traced, for the nodes in `args`, before `anchor`; returns the nodes of its results."""
    new = dict(zip(traced.find_nodes(op="placeholder"), nodes_in(args)))
    with graph.inserting_before(anchor):
        for node in traced.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                return map_arg(node.args[0], new.__getitem__)
            if node.target is aten.detach.default:  # what `view(dtype)` leaves behind; no gradient comes this way
                new[node] = new[node.args[0]]
                continue
            copy = new[node] = graph.node_copy(node, new.__getitem__)
            for key in ("nn_module_stack", "stack_trace", "source_fn_stack", "original_aten"):
                copy.meta.pop(key, None)
                if key in anchor.meta:
                    copy.meta[key] = anchor.meta[key]
    raise AssertionError("a traced graph ends with its output")
