"""`ple_compile.explain`: run a call once, compiled, and tell what was fused, what was not and why."""

import copy
import json
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ple_compile import records, regions, stats, upstream
from ple_compile.layers import find_ple_layers
from ple_compile.report import DECLINED, Event, GraphReport


@dataclass(frozen=True)
class Report:
    """What ran in one call of a model. `graphs`: (region, report) of each compiled graph, in the order of execution."""

    model: str
    layers: list[str]
    replaced: list[str]
    graphs: list[tuple[str, GraphReport]]

    def events(self) -> list[tuple[str, Event]]:
        """(layer, event) of every pass at every place, each once."""
        found = [(_layer(self.layers, region, event), event) for region, graph in self.graphs for event in graph.events]
        return list(dict.fromkeys(found))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain lists and dicts."""
        graphs = [{"region": region, "graph_break": g.graph_break, **g.to_dict()} for region, g in self.graphs]
        return {"model": self.model, "layers": self.layers, "replaced": self.replaced, "graphs": graphs}

    def save(self, path: str | pathlib.Path) -> None:
        """Write the report: JSON where the name ends in .json, text otherwise."""
        path = pathlib.Path(path)
        path.write_text(json.dumps(self.to_dict(), indent=1) if path.suffix == ".json" else str(self))

    def __str__(self) -> str:
        fused = sum(graph.ple_layers for _, graph in self.graphs)
        lines = [
            f"{self.model}: {len(self.layers)} PLE layer(s), {fused} ran fused, {len(self.graphs)} compiled graph(s)"
        ]
        by_layer: dict[str, list[Event]] = {layer: [] for layer in self.layers}
        for layer, event in self.events():
            by_layer.setdefault(layer, []).append(event)
        for layer, events in by_layer.items():
            lines.append(f"\n{layer or 'the model'}")
            if not events and not any(layer in name.split(" or ") for name in by_layer if name != layer):
                lines.append("  no pass found anything here: this layer did not run compiled, or not in this call")
            for event in events:
                reason = f": {event.reason}" if event.reason else ""
                at = (
                    f"  [{event.node}{', ' + event.source if event.source else ''}]" if event.status == DECLINED else ""
                )
                lines.append(f"  {event.pass_name:<18} {event.status}{reason}{at}")
        if self.replaced:
            lines.append(f"\nfor one graph, forwards were replaced on: {', '.join(self.replaced)}")
        breaks = list(dict.fromkeys(graph.graph_break for _, graph in self.graphs if graph.graph_break))
        if breaks:
            lines.append("\ngraph breaks")
            lines += [f"  {reason}" for reason in breaks]
        return "\n".join(lines)


def _layer(layers: list[str], region: str, event: Event) -> str:
    """The PLE layer that an event belongs to: the longest name that its module path or its region starts with.

    Where Dynamo compiled a part of the model by itself (after a graph break), paths start in that part: then every
    layer that the path may mean is named.
    """
    path = f"{region}.{event.layer}" if region else event.layer
    inside = [layer for layer in layers if layer == region or f"{path}.".startswith(f"{layer}.")]
    if inside:
        return max(inside, key=len)
    meant = [layer for layer in layers if _overlaps(layer.split("."), path.split("."))]
    return " or ".join(meant) or path


def _overlaps(layer: list[str], path: list[str]) -> bool:
    """Whether a layer's name ends with how the path begins."""
    return any(layer[-n:] == path[:n] for n in range(1, min(len(layer), len(path)) + 1))


def _copies(values: Any) -> Any:
    """Deep copies; tensors that autograd made, which refuse to be copied, lose their history."""
    results = [x for x in upstream.tree_leaves(values) if isinstance(x, torch.Tensor) and not x.is_leaf]
    return copy.deepcopy(values, {id(x): x.detach().clone() for x in results})


def explain(model: nn.Module | Callable, *args: Any, **kwargs: Any) -> Report:
    """Run `model(*args, **kwargs)` once as compiled code and report what was fused, declined (and why), and broken.

    The call runs on deep copies of the arguments, so a cache among them stays as it is, and counters and `stats` are
    put back; it records gradients only where the model is in training mode. A model of which nothing is compiled is
    compiled for this call as `ple_compile.compile` would, and restored; what was compiled stays in PyTorch's caches and
    serves the next call.
    """
    args, kwargs = _copies((args, kwargs))
    module = model if isinstance(model, nn.Module) else None
    compile_here = module is not None and not any(part._compiled_call_impl for part in module.modules())
    layers = list(find_ple_layers(module)) if module is not None else []
    executions = stats.stats()
    counted = dict(upstream.counters["ple_compile"])
    if module is not None and compile_here:
        regions.compile(module)
    try:
        with records.collect() as graphs, torch.set_grad_enabled(module is not None and module.training):
            model(*args, **kwargs)
        replaced = regions.changes_of(module) if module is not None else []
    finally:
        if module is not None and compile_here:
            regions.restore(module)
        stats.restore_stats(executions)
        upstream.counters["ple_compile"].clear()
        upstream.counters["ple_compile"].update(counted)
    name = type(module).__name__ if module is not None else getattr(model, "__name__", "function")
    return Report(name, layers, replaced, graphs)
