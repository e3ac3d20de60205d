"""Fuse the gate and its three norms.

Matches:
    kn = norm(key) * (1 + norm_key_weight)                    # key, hidden [B, S, streams * H], norms per group of H
    qn = norm(hidden) * (1 + norm_query_weight)
    dot = aten.sum(kn * qn, [-1], True) / sqrt(H)
    gate = aten.sigmoid(sqrt(clamp_min(abs(dot), 1e-6)) * sign(dot))
    gated = gate * aten.unsqueeze(value, -2)                  # value [B, S, H]
    normed = norm(gated) * (1 + norm_conv_weight)
    gated, normed = gated * mask, normed * mask               # where the model masks both
with weights in the place of one more than them too; in any spelling, stream by stream too
Becomes:
    gated, normed = ple.gate(key, value, hidden, weights..., mask, eps, ...)

Declines when a norm's source or weight is not found, when something inside is read elsewhere (a hook, autograd), or
when the probe differs; a mask on one of the two only stays outside.
"""

import operator

from torch.fx import Graph, Node

from ple_compile.matching.candidates import accepted
from ple_compile.matching.gate import Gate, find_gates
from ple_compile.matching.graph import aten, cone, dims, erase_unused, insert, reshape_like, size_node, value
from ple_compile.ops.gate import gate as gate_op
from ple_compile.report import GraphReport


def fuse_gate(graph: Graph, report: GraphReport) -> int:
    """Rewrite every PLE gate; returns how many."""
    count = 0
    for node, gate in accepted(find_gates(graph), "fuse_gate", report):
        _replace(graph, gate)
        report.matched("fuse_gate", node)
        count += 1
    return count


def _replace(graph: Graph, gate: Gate) -> None:
    roots = [*gate.gated, gate.normed]
    inside = cone(roots, set(gate.leaves))
    before = gate.normed  # every leaf precedes it; earlier readers of the gated value are sorted behind it afterwards
    key, hidden = (_flat(graph, before, gate, node) for node in (gate.key, gate.hidden))
    weights = [_vector(graph, before, weight) for weight in gate.weights]
    tensors = [e for e in gate.eps if isinstance(e, Node)]
    values = [0.0 if isinstance(e, Node) else e for e in gate.eps]
    if tensors and len(tensors) != len(gate.eps):
        tensors = [e if isinstance(e, Node) else insert(graph, before, aten.full.default, ([], e)) for e in gate.eps]
    tensors_and_settings = (gate.mask, values, tensors, gate.gate_dtype, gate.plain)
    fused = insert(graph, before, gate_op, (key, gate.value, hidden, *weights, *tensors_and_settings))
    gated = insert(graph, before, operator.getitem, (fused, 0))
    normed = insert(graph, before, operator.getitem, (fused, 1))
    for root, result in [*((root, gated) for root in gate.gated), (gate.normed, normed)]:
        root.replace_all_uses_with(reshape_like(graph, before, result, root))
    erase_unused(inside)


def _flat(graph: Graph, before: Node, gate: Gate, node: Node) -> Node:
    """Key or hidden state as [..., streams * hidden]."""
    if dims(node) == (*gate.leading, gate.width):
        return node
    sizes = [size_node(graph, before, gate.value, dim) for dim in range(len(gate.leading))]
    return insert(graph, before, aten.reshape.default, (node, [*sizes, gate.width]))


def _vector(graph: Graph, before: Node, weight: Node) -> Node:
    return weight if value(weight).dim() == 1 else insert(graph, before, aten.reshape.default, (weight, [-1]))
