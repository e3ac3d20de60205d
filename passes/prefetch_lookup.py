"""Start the lookup in a host table one layer ahead.

Matches:
    rows = ple.lookup(table, ids)                             # table in page-locked host memory
Becomes:
    flight = ple.lookup_start(table, ids)                     # before the first node of the previous layer
    rows = ple.lookup_wait(flight, table, ids)                # at the lookup's old place

Whatever computes `ids` moves up with the start. Layers are the numbered modules of the model (`layers.0`, `layers.1`),
read off each node's module path; without them, or with the distance "earliest", the start goes where its ids first
exist. `lookup_wait` takes `table` and `ids` too, which keeps their memory from being reused while the side stream reads
it. Declines when the ids depend on a mutated input that the graph changes before the lookup.
"""

import re

from torch.fx import Graph, Node

from ple_compile.matching.graph import cone, insert
from ple_compile.ops.lookup import lookup
from ple_compile.ops.lookup_async import lookup_start, lookup_wait
from ple_compile.report import GraphReport

_LAYER = re.compile(r"^(.*?)\.(\d+)(?:\.|$)")


def prefetch_lookup(graph: Graph, report: GraphReport, *, prefetch_distance: int | str) -> int:
    """Split every lookup in a host table into start and wait; returns how many."""
    count = 0
    for node in graph.find_nodes(op="call_function", target=lookup):
        table, ids = node.args
        needed = cone([ids], set())
        mutated = [n for n in needed if n.is_impure()]
        if mutated:
            report.declined("prefetch_lookup", node, f"the ids depend on {mutated[0].name}, which writes to memory")
            continue
        anchor, where = _start_before(graph, node, prefetch_distance)
        first = min(anchor, node)
        late = [n for n in needed if first < n]
        for moved in late:
            first.prepend(moved)
        start = insert(graph, first, lookup_start, (table, ids))
        start.meta.update({k: v for k, v in node.meta.items() if k != "val"})
        wait = insert(graph, node, lookup_wait, (start, table, ids))
        node.replace_all_uses_with(wait)
        graph.erase_node(node)
        report.matched("prefetch_lookup", wait, where)
        count += 1
    return count


def _start_before(graph: Graph, node: Node, distance: int | str) -> tuple[Node, str]:
    """(the node before which the lookup starts, that place in words)."""
    earliest = next(n for n in graph.nodes if n.op != "placeholder")
    layer = _numbered_layer(node)
    if distance == "earliest":
        return earliest, "starts first in its graph"
    if layer is None:
        return earliest, "starts first in its graph, which shows no layers"
    container, number = layer
    wanted = (container, max(0, number - int(distance)))
    for candidate in graph.nodes:
        if candidate.op == "call_function" and _numbered_layer(candidate) == wanted:
            return candidate, f"starts with {container}.{wanted[1]}"
    return earliest, f"starts first in its graph, which has no {container}.{wanted[1]}"


def _numbered_layer(node: Node) -> tuple[str, int] | None:
    """("model.layers", 3) for a node of `model.layers.3`: the outermost numbered module that it comes from."""
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        found = _LAYER.match(_dotted(path))
        if found:
            return found.group(1), int(found.group(2))
    return None


def _dotted(path: str) -> str:
    """Dynamo's `L['self'].model.layers[0].ple` or `layers.0` as `model.layers.0.ple`."""
    path = re.sub(r"^L\['self'\]\.?", "", path)
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path).replace("._modules.", ".").lstrip(".")
