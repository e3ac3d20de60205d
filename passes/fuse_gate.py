"""Fuse the gate and its three norms.

Matches:
    kn = norm(key) * (1 + norm_key_weight)                    # key, hidden [B, S, streams * H], norms per group of H
    qn = norm(hidden) * (1 + norm_query_weight)
    dot = aten.sum(kn * qn, [-1], True) / sqrt(H)
    gate = aten.sigmoid(sqrt(clamp_min(abs(dot), 1e-6)) * sign(dot))
    gated = gate * aten.unsqueeze(value, -2)                  # value [B, S, H]
    normed = norm(gated) * (1 + norm_conv_weight)
    gated, normed = gated * mask, normed * mask               # where the model masks both
Becomes:
    gated, normed = ple.gate(key, value, hidden, weights..., mask, eps, ...)

Declines when a norm's source or weight is not found, when something inside is read elsewhere (a hook, autograd), or
when the probe differs; a mask on one of the two only stays outside.
"""

import operator

from torch.fx import Graph, Node

from ple_compile.matching.candidates import accepted
from ple_compile.matching.gate import Gate, find_gates, verify
from ple_compile.matching.graph import aten, cone, erase_unused, insert, value
from ple_compile.ops.gate import gate as gate_op
from ple_compile.report import GraphReport


def fuse_gate(graph: Graph, report: GraphReport) -> int:
    """Rewrite every PLE gate; returns how many."""
    count = 0
    for node, gate in accepted(find_gates(graph), "fuse_gate", report, verify):
        _replace(graph, gate)
        report.matched("fuse_gate", node)
        count += 1
    return count


def _flat_weight(graph: Graph, before: Node, weight: Node) -> Node:
    return weight if value(weight).dim() == 1 else insert(graph, before, aten.reshape.default, (weight, [-1]))


def _replace(graph: Graph, gate: Gate) -> None:
    roots = [*gate.gated, gate.normed]
    inside = cone(roots, set(gate.leaves))
    before = gate.normed  # every leaf precedes it; earlier readers of the gated value are sorted behind it afterwards
    weights = [_flat_weight(graph, before, w) for w in gate.weights]
    tensors = [e for e in gate.eps if isinstance(e, Node)]
    values = [0.0 if isinstance(e, Node) else e for e in gate.eps]
    if tensors and len(tensors) != len(gate.eps):
        tensors = [e if isinstance(e, Node) else insert(graph, before, aten.full.default, ([], e)) for e in gate.eps]
    fused = insert(
        graph,
        before,
        gate_op,
        (gate.key, gate.value, gate.hidden, *weights, gate.mask, values, tensors, gate.gate_dtype),
    )
    gated = insert(graph, before, operator.getitem, (fused, 0))
    normed = insert(graph, before, operator.getitem, (fused, 1))
    for root in gate.gated:
        root.replace_all_uses_with(gated)
    gate.normed.replace_all_uses_with(normed)
    erase_unused(inside)
