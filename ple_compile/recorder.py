"""Watches the passes at work on one graph, and keeps what happened in its PLE layers.

Which nodes belong to a PLE layer follows from where the passes found something: the module that all of it is in. A
node's own module path decides, then its neighbours, for nodes that a pass made or that carry no path.
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ple_compile import upstream
from ple_compile.layer_graphs import Drawing, GraphNode, LayerGraph, Prefetch, Shape, Source, Symbol
from ple_compile.matching.graph import is_inside, layer_of, numbered_layer
from ple_compile.node_facts import innermost_source, launches, looks_up, returns_tensors, target_name, writes
from ple_compile.report import Event

# A layer of any known model has fewer than 300; a graph that shows no modules may be a whole model.
MAX_NODES = 600

_LOOKUPS = ("fuse_ngram_ids", "fuse_lookup", "prefetch_lookup", "lower_lookup")
_GATES = ("fuse_gate", "merge_kv_proj", "merge_gate_conv")
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.convolution.", "ple.kv_proj.")


class Recorder:
    """Made before the passes run; `after` is called when one has changed the graph, `layers` at the end."""

    def __init__(self, graph: Graph, input_names: Sequence[str] = ()):
        self.graph = graph
        self.input_names = input_names
        self.inputs = {node: node.all_input_nodes for node in graph.nodes}
        self.before = list(graph.nodes)
        # An erased node forgets its inputs.
        self.made_from: dict[Node, list[Node]] = {}
        self.made_by: dict[Node, str] = {}
        self.removed_by: dict[Node, str] = {}
        self._now = set(self.before)
        self._last = ""
        self._sources: dict[str, Source | None] = {}
        self._sizes: dict[Any, int | str] = {}

    def after(self, pass_name: str) -> None:
        """Note which nodes a pass made and removed."""
        self._last, now = pass_name, set(self.graph.nodes)
        if new := now - self._now:
            for node in self.graph.nodes:
                if node in new:
                    self.made_by[node], self.made_from[node] = pass_name, node.all_input_nodes
        self.removed_by.update(dict.fromkeys(self._now - now, pass_name))
        self._now = now

    def symbols(self) -> dict[str, Symbol]:
        """Where each symbolic size comes from."""
        found: dict[str, Symbol] = {}
        for node in self.graph.find_nodes(op="placeholder"):
            val, index = node.meta.get("val"), upstream.input_index(node)
            if isinstance(val, torch.SymInt) and index is not None and isinstance(size := self._size(val), str):
                found.setdefault(size, Symbol(index, self._outside_name(node, "")))
        return found

    def layers(self, events: Iterable[Event]) -> list[LayerGraph]:
        """The graph of every PLE layer in which a pass found something."""
        readers = self._readers(self.before)
        self._drop_unread(readers)
        layers = _layer_paths(events)
        owners = self._owners(layers) if layers else {}
        members: dict[str, list[Node]] = {layer: [] for layer in layers}
        for node, layer in owners.items():
            members[layer].append(node)
        tables = {node.args[0] for node in self.before if node.op == "call_function" and looks_up(node)}
        found = [self._layer_graph(layer, nodes, owners, readers, tables) for layer, nodes in members.items() if nodes]
        drawings: dict[Drawing, Drawing] = {}
        return [dataclasses.replace(part, drawing=drawings.setdefault(part.drawing, part.drawing)) for part in found]

    def _drop_unread(self, readers: dict[Node, list[Node]]) -> None:
        """What nobody reads any more counts as removed with its last reader: Inductor removes it next."""
        for node in reversed(self.graph.nodes):
            unread = all(reader not in self._now for reader in node.users)
            if self._last and unread and readers.get(node) and node.op == "call_function" and not node.is_impure():
                self._now.remove(node)
                removed = [self.removed_by[reader] for reader in readers[node] if reader in self.removed_by]
                self.removed_by[node] = removed[-1] if removed else self._last

    def _owners(self, layers: list[str]) -> dict[Node, str]:
        """Calls that return tensors, in order, each with the layer that it belongs to."""
        everything = [*self.before, *self.made_by]
        calls = [node for node in everything if node.op == "call_function" and returns_tensors(node)]
        owners: dict[Node, str] = {}
        innermost: dict[str, str | None] = {}  # of the layers that a module path lies in
        for node in calls:
            path = layer_of(node)
            if path not in innermost:
                innermost[path] = max((layer for layer in layers if is_inside(path, layer)), key=len, default=None)
            if (owner := innermost[path]) is not None:
                owners[node] = owner
        changed = {*self.made_by, *self.removed_by}
        for node in calls:
            if node in changed and node not in owners:
                near = [owners[n] for n in self._inputs_of(node) if n in owners]
                if near and is_inside(near[0], layer_of(node)):
                    owners[node] = near[0]
        readers = self._readers([n for n in calls if n not in owners and (n in changed or not layer_of(n))])
        for node in reversed(list(readers)):
            reading = {owners.get(reader) for reader in readers[node]}
            if len(reading) == 1 and (only := reading.pop()) is not None:
                owners[node] = only
        return {node: owners[node] for node in calls if node in owners}

    def _inputs_of(self, node: Node) -> list[Node]:
        """A node's inputs when it was first seen."""
        return self.inputs[node] if node in self.inputs else self.made_from[node]

    def _readers(self, nodes: list[Node]) -> dict[Node, list[Node]]:
        """Who reads `nodes` before the passes."""
        readers: dict[Node, list[Node]] = {node: [] for node in nodes}
        for reader, inputs in self.inputs.items():
            for node in inputs:
                if node in readers:
                    readers[node].append(reader)
        return readers

    def _ever_reading(self, node: Node, readers: dict[Node, list[Node]]) -> Iterable[Node]:
        """Who reads `node`, before the passes or after them."""
        return [*readers.get(node, ()), *(node.users if node in self._now else ())]

    def _layer_graph(
        self, layer: str, nodes: list[Node], owners: dict[Node, str], readers: dict[Node, list[Node]], tables: set
    ) -> LayerGraph:
        kept = self._nearest(nodes)
        members = set(kept)
        edges = {node: self._edges(node) for node in kept}
        outside = [n for both in edges.values() for inputs in both for n in inputs or () if n not in members]
        outside = list(dict.fromkeys(outside))
        places = {node: index for index, node in enumerate([*outside, *kept])}
        sources: dict[Source, int] = {}
        described = [self._input(node, edges.values(), node in tables) for node in outside]
        for node in kept:
            before, after = (
                None if inputs is None else tuple(places[n] for n in inputs if n in places) for inputs in edges[node]
            )
            source = self._source(node)
            described.append(
                GraphNode(
                    target=target_name(node),
                    **self._tensor(node),
                    module=_module_in(layer_of(node), layer),
                    source=-1 if source is None else sources.setdefault(source, len(sources)),
                    before=before,
                    after=after,
                    made_by=self.made_by.get(node, ""),
                    removed_by=self.removed_by.get(node, ""),
                    launches=int(launches(node)),
                    writes=writes(node, self._inputs_of(node)),
                    output=any(owners.get(n) != layer for n in self._ever_reading(node, readers)),
                )
            )
        drawing = Drawing(tuple(described), tuple(sources), len(nodes) - len(kept))
        names = [self._outside_name(node, layer) for node in outside] + [node.name for node in kept]
        return LayerGraph(layer, drawing, tuple(names), tuple(self._prefetches(kept, owners)))

    def _edges(self, node: Node) -> tuple[list[Node] | None, list[Node] | None]:
        """Inputs that are tensors, before and after the passes."""
        before, after = self.inputs.get(node), node.all_input_nodes if node in self._now else None
        return tuple(  # type: ignore[return-value]
            None if inputs is None else [n for n in inputs if returns_tensors(n)] for inputs in (before, after)
        )

    def _input(
        self, node: Node, edges: Iterable[tuple[list[Node] | None, list[Node] | None]], is_table: bool
    ) -> GraphNode:
        before, after = zip(*edges)
        states = [() if any(node in inputs for inputs in state if inputs) else None for state in (before, after)]
        tensor = self._tensor(node)
        if is_table:  # each layer's table has another number of rows, which is all that would tell layers apart
            tensor["shape"] = ("rows", *tensor["shape"][1:])
        return GraphNode("input", **tensor, before=states[0], after=states[1])

    def _outside_name(self, node: Node, layer: str) -> str:
        index = upstream.input_index(node) if node.op == "placeholder" else None
        if index is None or index >= len(self.input_names):
            return node.name
        return _relative(self.input_names[index], layer)

    def _nearest(self, nodes: list[Node]) -> list[Node]:
        """At most MAX_NODES of `nodes`: those that a pass changed, and then the nearest to them."""
        if len(nodes) <= MAX_NODES:
            return nodes
        inside = set(nodes)
        neighbours: dict[Node, list[Node]] = {node: [] for node in nodes}
        for node in nodes:
            for source in self._inputs_of(node):
                if source in inside:
                    neighbours[node].append(source)
                    neighbours[source].append(node)
        reached = dict.fromkeys(n for n in nodes if n in self.made_by or n in self.removed_by)
        frontier = list(reached)
        while frontier and len(reached) < MAX_NODES:
            new = [n for node in frontier for n in neighbours[node] if n not in reached]
            reached.update(dict.fromkeys(new))
            frontier = list(dict.fromkeys(new))
        kept = set(list(reached)[:MAX_NODES])
        return [node for node in nodes if node in kept]

    def _tensor(self, node: Node) -> dict[str, Any]:
        val = node.meta["val"]
        if not isinstance(val, torch.Tensor):
            return {"shape": None, "dtype": "", "device": ""}
        dtype = str(val.dtype).removeprefix("torch.")
        return {"shape": self._shape(val), "dtype": dtype, "device": str(val.device)}

    def _shape(self, tensor: torch.Tensor) -> Shape:
        return tuple(self._size(size) if isinstance(size, torch.SymInt) else int(size) for size in tensor.shape)

    def _size(self, size: torch.SymInt) -> int | str:
        key = size.node.expr
        if key not in self._sizes:
            self._sizes[key] = upstream.size_in_symbols(size)
        return self._sizes[key]

    def _source(self, node: Node) -> Source | None:
        trace = node.meta.get("stack_trace") or ""
        if trace not in self._sources:
            self._sources[trace] = innermost_source(trace)
        return self._sources[trace]

    def _prefetches(self, nodes: list[Node], owners: dict[Node, str]) -> Iterable[Prefetch]:
        waits = [n for n in nodes if n in self._now and target_name(n) == "ple.lookup_wait.default"]
        if not waits:
            return
        order = [n for n in self.graph.nodes if n.op == "call_function"]
        places = {node: index for index, node in enumerate(order)}
        for wait in waits:
            start = next(n for n in wait.all_input_nodes if target_name(n) == "ple.lookup_start.default")
            between = order[places[start] + 1 : places[wait]]
            # Other PLE layers' ids and starts may have moved to the same place.
            yield Prefetch(
                start.name,
                wait.name,
                _first_layer(n for n in order[places[start] + 1 :] if n not in owners or n is wait),
                _first_layer(order[places[wait] :]),
                sum(launches(n) for n in between if returns_tensors(n)),
                sum(target_name(n).startswith(_PRODUCTS) for n in between),
            )


def _first_layer(nodes: Iterable[Node]) -> str:
    found = next(filter(None, map(numbered_layer, nodes)), None)
    return f"{found[0]}.{found[1]}" if found else ""


def _layer_paths(events: Iterable[Event]) -> list[str]:
    """Module paths of the PLE layers, told by where passes found something: one in each numbered layer."""
    groups: dict[str, list[Event]] = {}
    for event in events:
        found = re.match(r"(.*?\.\d+)(\.|$)", event.layer)
        groups.setdefault(found.group(1) if found else "", []).append(event)
    paths = [path for inside in groups.values() if (path := _common_path(inside)) is not None]
    # Where modules are told apart, a path that says nothing does not stand for the whole model.
    return paths if paths == [""] else [path for path in dict.fromkeys(paths) if path]


def _common_path(events: list[Event]) -> str | None:
    """What all places have in common; above a lookup's embedding and its owner where there are lookups alone."""
    # Models have other short convolutions, which a pass looks at too.
    told = [e.layer for e in events if e.pass_name in _LOOKUPS + _GATES]
    if not told:
        return None
    parts = [path.split(".") for path in told]
    common = os.path.commonprefix(parts)
    if not any(e.pass_name in _GATES for e in events):
        numbered = max((index + 1 for index, part in enumerate(common) if part.isdigit()), default=0)
        common = common[: max(len(common) - 2, numbered)]
    return ".".join(common)


def _module_in(path: str, layer: str) -> str:
    """A module path seen from a layer: below it, or `..` where it holds the layer, as that of its residual sum does."""
    above = path != layer and path and is_inside(layer, path)
    return ".." if above else _relative(path, layer)


def _relative(path: str, layer: str) -> str:
    """A module path, or an input's name, without its layer's and without Dynamo's name of the first local."""
    if layer.startswith("L['") and is_inside(path, layer):
        return path[len(layer) + 1 :]
    path = re.sub(r"^L\['(?:self'\]|args'\]\[0\])(?:\.|$)", "", path)
    if layer and is_inside(path, layer):
        return path[len(layer) + 1 :]
    path = re.sub(r"\.size\(\)\[(\d+)\]$", r".size(\1)", path)
    return re.sub(r"^L\['(\w+)'\]", r"\1", path)
