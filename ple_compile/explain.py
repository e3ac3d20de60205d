"""`ple_compile.explain`: run a call once, compiled, and tell what was fused, what was not and why."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ple_compile import layer_graphs, records, regions, stats, trial_call, upstream
from ple_compile.facts import TableFacts, environment, table_facts
from ple_compile.layer_graphs import LayerGraph
from ple_compile.layers import find_ple_layers
from ple_compile.records import Execution
from ple_compile.report import DECLINED, MATCHED, Event, GraphReport
from ple_compile.savings import Savings, savings


@dataclass(frozen=True)
class LayerRun:
    """One PLE layer in one compiled graph that ran. `graph`: which of the report's; `sizes`: of its symbols."""

    layer: str
    graph: int
    found: LayerGraph
    sizes: dict[str, int]

    @property
    def savings(self) -> Savings:
        return savings(self.found.drawing, self.sizes)


@dataclass(frozen=True)
class Report:
    """What ran in one call of a model, which recorded `gradients` or not.

    graphs: (region, report) of each compiled graph, in the order of execution.
    """

    model: str
    layers: list[str]
    replaced: list[str]
    graphs: list[tuple[str, GraphReport]]
    tables: list[TableFacts] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    gradients: bool = False

    def events(self) -> list[tuple[str, Event]]:
        """(layer, event) of every pass at every place, each once."""
        found = [
            (self._layer_of(region, graph, event.layer), event)
            for region, graph in self.graphs
            for event in graph.events
        ]
        return list(dict.fromkeys(found))

    def _layer_of(self, region: str, graph: GraphReport, path: str) -> str:
        """The PLE layer of a module path in one of the graphs."""
        return _layer(self._known(region, graph), region, path)

    def _known(self, region: str, graph: GraphReport) -> list[str]:
        """The model's PLE layers; of a function, which has no names for them, those that its graph shows."""
        return self.layers or [path for p in graph.layer_graphs if (path := records.outer_path(region, p.layer))]

    def unfused(self) -> list[str]:
        """PLE layers that did not run fused: no compiled graph shows one, or a fusion declined in one that does."""
        fused, declined = set(), set()
        for named, event in self.events():
            layers = set(named.split(" or "))
            fused |= layers if event.pass_name == "fuse_gate" and event.status == MATCHED else set()
            declined |= layers if event.pass_name.startswith("fuse_") and event.status == DECLINED else set()
        known = self.layers or list(dict.fromkeys(run.layer for run in self.layer_runs()))
        return [layer for layer in known if layer not in fused or layer in declined]

    def layer_runs(self) -> list[LayerRun]:
        """Every PLE layer that ran compiled, once for each graph and each set of sizes."""
        found: list[LayerRun] = []
        for index, (region, graph) in enumerate(self.graphs):
            for part in graph.layer_graphs:
                run = LayerRun(self._layer_of(region, graph, part.layer), index, part, graph.sizes)
                if not any((r.layer, r.found, r.sizes) == (run.layer, run.found, run.sizes) for r in found):
                    found.append(run)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The report as plain lists and dicts.

        model, layers: the class, and the names of its PLE layers. replaced: classes whose forward was replaced.
        gradients: whether the call recorded them.
        environment: versions and device. tables: each n-gram table's `name`, `rows`, `width`, `format`, `placement`,
        `sharding` and `nbytes`.

        graphs: the compiled graphs in the order of execution, each with `region` (the module whose code it is),
        `graph_break` (why it ended), `ple_layers` (complete ones, run fused), `events` (what each pass did where:
        `pass_name`, `status`, `layer`, `reason`, `node`, `source`), `symbols` (symbolic sizes, each with the `argument`
        that holds it and its `name`), `sizes` (their values in this call), `reads` (lookups in tables: `rows`, a number
        or an expression in the symbols, `row_bytes`, `over_bus`, whether they lie in host memory, and `exchange`, null
        or how ranks that share the table exchange rows: `num_ranks`, `num_copies`, `heads`, `lowering`, `max_tokens`)
        and `layer_graphs`.

        layer_graphs: the PLE layers of a graph: `layer`, `path` (in the graph), `drawing` (an index), `names` of its
        nodes, `prefetches` (`start`, `wait`, the layers `starts_in` and `waits_in`, `launches` and `products` between),
        `savings` (`launches_before`, `launches_after`, `bytes_before`, `bytes_after`, `formula`), and `collectives`
        (op: how many in each run).

        drawings: the distinct graphs of layers. `nodes`: `target`, `shape`, `dtype`, `device`, `module` (below the
        layer; `..` for one that holds the layer), `source` (an index in `sources`, or -1), `before` and `after`
        (indices of its inputs in the graph before and after the passes, null where it is not in that graph), `made_by`
        and `removed_by` (passes), `launches`, `writes` (new memory), `output` (read outside the layer); `sources`:
        `file`, `line`, `function`, `code`; `omitted`: how many nodes were too many to keep.
        """
        drawn = layer_graphs.to_dict([part for _, graph in self.graphs for part in graph.layer_graphs])
        entries = iter(drawn["layer_graphs"])
        graphs = []
        for region, graph in self.graphs:
            told = {**graph.to_dict(), "region": region, "graph_break": graph.graph_break, "sizes": graph.sizes}
            del told["drawings"]
            for event in told["events"]:
                event["layer"] = self._layer_of(region, graph, event["layer"])
            told["layer_graphs"] = [
                {
                    **next(entries),
                    "layer": self._layer_of(region, graph, part.layer),
                    "path": part.layer,
                    "savings": dataclasses.asdict(savings(part.drawing, graph.sizes)),
                    "collectives": part.drawing.collectives(),
                }
                for part in graph.layer_graphs
            ]
            graphs.append(told)
        return {
            "model": self.model,
            "layers": self.layers,
            "replaced": self.replaced,
            "gradients": self.gradients,
            "environment": self.environment,
            "tables": [dataclasses.asdict(table) for table in self.tables],
            "graphs": graphs,
            "drawings": drawn["drawings"],
        }

    def save(self, path: str | pathlib.Path) -> None:
        """Write the report: a page to look at where the name ends in .html, JSON for .json, text otherwise."""
        from ple_compile.page import render

        path = pathlib.Path(path)
        forms: dict[str, Callable[[], str]] = {
            ".html": lambda: render(self),
            ".json": lambda: json.dumps(self.to_dict(), indent=1),
        }
        path.write_text(forms.get(path.suffix.lower(), self.__str__)(), encoding="utf-8")

    def __str__(self) -> str:
        fused = sum(graph.ple_layers for _, graph in self.graphs)
        num_layers = len(self.layers or {run.layer for run in self.layer_runs()})
        lines = [f"{self.model}: {num_layers} PLE layer(s), {fused} ran fused, {len(self.graphs)} compiled graph(s)"]
        if not self.layers and not self.graphs:
            lines.append(
                "\nnothing ran compiled: a module is compiled for the call where it has PLE layers (modules that own "
                "an n-gram table and the buffers of its hash), and a function runs as it is"
            )
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
        if self.gradients:
            lines.append(
                "\ngradients were recorded, for the model is in training mode: what ple_compile.compile has compiled "
                "then runs as plain PyTorch"
            )
        if self.replaced:
            lines.append(f"\nforwards replaced on: {', '.join(self.replaced)}")
        breaks = list(dict.fromkeys(graph.graph_break for _, graph in self.graphs if graph.graph_break))
        if breaks:
            lines.append("\ngraph breaks")
            lines += [f"  {reason}" for reason in breaks]
        return "\n".join(lines)


def _layer(layers: list[str], region: str, module: str) -> str:
    """The PLE layer that a module path belongs to: the longest name that the path or its region starts with.

    Where Dynamo compiled a part of the model by itself (after a graph break), paths start in that part: then every
    layer that the path may mean is named.
    """
    path = records.outer_path(region, module)
    inside = [layer for layer in layers if layer == region or f"{path}.".startswith(f"{layer}.")]
    if inside:
        return max(inside, key=len)
    if region and not module:  # somewhere in it
        meant = [layer for layer in layers if layer.startswith(f"{region}.")]
    else:
        meant = [layer for layer in layers if _overlaps(layer.split("."), path.split("."))]
    return " or ".join(meant) or path


def _overlaps(layer: list[str], path: list[str]) -> bool:
    """Whether a layer's name ends with how the path begins."""
    return any(layer[-n:] == path[:n] for n in range(1, min(len(layer), len(path)) + 1))


def explain(model: nn.Module | Callable, *args: Any, **kwargs: Any) -> Report:
    """Run `model(*args, **kwargs)` once as compiled code and report what was fused, declined (and why), and broken.

    The call runs on deep copies of the arguments, so a cache among them stays as it is; counters, `stats`, the buffers
    of the model and random number generators are put back. It records gradients where the model is in training mode
    and they are switched on around `explain`, and never otherwise: a model in `eval()` is reported as it runs under
    `torch.no_grad()`. A model of which nothing is compiled is compiled for this call as `ple_compile.compile` would,
    and restored; what was compiled stays in PyTorch's caches and serves the next call.

    Raises ValueError where `model` cannot be called, and what `ple_compile.compile` and the call itself raise.
    """
    if not callable(model):
        raise ValueError(
            f"ple_compile.explain: model is {model!r}, a {type(model).__name__}; pass an nn.Module or a function, then "
            "its arguments"
        )
    args, kwargs = trial_call.copies((args, kwargs))
    module = model if isinstance(model, nn.Module) else None
    layers = list(find_ple_layers(module)) if module is not None else []
    compile_here = module is not None and bool(layers) and not _is_compiled(module)
    gradients = torch.is_grad_enabled() and module is not None and module.training
    executions = stats.stats()
    counted = dict(upstream.counters["ple_compile"])
    if module is not None and compile_here:
        regions.compile(module)
    try:
        with trial_call.put_back(module), records.collect() as executed, torch.set_grad_enabled(gradients):
            model(*args, **kwargs)
        replaced = regions.changes_of(module) if module is not None else []
        tables = table_facts(module) if module is not None else []
    finally:
        if module is not None and compile_here:
            regions.restore(module)
        stats.restore_stats(executions)
        upstream.counters["ple_compile"].clear()
        upstream.counters["ple_compile"].update(counted)
    name = type(module).__name__ if module is not None else getattr(model, "__name__", "function")
    graphs = [(_place(execution, module), execution.report) for execution in executed]
    return Report(name, layers, replaced, graphs, tables, environment(), gradients)


def _is_compiled(module: nn.Module) -> bool:
    return regions.config_of(module) is not None or any(map(upstream.is_compiled, module.modules()))


def _place(execution: Execution, module: nn.Module | None) -> str:
    """The name in `module` of the part whose code a compiled graph is, told by the tensors that it holds.

    Dynamo compiles the forward of a class once for all layers that are alike, so the graph does not say which it ran
    for. Where it shows none of the module's tensors, the region that it ran in.
    """
    names = _names(module) if module is not None else {}
    places = [
        [
            name.removesuffix(tail).removesuffix(".")
            for name in names.get(identity, ())
            if f".{name}".endswith(f".{tail}")
        ]
        for tail, identity in execution.tensors.items()
    ]
    told = [found for found in places if found]
    common = [place for place in told[0] if all(place in found for found in told)] if told else []
    return common[0] if common else execution.region


def _names(module: nn.Module) -> dict[int, list[str]]:
    """Every name of each parameter and buffer, by identity."""
    names: dict[int, list[str]] = {}
    for found in (module.named_parameters, module.named_buffers):
        for name, tensor in found(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    return names
