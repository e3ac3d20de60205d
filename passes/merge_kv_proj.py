"""Project key and value in one matrix product.

Matches:
    key = aten.mm(x, key_weight^T)                            # both feed one ple.gate
    value = aten.mm(x, value_weight^T)
Becomes:
    kv = ple.kv_proj(x, key_weight, value_weight)             # the op lets both weights share one storage
    key, value = kv[..., :C], kv[..., C:]

Declines when a projection has a bias, when the weights are one tensor, differ in type, are computed in the graph
(autocast) or cannot share one storage (tied by a view, say), when the two projections read different inputs, and while
gradients are recorded. A model that has one product for both already is left alone.
"""

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from ple_compile import upstream
from ple_compile.matching.candidates import Declined
from ple_compile.matching.graph import LAYOUT, aten, calls, dims, erase_unused, insert, source, value
from ple_compile.merged_weights import why_never
from ple_compile.ops.gate import gate as gate_op
from ple_compile.ops.kv_proj import kv_proj
from ple_compile.report import GraphReport

PARTS = {aten.slice.Tensor, aten.split_with_sizes.default, aten.split.Tensor}


def merge_kv_proj(graph: Graph, report: GraphReport, *, training: bool, inputs: Sequence[Any] = ()) -> int:
    """Merge the projections in front of every fused gate; returns how many. `inputs` are the Dynamo graph's."""
    count = 0
    for gate in graph.find_nodes(op="call_function", target=gate_op):
        key, val = gate.args[0], gate.args[1]
        if _whole(key) is not None and _whole(key) is _whole(val):
            report.not_applicable("merge_kv_proj", gate, "the model projects key and value in one matrix product")
            continue
        try:
            if training:
                raise Declined("gradients are recorded")
            x, key_weight = _projection(key, "key")
            other, value_weight = _projection(val, "value")
            _check_pair(x, other, key_weight, value_weight)
            reason = why_never(_weight(key_weight, inputs), _weight(value_weight, inputs))
            if reason is not None:
                raise Declined(f"the weights cannot share one storage: {reason}")
        except Declined as reason:
            product = source(key)
            report.declined("merge_kv_proj", product if product.op == "call_function" else gate, str(reason))
            continue
        width, last = dims(key)[-1], value(key).dim() - 1
        first = min(key, val)
        kv = insert(graph, first, kv_proj, (x, key_weight, value_weight))
        total = width + dims(val)[-1]
        for node, start, stop in ((key, 0, width), (val, width, total)):
            part = insert(graph, first, aten.slice.Tensor, (kv, last, start, stop))
            node.replace_all_uses_with(part)
        erase_unused([key, val])
        report.matched("merge_kv_proj", gate)
        count += 1
    return count


def _whole(node: Node) -> Node | None:
    """The matrix product that `node` is a part of."""
    part = source(node)
    if calls(part, {operator.getitem}):
        part = part.args[0]
    whole = source(part.args[0]) if calls(part, PARTS) else None
    return whole if calls(whole, {aten.mm.default, aten.addmm.default}) else None


def _projection(node: Node, name: str) -> tuple[Node, Node]:
    """(input [..., E], weight placeholder [out, E]) of a projection."""
    product = source(node)
    if calls(product, {aten.addmm.default}):
        raise Declined(f"{name}_proj has a bias")
    if not calls(product, {aten.mm.default}):
        raise Declined(f"the {name} at {node.name} is no matrix product of its own")
    weight = product.args[1]
    if calls(weight, {aten.permute.default, aten.t.default}):
        weight = weight.args[0]
    if weight.op not in ("placeholder", "get_attr"):
        raise Declined(f"the weight of {name}_proj is computed in the graph ({weight.format_node()})")
    rows = product.args[0]
    wanted = dims(node)[:-1] + dims(rows)[-1:]
    steps = rows
    while calls(steps, LAYOUT) and dims(steps) != wanted:
        steps = steps.args[0]
    return (steps if dims(steps) == wanted else rows), weight


def _check_pair(x: Node, other: Node, key_weight: Node, value_weight: Node) -> None:
    if x is not other:
        raise Declined(f"key and value project different inputs ({x.name}, {other.name})")
    if key_weight is value_weight:
        raise Declined("key and value share one weight")
    if value(key_weight).dtype != value(value_weight).dtype:
        raise Declined(f"the weights differ in type: {value(key_weight).dtype} and {value(value_weight).dtype}")


def _weight(node: Node, inputs: Sequence[Any]) -> Tensor:
    """The parameter itself where it is known: a fake tensor does not say how large the storage is that it lies in."""
    index = upstream.input_index(node) if node.op == "placeholder" else None
    return inputs[index] if index is not None and index < len(inputs) else value(node)
