"""The order of the passes, and the one Inductor hook that runs them."""

import functools
import hashlib
import logging
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph

import ple_compile.passes as passes
from ple_compile import upstream
from ple_compile.config import Config
from ple_compile.expand_on_cpu import expand_on_cpu
from ple_compile.join_on_gpu import join_on_gpu
from ple_compile.matching.graph import is_inside
from ple_compile.passes.fuse_gate import fuse_gate
from ple_compile.passes.fuse_lookup import fuse_lookup
from ple_compile.passes.fuse_ngram_ids import fuse_ngram_ids
from ple_compile.passes.fuse_short_conv import fuse_short_conv
from ple_compile.passes.lower_lookup import lower_lookup
from ple_compile.passes.merge_gate_conv import merge_gate_conv
from ple_compile.passes.merge_kv_proj import merge_kv_proj
from ple_compile.passes.prefetch_lookup import prefetch_lookup
from ple_compile.recorder import Recorder
from ple_compile.report import MATCHED, NOT_APPLICABLE, Event, GraphReport
from ple_compile.table_reads import find_reads, lowered

log = logging.getLogger("ple_compile")

FUSE = (fuse_short_conv, fuse_gate, fuse_ngram_ids, fuse_lookup, merge_kv_proj, merge_gate_conv)
LOWER = (lower_lookup,)
SCHEDULE = (prefetch_lookup,)

# What a pass needs to know beside the graph: fields of the configuration, or facts about the compilation.
SETTINGS: dict[str, tuple[str, ...]] = {
    "fuse_ngram_ids": ("debug",),
    "fuse_lookup": ("debug",),
    "merge_kv_proj": ("training", "inputs"),
    "merge_gate_conv": ("fuse_short_conv",),
    "lower_lookup": ("etp_lowering", "etp_max_tokens"),
    "prefetch_lookup": ("prefetch_distance",),
}

# These rewrite what `fuse_gate` leaves.
BEHIND_THE_GATE = ("merge_kv_proj", "merge_gate_conv")

PASSES: tuple[Callable, ...] = FUSE + LOWER + SCHEDULE
PASS_NAMES = tuple(function.__name__ for function in PASSES)


class DeclinedError(RuntimeError):
    """With `Config.strict`: a pass that applies to the graph declined; the message lists each with its reason."""


@functools.cache
def source_hash() -> str:
    """Hash of every source file of this package: part of the key under which Inductor caches compiled graphs."""
    folders = [pathlib.Path(__file__).parent, pathlib.Path(passes.__file__).parent]
    files = sorted({file for folder in folders for file in folder.rglob("*.py")})
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


class FusePass(upstream.CustomGraphPass):
    """Runs the passes on one post-grad graph, after the user's own pass if there is one."""

    def __init__(
        self,
        config: Config,
        training: bool,
        before: list[Callable],
        input_names: Sequence[str] = (),
        inputs: Sequence[Any] = (),
        left_on_host: Sequence[Event] = (),
    ):
        """left_on_host: an event for each host table whose lookups stay on the CPU."""
        self.config = config
        self.settings = {"training": training}
        self.before = before
        self.input_names, self.inputs = input_names, inputs
        self.report = GraphReport(events=list(left_on_host))
        self.left_on_host = [(event.layer, event.reason) for event in left_on_host]
        self.nonce = ""
        self.ran = False

    def uuid(self) -> str | None:
        """Sources and settings; None, which keeps Inductor from caching, where the user's pass has none."""
        others = [p.uuid() if isinstance(p, upstream.CustomGraphPass) else None for p in self.before]
        if None in others:
            return None
        return f"{source_hash()} {self.config} {self.settings} {self.left_on_host} {others} {self.nonce}"

    def __call__(self, graph: Graph) -> None:
        for function in self.before:
            upstream.run_custom_pass(function, graph, is_inference=not self.settings["training"])
        self.ran = True
        run(graph, self.config, self.report, self.input_names, self.inputs, **self.settings)
        self.expand(graph)

    def expand(self, graph: Graph) -> None:
        """Prepare what the passes left for Inductor, device by device."""
        if not self.config.debug:
            join_on_gpu(graph)
        expand_on_cpu(graph)


def run(
    graph: Graph,
    config: Config,
    report: GraphReport,
    input_names: Sequence[str] = (),
    inputs: Sequence[Any] = (),
    **settings: bool,
) -> None:
    """Run the enabled passes on `graph`, in order; counts, reasons and what happened to the layers go to `report`.

    inputs: those of the Dynamo graph, where they are known, and what they are called there.
    """
    assert graph.owning_module is not None
    recorder, seen = Recorder(graph, input_names), len(report.events)
    with upstream.no_dispatch_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        facts = {**vars(config), **settings, "inputs": inputs}
        for function in PASSES:
            if function is LOWER[0]:  # afterwards a lookup no longer shows how many rows it is for
                reads = find_reads(graph)
            name = function.__name__
            if not getattr(config, name):
                report.switched_off(name, f"Config.{name} is False")
                continue
            keywords = {key: facts[key] for key in SETTINGS.get(name, ())}
            apply = _Application(function, report, keywords, recorder)
            # PyTorch's own switches and its bisector may leave a pass out here.
            upstream.GraphTransformObserver(graph.owning_module, name, "post_grad_passes").apply_graph_pass(apply)
            if not apply.called:
                report.switched_off(name, "left out by Inductor's disabled_passes or by its bisector")
        report.events += _without_a_gate(report.events[seen:], config)
        report.reads += lowered(reads, report.lowerings(), config.etp_max_tokens)
        report.layer_graphs += recorder.layers(event for event in report.events[seen:] if event.node)  # at a place
        report.symbols |= recorder.symbols()
    report.ple_layers = _complete_layers(report)
    if config.strict and report.declines():
        lines = [f"{e.pass_name} at {e.layer or e.node}: {e.reason}" for e in report.declines()]
        raise DeclinedError("Config.strict is set and these passes declined:\n  " + "\n  ".join(lines))


class _Application:
    """One pass with its settings, and whether it was called."""

    def __init__(self, function: Callable, report: GraphReport, settings: dict[str, Any], recorder: Recorder):
        self.function, self.report, self.settings, self.recorder = function, report, settings, recorder
        self.called = False

    def __call__(self, graph: Graph) -> None:
        self.called = True
        if self.function(graph, self.report, **self.settings):
            self.recorder.after(self.function.__name__)
            upstream.stable_topological_sort(graph)
            log.debug("after %s:\n%s", self.function.__name__, graph)
            upstream.trace_artifact(f"ple_compile_after_{self.function.__name__}", lambda: str(graph))


def _without_a_gate(events: list[Event], config: Config) -> list[Event]:
    """What the passes behind it have to say of the places where `fuse_gate` fused nothing."""
    return [
        Event(name, NOT_APPLICABLE, event.layer, "there is no fused gate")
        for event in events
        if event.pass_name == "fuse_gate" and event.status != MATCHED
        for name in BEHIND_THE_GATE
        if getattr(config, name)
    ]


def _complete_layers(report: GraphReport) -> int:
    """Fused gates of layers in which no fusion declined."""
    declined = [event.layer for event in report.declines() if event.pass_name.startswith("fuse_")]
    fused = [e.layer for e in report.events if e.pass_name == "fuse_gate" and e.status == MATCHED]
    # What is in a layer's modules is in the layer; a path that is empty says nothing, so it spoils every layer.
    return sum(not any(is_inside(path, layer) for path in declined) for layer in fused)
