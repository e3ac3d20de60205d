"""Start the lookup in a host table one layer ahead.

Matches:
    rows = ple.lookup(table, ids)                             # table in page-locked host memory
Becomes:
    flight = ple.lookup_start(table, ids)                     # where the previous layer begins
    mm = control_deps((flight,), mm, ...)                     # that layer's first product
    ...
    mm_9 = mm(...)                                            # its last
    rows = control_deps((mm_9,), lookup_wait, flight, table, ids)

Whatever computes `ids` moves up with the start. The wait, with what is computed from rows and weights alone, moves down
to where the rows meet something newer than the start. Layers are the numbered modules of the model (`layers.0`,
`layers.1`), read off each node's module path; without them, or with the distance "earliest", the start goes where its
ids first exist.

The order of this graph says little about what runs: Inductor's scheduler reorders (for peak memory, for CUDA graph
partitions) whatever no dependence forbids. So the first product behind the start depends on the flight, and the wait on
the last product before it. Under CUDA graphs, start and wait must lie in one captured partition: the start depends on
every node before the wait that cannot be captured.

Declines when the ids are read later than a write to what they are computed from, when they write themselves or draw
random numbers, and when the table is written to between start and use.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._ordered_set import OrderedSet

from ple_compile import upstream
from ple_compile.matching.graph import (
    aten,
    calls,
    cone,
    insert,
    is_tensor,
    numbered_layer,
    open_inputs,
    origin,
    tensor_inputs,
    value,
)
from ple_compile.ops.lookup import lookup
from ple_compile.ops.lookup_async import lookup_start, lookup_wait
from ple_compile.report import GraphReport

# Nodes that Inductor runs as kernels of their own, so that others can be ordered against them.
_PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_mm.default,
    aten._grouped_mm.default,
}
_PROVENANCE = ("nn_module_stack", "stack_trace", "source_fn_stack", "original_aten")


@dataclass(frozen=True)
class _Prefetch:
    """A lookup that can be split.

    needed: what its ids need; anchor: the node before which it starts; sunk: it and what is computed from its rows and
    from nothing newer than the start; meeting: the node before which all that goes; not_captured: what must come before
    the start under CUDA graphs.
    """

    needed: list[Node]
    anchor: Node
    sunk: list[Node]
    meeting: Node
    not_captured: list[Node]


def prefetch_lookup(graph: Graph, report: GraphReport, *, prefetch_distance: int | str) -> int:
    """Split every lookup in a host table into start and wait; returns how many."""
    found = _find_prefetches(graph, report, prefetch_distance)
    order: dict[Node, OrderedSet] = {}
    # Each step for all of them: one lookup may be where another starts, and products move down with the waits.
    starts = [_start(graph, prefetch) for prefetch in found]
    waits = [_wait(graph, prefetch, start) for prefetch, start in zip(found, starts)]
    for prefetch, start, wait in zip(found, starts, waits):
        _hold_apart(order, prefetch, start, wait)
    upstream.preserve_node_ordering(graph, order)
    return len(found)


def _find_prefetches(graph: Graph, report: GraphReport, distance: int | str) -> list[_Prefetch]:
    found = []
    lookups = [node for node in graph.find_nodes(op="call_function", target=lookup) if node.users]
    hoisted = set(cone([node.args[1] for node in lookups], set()))
    for node in lookups:
        needed = cone([node.args[1]], set())
        anchor, where = _start_before(graph, node, distance, hoisted)
        not_captured = [n for n in _before(node) if n not in needed and _breaks_capture(n, value(node).device)]
        if not_captured and anchor <= not_captured[-1]:
            anchor = not_captured[-1].next
            where = f"starts after {not_captured[-1].name}, which CUDA graphs cannot hold"
        anchor = min(anchor, node)
        sunk, meeting = _sink(node, anchor)
        if reason := _reason_to_stay(node, needed, anchor, meeting):
            report.declined("prefetch_lookup", node, reason)
            continue
        report.matched("prefetch_lookup", node, where)
        found.append(_Prefetch(needed, anchor, sunk, meeting, not_captured))
    return found


def _start(graph: Graph, prefetch: _Prefetch) -> Node:
    """Put the start, and what its ids need, where the lookup starts."""
    anchor, node = prefetch.anchor, prefetch.sunk[0]
    while anchor in prefetch.needed:
        anchor = anchor.next
    for moved in prefetch.needed:
        if anchor < moved:
            anchor.prepend(moved)
    start = insert(graph, anchor, lookup_start, node.args)
    _copy_provenance(node, start)
    return start


def _wait(graph: Graph, prefetch: _Prefetch, start: Node) -> Node:
    """Put the wait, in the lookup's stead, and what it sinks with to where they meet something newer."""
    node, *dependent = prefetch.sunk
    wait = insert(graph, prefetch.meeting, lookup_wait, (start, *node.args))
    _copy_provenance(node, wait)
    for moved in dependent:
        prefetch.meeting.prepend(moved)
    node.replace_all_uses_with(wait)
    graph.erase_node(node)
    return wait


def _copy_provenance(node: Node, part: Node) -> None:
    part.meta.update({key: node.meta[key] for key in _PROVENANCE if key in node.meta})


def _hold_apart(order: dict[Node, OrderedSet], prefetch: _Prefetch, start: Node, wait: Node) -> None:
    """Note in `order` (node -> what it comes after) what keeps the scheduler from moving start and wait together."""
    products = [n for n in _before(wait) if start < n and calls(n, _PRODUCTS)]
    pairs = [(start, n) for n in prefetch.not_captured]
    if products:
        pairs += [(products[0], start), (wait, products[-1])]
    for node, earlier in pairs:
        order.setdefault(node, OrderedSet()).add(earlier)


def _start_before(graph: Graph, node: Node, distance: int | str, hoisted: set[Node]) -> tuple[Node, str]:
    """(the node before which the lookup starts, that place in words)."""
    earliest = next(n for n in graph.nodes if n.op != "placeholder")
    layer = numbered_layer(node)
    if distance == "earliest":
        return earliest, "starts first in its graph"
    if layer is None:
        return earliest, "starts first in its graph, which shows no layers"
    container, number = layer[0], layer[1] - int(distance)
    inside = [n for n in _before(node) if n not in hoisted and numbered_layer(n) == (container, number)]
    if not inside:
        return earliest, f"starts first in its graph, which has no {container}.{number}"
    # A lookup of its own, or what reads the layer before, begins the layer; constants may stand anywhere.
    entering = [n for n in inside if any(numbered_layer(i) == (container, number - 1) for i in tensor_inputs(n))]
    lookups = [n for n in inside if n.target is lookup] if entering else []
    return min([*lookups[:1], *entering[:1]] or inside), f"starts with {container}.{number}"


def _before(node: Node) -> list[Node]:
    """The calls ahead of `node` in its graph."""
    return [n for n in node.graph.nodes if n.op == "call_function" and n < node]


def _sink(node: Node, anchor: Node) -> tuple[list[Node], Node]:
    """A lookup and what is computed from its rows and nothing newer than `anchor`, then the first other reader."""
    written = set().union(*(_written(n) for n in node.graph.nodes))

    def is_old(source: Node) -> bool:
        base = origin(source)
        return (base.op in ("placeholder", "get_attr") or base < anchor) and base not in written

    sunk, others = {node}, []
    for reader in node.graph.nodes:
        if not sunk.intersection(reader.all_input_nodes):
            continue
        pure = reader.op == "call_function" and not reader.is_impure()
        if pure and all(n in sunk or is_old(n) for n in tensor_inputs(reader)):
            sunk.add(reader)
        else:
            others.append(reader)
    meeting = min(others, default=node.graph.output_node())
    return sorted(n for n in sunk if n < meeting), meeting


def _breaks_capture(node: Node, device: torch.device) -> bool:
    """Whether Inductor's CUDA graphs are split at this node."""
    if not upstream.inductor_config.triton.cudagraphs:
        return False
    if torch.Tag.cudagraph_unsafe in getattr(node.target, "tags", ()) or node.meta.get("unbacked_bindings"):
        return True
    return any(value(n).device != device for n in (node, *node.all_input_nodes) if is_tensor(n) and value(n).dim())


def _reason_to_stay(node: Any, needed: list[Node], anchor: Node, meeting: Node) -> str | None:
    table, ids = node.args
    for earlier in needed:
        if earlier.target is lookup:
            return f"the ids depend on the rows of another lookup, {earlier.name}"
        if earlier.is_impure() or torch.Tag.nondeterministic_seeded in getattr(earlier.target, "tags", ()):
            return f"the ids depend on {earlier.name}, which writes to memory or draws random numbers"
    read = set(open_inputs([ids], set()))
    for other in node.graph.nodes:
        written = _written(other)
        if written & read and anchor <= other < node:
            return f"{other.name} writes to what the ids are computed from, before the lookup"
        if table in written and anchor <= other < meeting:
            return f"{other.name} writes to the table between the lookup's start and its use"
    return None


def _written(node: Node) -> set[Node]:
    """The inputs of the graph that a node writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return set()
    arguments = [*zip(schema.arguments, node.args), *((a, node.kwargs.get(a.name)) for a in schema.arguments)]
    found = [a for argument, a in arguments if argument.alias_info is not None and argument.alias_info.is_write]
    return {_base(a) for a in torch.utils._pytree.tree_leaves(found) if isinstance(a, Node)}


def _base(node: Any) -> Any:
    """What a view is a view of."""
    while any(
        output.alias_info is not None for output in getattr(getattr(node.target, "_schema", None), "returns", ())
    ):
        node = node.args[0]
    return node
