"""The part of a compiled graph that belongs to one PLE layer, before and after the passes, as plain data.

Layers whose graphs are equal share one `Drawing`; what differs between them (names, where a lookup starts) is kept in
`LayerGraph`. It is small, so it is stored with the graph's report and is there on compile-cache hits.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

BEFORE, AFTER = "before", "after"

# A size is a number, or an expression in the symbols of a graph with dynamic shapes.
Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Symbol:
    """A size that varies: which argument of the compiled function holds it, and what the user calls it."""

    argument: int
    name: str


@dataclass(frozen=True)
class GraphNode:
    """A call inside the layer, or (target "input") a tensor that comes from outside.

    before, after: indices of its inputs in the graph before and after the passes; None where it is not in that graph.
    made_by, removed_by: the pass that did; empty for a node that was there before, or that stayed.
    launches: kernels when the graph is run op by op: none for views and single numbers, one for every other call.
    writes: whether its result is new memory, rather than a view of another.
    source: index in `Drawing.sources`, or -1. output: whether something outside the layer reads it.
    """

    target: str
    shape: Shape | None
    dtype: str
    device: str
    module: str = ""
    source: int = -1
    before: tuple[int, ...] | None = None
    after: tuple[int, ...] | None = None
    made_by: str = ""
    removed_by: str = ""
    launches: int = 0
    writes: bool = False
    output: bool = False

    def inputs(self, state: str) -> tuple[int, ...] | None:
        return self.before if state == BEFORE else self.after


@dataclass(frozen=True)
class Source:
    """A line of the user's code."""

    file: str
    line: int
    function: str
    code: str


@dataclass(frozen=True)
class Drawing:
    """Nodes in the order of the graph, inputs first; `omitted` counts nodes of a layer that is too large to keep."""

    nodes: tuple[GraphNode, ...]
    sources: tuple[Source, ...]
    omitted: int = 0

    def present(self, state: str) -> list[tuple[int, GraphNode]]:
        """(index, node) of the nodes before or after the passes."""
        return [(index, node) for index, node in enumerate(self.nodes) if node.inputs(state) is not None]

    def launches(self, state: str) -> int:
        return sum(node.launches for _, node in self.present(state))

    def collectives(self) -> dict[str, int]:
        """Collectives in each run of the graph, by op."""
        found: dict[str, int] = {}
        for _, node in self.present(AFTER):
            if node.target in COLLECTIVES or node.target.startswith("_c10d_functional.") and node.launches:
                found[node.target] = found.get(node.target, 0) + 1
        return found


# Ops of this package that talk to other ranks. The lookup that was not lowered runs its own collectives inside.
COLLECTIVES = ("ple.all_to_all_lookup.default", "ple.peer_lookup.default", "ple.sharded_lookup.default")


@dataclass(frozen=True)
class Prefetch:
    """A lookup that was split: the numbered layers in which its start and its wait lie (empty where none follows).

    launches: kernels between the two, run op by op; products: matrix products and convolutions among them.
    """

    start: str
    wait: str
    starts_in: str
    waits_in: str
    launches: int
    products: int


@dataclass(frozen=True)
class LayerGraph:
    """One PLE layer in one compiled graph. `layer`: its module path there; `names`: of the drawing's nodes."""

    layer: str
    drawing: Drawing
    names: tuple[str, ...]
    prefetches: tuple[Prefetch, ...] = ()


def to_dict(found: Sequence[LayerGraph]) -> dict[str, Any]:
    """Plain lists and dicts; each distinct drawing once, under "drawings"."""
    drawings = distinct(found)
    places = {drawing: index for index, drawing in enumerate(drawings)}
    layers = [
        {
            "layer": graph.layer,
            "drawing": places[graph.drawing],
            "names": list(graph.names),
            "prefetches": [dataclasses.asdict(prefetch) for prefetch in graph.prefetches],
        }
        for graph in found
    ]
    return {"drawings": [_drawing_to_dict(drawing) for drawing in drawings], "layer_graphs": layers}


def distinct(found: Iterable[LayerGraph]) -> list[Drawing]:
    """Each distinct drawing, in the order in which it is met."""
    return list(dict.fromkeys(graph.drawing for graph in found))


def from_dict(data: dict[str, Any]) -> list[LayerGraph]:
    """What `to_dict` wrote."""
    drawings = [_drawing_from_dict(drawing) for drawing in data["drawings"]]
    return [
        LayerGraph(
            layer["layer"],
            drawings[layer["drawing"]],
            tuple(layer["names"]),
            tuple(Prefetch(**prefetch) for prefetch in layer["prefetches"]),
        )
        for layer in data["layer_graphs"]
    ]


def _drawing_to_dict(drawing: Drawing) -> dict[str, Any]:
    nodes = [
        {name: list(value) if isinstance(value, tuple) else value for name, value in vars(node).items()}
        for node in drawing.nodes
    ]
    return {"nodes": nodes, "sources": [dict(vars(source)) for source in drawing.sources], "omitted": drawing.omitted}


def _drawing_from_dict(data: dict[str, Any]) -> Drawing:
    nodes = tuple(GraphNode(**{name: _tuple(value) for name, value in node.items()}) for node in data["nodes"])
    return Drawing(nodes, tuple(Source(**source) for source in data["sources"]), data["omitted"])


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
