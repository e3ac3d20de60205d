import json
import pathlib

import pytest
import torch

import ple_compile
from ple_compile import upstream
from tests.ple_cases import Case
from tests.tiny_models import prompt, shallow_model, tiny_model

PASSES = ("fuse_ngram_ids", "fuse_gate", "fuse_short_conv", "merge_kv_proj", "merge_gate_conv")


def test_a_model_report_names_layers_and_passes(no_codegen: None, tmp_path: pathlib.Path) -> None:
    model = ple_compile.compile(tiny_model((1, 2)), whole_graph=False)
    report = ple_compile.explain(model, prompt(7))
    text = str(report)
    assert "Qwen4ExpForCausalLM: 2 PLE layer(s), 2 ran fused" in text
    for layer in ("model.layers.0.ple", "model.layers.1.ple"):
        section = text.split(layer)[1]
        for name in PASSES:
            assert name in section
    report.save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == report.to_dict()
    report.save(tmp_path / "report.txt")
    assert (tmp_path / "report.txt").read_text() == text


def test_a_model_that_is_not_compiled_is_compiled_for_the_call_only(no_codegen: None) -> None:
    model = tiny_model()
    report = ple_compile.explain(model, prompt(7))
    assert "1 ran fused" in str(report)
    assert all(module._compiled_call_impl is None for module in model.modules())
    assert not any(ple_compile.stats().values())


def test_counters_stats_and_cache_stay_as_they_are(no_codegen: None) -> None:
    case = Case(cache="dynamic_filled")
    layer = case.layer()
    compiled = torch.compile(case.call, backend="ple")
    cache = case.new_cache(layer)
    with torch.no_grad():
        compiled(layer, *case.inputs(), cache)
    states = [state.clone() for state in case.states(cache)]
    counted, stats = dict(upstream.counters["ple_compile"]), ple_compile.stats()
    report = ple_compile.explain(compiled, layer, *case.inputs(), cache)
    assert sum(graph.ple_layers for _, graph in report.graphs) == 1
    assert dict(upstream.counters["ple_compile"]) == counted
    assert ple_compile.stats() == stats
    for before, after in zip(states, case.states(cache)):
        assert torch.equal(before, after)


def test_a_hook_that_reads_an_intermediate_is_named(no_codegen: None) -> None:
    case = Case()
    layer = case.layer()
    read = []
    layer.norm_key.register_forward_hook(lambda module, args, output: read.append(output))

    def call(*args: torch.Tensor) -> tuple:
        read.clear()
        return case.call(layer, *args, None), read[0]

    compiled = torch.compile(call, backend="ple")
    report = ple_compile.explain(compiled, *case.inputs())
    (decline,) = [event for _, event in report.events() if event.status == "declined"]
    assert decline.pass_name == "fuse_gate" and "is read by output" in decline.reason
    assert decline.reason in str(report)
    with torch.no_grad():
        ours, theirs = compiled(*case.inputs()), call(*case.inputs())
    for mine, eager in zip(ours, theirs):
        torch.testing.assert_close(mine, eager)
    assert ple_compile.stats()["ple_executions"] == 0


def test_strict_raises_with_every_reason(no_codegen: None) -> None:
    case = Case(dtype="autocast")
    compiled = torch.compile(case.call, backend="ple", options={"strict": True})
    with torch.no_grad(), case.autocast(), pytest.raises(Exception, match="merge_kv_proj .*computed in the graph"):
        compiled(case.layer(), *case.inputs(), None)


def test_graph_breaks_are_told(no_codegen: None) -> None:
    case = Case()
    layer = case.layer()

    def call(*args: torch.Tensor) -> torch.Tensor:
        out = case.call(layer, *args, None)
        torch._dynamo.graph_break()
        return out * 2

    report = ple_compile.explain(torch.compile(call, backend="ple"), *case.inputs())
    assert "graph breaks" in str(report) and "test_explain.py" in str(report).split("graph breaks")[1]


def test_a_layer_whose_convolution_is_not_fused_is_not_counted(no_codegen: None) -> None:
    model = tiny_model()
    model.model.layers[1].ple.conv1d.register_forward_hook(lambda module, args, output: output.tanh())
    ple_compile.compile(model, whole_graph=False)
    with torch.no_grad():
        model(prompt(6))
    assert ple_compile.stats()["ple_executions"] == 0
    assert "0 ran fused" in str(ple_compile.explain(model, prompt(6)))


def test_parts_that_dynamo_compiled_alone_name_the_layers_they_may_be(no_codegen: None) -> None:
    model = shallow_model((1, 2))
    model.compile(backend="ple")
    text = str(ple_compile.explain(model, prompt(3)))
    assert "model.layers.0.ple or model.layers.1.ple" in text and "no pass found" not in text


def test_the_configuration_that_runs_is_the_one_reported(no_codegen: None) -> None:
    model = tiny_model()
    ple_compile.compile(model.model, whole_graph=False, fuse_gate=False)
    assert "fuse_gate" not in str(ple_compile.explain(model, prompt(6)))
    layer = Case().layer()
    streams, ids, _ = Case().inputs()
    report = ple_compile.explain(layer, streams.requires_grad_() * 2, ids, None)
    assert sum(graph.ple_layers for _, graph in report.graphs) == 1
