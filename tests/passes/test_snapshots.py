"""The graph before and after each pass, on transformers' class and on the reference model."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import transformers

from ple_compile import Config, upstream
from ple_compile.pipeline import PASS_NAMES
from tests.graphs import Traced, assert_expected, passes_backend, printed
from tests.ple_cases import Case

RELEASE = (torch.__version__.split("+")[0].rsplit(".", 1)[0], transformers.__version__.rsplit(".", 1)[0])

CASES = {
    "transformers": Case(dtype="bfloat16", cache="dynamic_filled", mask=True, shapes="dynamic"),
    "reference": Case(model="reference", dtype="bfloat16", cache="dynamic_filled", mask=True, shapes="dynamic"),
}


@pytest.fixture
def graphs_by_pass(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Each pass that ran and the graph it left."""
    printed_after: dict[str, str] = {}

    class Observer(upstream.GraphTransformObserver):
        def apply_graph_pass(self, apply: Callable) -> None:
            super().apply_graph_pass(apply)
            printed_after[self.passname] = printed(self.gm.graph)

    monkeypatch.setattr(upstream, "GraphTransformObserver", Observer)
    return printed_after


def traced(case: Case, config: Config) -> Traced:
    torch._dynamo.reset()
    layer = case.layer()
    found = Traced()
    dynamic = case.shapes == "dynamic"
    compiled = torch.compile(case.call, backend=passes_backend(found, config), dynamic=dynamic, fullgraph=True)
    with torch.no_grad():
        compiled(layer, *case.inputs(), case.new_cache(layer))
    return found


@pytest.mark.skipif(
    RELEASE != ("2.13", "5.24"), reason="version: graphs are recorded with torch 2.13, transformers 5.24"
)
@pytest.mark.parametrize("model", CASES)
def test_graphs_after_each_pass(model: str, graphs_by_pass: dict[str, str]) -> None:
    found = traced(CASES[model], Config())
    assert_expected(f"{model}.before", found.before[0])
    for name in PASS_NAMES:
        if name not in ("fuse_lookup", "prefetch_lookup", "lower_lookup"):  # no candidate in a table on one device
            assert found.counts()[name] == 1
            assert_expected(f"{model}.{name}", graphs_by_pass[name])


@pytest.mark.parametrize("name", ["fuse_ngram_ids", "fuse_gate", "fuse_short_conv", "merge_gate_conv", "merge_kv_proj"])
def test_a_pass_that_is_off_does_nothing(name: str) -> None:
    case = dataclasses.replace(CASES["transformers"], dtype="float32", shapes="static")
    found = traced(case, Config(**{name: False}))
    assert name not in found.counts()
    assert not found.declines()


def test_three_layers_in_one_graph() -> None:
    torch._dynamo.reset()
    cases = [Case(seed=seed) for seed in range(3)]
    layers = [case.layer() for case in cases]
    streams, ids, mask = cases[0].inputs()

    def call(streams: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            streams = cases[0].call(layer, streams, ids, mask, None)
        return streams

    found = Traced()
    with torch.no_grad():
        actual = torch.compile(call, backend=passes_backend(found), fullgraph=True)(streams)
        expected = call(streams)
    assert found.counts()["merge_gate_conv"] == 3 and not found.declines()
    assert ((actual - expected).abs().max() / expected.abs().max()) < 2e-5
