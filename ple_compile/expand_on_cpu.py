"""On a CPU, the fused ops as the plain PyTorch that defines them, from which Inductor makes C++.

Becomes, for each op whose tensors are on the CPU (the references are traced, `ple_compile/ops`):
    ids = ple.ngram_ids(...)                  remainders of an xor of products, without cummax and gather
    kv = ple.kv_proj(x, key_weight, ...)      two matrix products; the weights stay apart
    gated, normed = ple.gate(...)             norms, sigmoid and products
    y = ple.short_conv(...)                   a sum over taps, which fuses with what surrounds it; eager's depthwise
                                              convolution is a library call between two transposes

This comes after all passes: what they match, count and report is what it is on a GPU. Left alone are ops that read
values on the host or talk to other ranks, ops on data-dependent sizes, and 16-bit ones where Inductor's C++ does not
round between ops as eager does (`rounding`): those run as they are, op by op.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ple_compile import upstream
from ple_compile.matching.graph import aten, calls, tensor_inputs, value
from ple_compile.matching.inline import insert_traced, trace
from ple_compile.matching.repeats import asked_once, signature
from ple_compile.ops import (
    dequantized_lookup,
    gate,
    gate_conv,
    kv_proj,
    ngram_ids,
    packed_gate_conv,
    packed_ngram_ids,
    packed_short_conv,
    short_conv,
)

EXPANSIONS: dict[Any, Callable] = {
    ngram_ids.ngram_ids: ngram_ids.reference,
    packed_ngram_ids.packed_ngram_ids: packed_ngram_ids.reference,
    dequantized_lookup.dequantized_lookup: dequantized_lookup.dequantized,
    kv_proj.kv_proj: kv_proj.apart,
    gate.gate: gate.reference,
    short_conv.short_conv: short_conv.reference,
    packed_short_conv.packed_short_conv: packed_short_conv.reference,
    gate_conv.gate_conv: gate_conv.reference,
    gate_conv.gate_conv_update: gate_conv.reference_update,
    gate_conv.gate_conv_update_: gate_conv.reference_update_,
    packed_gate_conv.packed_gate_conv_: packed_gate_conv.reference,
}

_SIXTEEN_BITS = {torch.bfloat16, torch.float16}


def rounding(gm: GraphModule) -> dict[str, Any]:
    """Inductor's options for a Dynamo graph: C++ for 16-bit types that rounds between ops as eager does."""
    values = upstream.tree_leaves([node.meta.get("example_value") for node in gm.graph.nodes])
    tensors = [x for x in values if isinstance(x, Tensor)]
    on_cpu = all(x.device.type == "cpu" for x in tensors)
    return {"emulate_precision_casts": True} if on_cpu and _SIXTEEN_BITS & {x.dtype for x in tensors} else {}


def expand_on_cpu(graph: Graph) -> None:
    """Replace every fused op on the CPU by its traced reference."""
    decompositions = {**upstream.decompositions(), aten.convolution.default: _tap_by_tap}
    with upstream.no_dispatch_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        for node in [node for node in graph.nodes if calls(node, EXPANSIONS) and _applies(node)]:
            ask = partial(trace, EXPANSIONS[node.target], node.args, decompositions)
            traced = asked_once(graph, signature([node]), ask)
            _replace(graph, node, insert_traced(graph, node, traced, node.args))


def _applies(node: Node) -> bool:
    tensors = [value(n) for n in tensor_inputs(node)]
    if any(t.device.type != "cpu" for t in tensors):
        return False
    if any(upstream.is_unbacked(size) for t in tensors for size in t.shape):
        return False
    dtypes = {t.dtype for t in tensors} | {x for x in node.args if isinstance(x, torch.dtype)}
    return not _SIXTEEN_BITS & dtypes or upstream.cpp_rounds_as_eager()


def _replace(graph: Graph, node: Node, results: Any) -> None:
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
    for part in list(node.users):
        part.replace_all_uses_with(results[_index(part)])
        graph.erase_node(part)
    graph.erase_node(node)


def _index(part: Node) -> int:
    """Which of several results `part` is; of `kv_proj` a slice, the first or the second."""
    index: Any = part.args[1]
    if calls(part, {operator.getitem}):
        return index
    start: Any = part.args[2]
    return int(start > 0)


def _tap_by_tap(
    x: Tensor, weight: Tensor, bias: None, stride: Any, padding: Any, dilation: list[int], *_: Any
) -> Tensor:
    """The depthwise convolution, accumulated in float32 as eager's is."""
    taps = weight if weight.dtype == torch.float64 else weight.float()
    length = x.shape[-1] - (taps.shape[-1] - 1) * dilation[0]
    products = [x[..., tap * dilation[0] :][..., :length] * taps[..., tap] for tap in range(taps.shape[-1])]
    return sum(products[1:], products[0]).to(x.dtype)
