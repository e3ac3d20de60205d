"""What the passes did to one graph, and how it is told."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ple_compile import layer_graphs
from ple_compile.layer_graphs import LayerGraph, Symbol
from ple_compile.table_reads import TableRead

MATCHED, DECLINED, NOT_APPLICABLE = "matched", "declined", "not applicable"


@dataclass(frozen=True)
class Event:
    """One pass at one place: `status` is matched, declined (with the guard's reason) or not applicable."""

    pass_name: str
    status: str
    layer: str
    reason: str = ""
    node: str = ""
    source: str = ""


@dataclass
class GraphReport:
    """All events of one compiled graph, how many complete PLE layers run in it, and why the graph ended there.

    layer_graphs: its PLE layers before and after the passes. symbols: where each symbolic size comes from; sizes: their
    values in one call, known where `explain` has watched it. reads: its lookups in n-gram tables.
    """

    events: list[Event] = field(default_factory=list)
    ple_layers: int = 0
    graph_break: str = ""
    layer_graphs: list[LayerGraph] = field(default_factory=list)
    symbols: dict[str, Symbol] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    reads: list[TableRead] = field(default_factory=list)

    def matched(self, pass_name: str, node: Any, reason: str = "") -> None:
        self._add(pass_name, MATCHED, node, reason)

    def declined(self, pass_name: str, node: Any, reason: str) -> None:
        self._add(pass_name, DECLINED, node, reason)

    def not_applicable(self, pass_name: str, node: Any, reason: str) -> None:
        self._add(pass_name, NOT_APPLICABLE, node, reason)

    def switched_off(self, pass_name: str, reason: str) -> None:
        self.events.append(Event(pass_name, NOT_APPLICABLE, "", reason))

    def _add(self, pass_name: str, status: str, node: Any, reason: str) -> None:
        from ple_compile.matching.graph import layer_of, source_line

        self.events.append(Event(pass_name, status, layer_of(node), reason, node.name, source_line(node)))

    def counts(self) -> dict[str, int]:
        """Rewrites per pass."""
        found: dict[str, int] = {}
        for event in self.events:
            if event.status == MATCHED:
                found[event.pass_name] = found.get(event.pass_name, 0) + 1
        return found

    def lowerings(self) -> dict[str, str]:
        """What each lookup in a sharded table was lowered to, by the name of its node."""
        return {e.node: e.reason for e in self.events if (e.pass_name, e.status) == ("lower_lookup", MATCHED)}

    def declines(self) -> list[Event]:
        return [event for event in self.events if event.status == DECLINED]

    def to_dict(self) -> dict[str, Any]:
        """What is stored with the compiled graph: all but what one call adds."""
        return {
            "ple_layers": self.ple_layers,
            "events": [dataclasses.asdict(event) for event in self.events],
            "symbols": {name: dataclasses.asdict(symbol) for name, symbol in self.symbols.items()},
            "reads": [dataclasses.asdict(read) for read in self.reads],
            **layer_graphs.to_dict(self.layer_graphs),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "GraphReport":
        if not isinstance(data["ple_layers"], int):
            raise ValueError(f"ple_layers is {data['ple_layers']!r}, no number of layers")
        return cls(
            [Event(**event) for event in data["events"]],
            data["ple_layers"],
            layer_graphs=layer_graphs.from_dict(data),
            symbols={name: Symbol(**symbol) for name, symbol in data["symbols"].items()},
            reads=[TableRead.from_dict(read) for read in data["reads"]],
        )
