"""Tracing a plain function of tensors into the middle of a graph."""

from collections.abc import Callable

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ple_compile import upstream
from ple_compile.matching.graph import aten, value


def inline(graph: Graph, anchor: Node, function: Callable[..., Tensor], inputs: list[Node]) -> Node:
    """Insert `function(*inputs)` before `anchor`, with the anchor's provenance; returns the node of its result."""
    examples = [value(node) for node in inputs]
    mode = upstream.detect_fake_mode(examples)
    with mode:
        traced = make_fx(function)(*examples)
    traced.graph.eliminate_dead_code()
    new = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs))
    with graph.inserting_before(anchor):
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                return new[node.args[0]]
            if node.target is aten.detach.default:  # what `view(dtype)` leaves behind; no gradient comes this way
                new[node] = new[node.args[0]]
                continue
            copy = new[node] = graph.node_copy(node, lambda n: new[n])
            for key in ("nn_module_stack", "stack_trace", "source_fn_stack", "original_aten"):
                copy.meta.pop(key, None)
                if key in anchor.meta:
                    copy.meta[key] = anchor.meta[key]
    raise AssertionError("a traced graph ends with its output")
