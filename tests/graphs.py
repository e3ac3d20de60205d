"""Compile a function as Inductor would up to its post-grad passes, run ours, and execute the graph in eager PyTorch.

This shows what the passes do to a graph, and whether the rewritten graph computes the same, without code generation:
a test takes a second, and low precision is compared with eager rather than with Inductor's CPU code.
"""

import os
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch._inductor.compile_fx import _recursive_post_grad_passes

from ple_compile import upstream
from ple_compile.config import Config
from ple_compile.pipeline import FusePass
from ple_compile.report import GraphReport


@dataclass
class Traced:
    """Graphs before and after the passes, in the order of compilation, and what the passes reported."""

    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    graphs: list[torch.fx.GraphModule] = field(default_factory=list)
    reports: list[GraphReport] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for report in self.reports:
            for name, count in report.counts().items():
                total[name] = total.get(name, 0) + count
        return total

    def declines(self) -> list[tuple[str, str]]:
        return [(event.pass_name, event.reason) for report in self.reports for event in report.declines()]

    def targets(self) -> list[str]:
        """Names of the ops called after the passes."""
        nodes = [n for g in self.graphs for n in g.graph.nodes if n.op == "call_function"]
        return [str(n.target) for n in nodes]


class _Snapshot(FusePass):
    def __init__(self, config: Config, training: bool, traced: Traced, expanded: bool):
        super().__init__(config, training, [])
        self.traced, self.expanded = traced, expanded

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.traced.before.append(printed(graph))
        super().__call__(graph)
        self.traced.after.append(printed(graph))

    def expand(self, graph: torch.fx.Graph) -> None:
        if self.expanded:
            super().expand(graph)

    def uuid(self) -> None:
        return None


def printed(graph: torch.fx.Graph) -> str:
    """A graph as code, without the bookkeeping that changes between releases."""
    return graph.python_code("self").src.replace("torch.ops.", "").replace("self, ", "").strip() + "\n"


def run_graph(graph: torch.fx.GraphModule, inputs: list, **kwargs: object) -> Callable:
    """In the place of Inductor's inner compiler: its post-grad passes, ours among them, then the graph as it is."""
    if not kwargs.get("is_backward"):
        _recursive_post_grad_passes(graph, not torch.is_grad_enabled())
        graph.recompile()

    def run(args: list) -> object:
        values = list(args)
        args.clear()
        return graph(*values)

    run._boxed_call = True
    return run


def passes_backend(traced: Traced, config: Config | None = None, *, expanded: bool = False) -> Callable:
    """A backend that runs the passes and then the graph itself: with the fused ops, or `expanded` as for C++."""
    config = config or Config()

    def backend(gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
        training = torch.is_grad_enabled() and any(
            isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs
        )
        fuse = _Snapshot(config, training, traced, expanded)
        traced.reports.append(fuse.report)

        def inner_compile(graph: torch.fx.GraphModule, inputs: list, **kwargs: object) -> Callable:
            traced.graphs.append(graph)
            return run_graph(graph, inputs, **kwargs)

        patches = {"post_grad_custom_pre_pass": fuse, "force_disable_caches": True, "emulate_precision_casts": expanded}
        return upstream.compile_fx(gm, example_inputs, inner_compile=inner_compile, config_patches=patches)

    return backend


def assert_expected(name: str, text: str) -> None:
    """Compare with `tests/expected/<name>.expected`; EXPECTTEST_ACCEPT=1 writes the file instead."""
    file = pathlib.Path(__file__).parent / "expected" / f"{name}.expected"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert file.exists(), f"{file} is missing; run with EXPECTTEST_ACCEPT=1 to write it"
    assert text == file.read_text(), f"{file.name} differs; read the change, then run with EXPECTTEST_ACCEPT=1"
