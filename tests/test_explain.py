import json
import pathlib

import pytest
import torch

import ple_compile
from ple_compile import regions, trial_call, upstream
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


def test_layers_that_dynamo_compiled_as_one_are_told_apart(no_codegen: None) -> None:
    """The decoder layers of a model share one frame, whose graph names neither."""
    model = shallow_model((1, 2))
    model.model.compile(backend="ple")
    report = ple_compile.explain(model, prompt(3))
    runs = {run.layer: run for run in report.layer_runs()}
    assert set(runs) == {layer for layer, _ in report.events()} == {"model.layers.0.ple", "model.layers.1.ple"}
    assert " or " not in str(report) and "no pass found" not in str(report)
    for name in PASSES:
        assert str(report).count(name) == 2


def test_a_region_is_named_as_the_explained_model_names_it(no_codegen: None) -> None:
    model = shallow_model()
    ple_compile.compile(model.model, indexer=False)
    report = ple_compile.explain(model, prompt(5))
    assert [region for region, _ in report.graphs] == ["model.layers.0.ple"]


def test_a_function_that_calls_a_compiled_model_is_told_by_its_layers(no_codegen: None) -> None:
    """As `model.generate`, whose graphs name the layer by the local through which it is called."""
    model = ple_compile.compile(shallow_model(), indexer=False)
    report = ple_compile.explain(lambda ids: model(ids), prompt(5))
    assert {layer for layer, _ in report.events()} == {"model.layers.0.ple"}
    assert [run.layer for run in report.layer_runs()] == ["model.layers.0.ple"]
    assert "1 PLE layer(s), 1 ran fused" in str(report)


def test_a_cache_that_was_filled_with_gradients(no_codegen: None) -> None:
    """Its tensors are results of autograd, which refuse to be deep-copied."""
    model = ple_compile.compile(shallow_model(), strict=True)
    filled = model(prompt(7), use_cache=True)
    name = "cache" if "cache" in filled else "past_key_values"
    state = filled[name].layers[0].conv_states[1]
    before = state.detach().clone()
    assert not state.is_leaf
    assert "1 ran fused" in str(ple_compile.explain(model, torch.tensor([[5]]), **{name: filled[name]}))
    assert filled[name].layers[0].conv_states[1] is state and torch.equal(state, before) and state.grad_fn is not None


def test_copies_keep_what_tensors_share() -> None:
    made = torch.ones(4, requires_grad=True) * 2
    others = [torch.ones(4, requires_grad=True) * factor for factor in range(50)]
    pair, again, *rest = trial_call.copies([{"state": made}, made, *others])
    assert pair["state"] is again and again is not made and not again.requires_grad
    assert [copy[0].item() for copy in rest] == list(range(50))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_gradients_are_recorded_where_the_user_trains(no_codegen: None, training: bool, gradients: bool) -> None:
    layer, (streams, ids, _) = Case().layer().train(training), Case().inputs()
    with torch.set_grad_enabled(gradients):
        report = ple_compile.explain(layer, streams, ids, None)
        assert torch.is_grad_enabled() == gradients
    recorded = training and gradients
    assert report.gradients == report.to_dict()["gradients"] == recorded
    assert ("gradients were recorded" in str(report)) == recorded
    assert ("0 ran fused" in str(report)) == recorded and ("1 ran fused" in str(report)) != recorded


def test_buffers_and_random_numbers_stay_as_they_are(no_codegen: None) -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Case().layer()
            self.noise = torch.nn.Dropout()
            self.register_buffer("calls", torch.zeros(1))
            self.register_buffer("last", torch.zeros(1))

        def forward(self, streams: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.last = self.calls * 2
            return self.noise(self.layer(streams, ids, None))

    model, (streams, ids, _) = Counting().train(), Case().inputs()
    last, generator = model.last, torch.get_rng_state()
    ple_compile.explain(model, streams, ids)
    assert model.calls.item() == 0 and model.last is last and last.item() == 0
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_model_that_torch_compile_wrapped_is_reported_as_it_runs(no_codegen: None) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ple = Case().layer()

        def forward(self, streams: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            streams = torch.sin(streams)
            torch._dynamo.graph_break()
            return streams + self.ple(streams, ids, None)

    streams, ids, _ = Case().inputs()
    report = ple_compile.explain(torch.compile(Layer().eval(), backend="ple"), streams, ids)
    assert report.layers == ["_orig_mod.ple"] == sorted({layer for layer, _ in report.events()})
    assert len(report.graphs) == 2 and "graph breaks" in str(report)


def test_a_compiled_model_without_a_compiled_region_stays_compiled(no_codegen: None) -> None:
    """As where accelerate's hooks keep every PLE layer from being compiled."""
    model = shallow_model()
    model.model.layers[0].ple._hf_hook = object()
    ple_compile.compile(model)
    ple_compile.explain(model, prompt(5))
    assert regions.config_of(model) is not None


def test_what_cannot_be_called_is_named() -> None:
    with pytest.raises(ValueError, match="ple_compile.explain: model is 'abc', a str; pass an nn.Module or a function"):
        ple_compile.explain("abc")


@pytest.mark.parametrize("options", [{"fuse_gate": False}, {"inductor": {"disabled_passes": "fuse_gate"}}], ids=str)
def test_a_pass_that_is_off_finds_no_layer(options: dict, no_codegen: None) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(torch.nn.Linear(4, 4), backend="ple", options=options)
    with torch.no_grad():
        report = ple_compile.explain(compiled, torch.ones(2, 4))
    assert "fuse_gate" in str(report) and not report.layer_runs()


def test_the_configuration_that_runs_is_the_one_reported(no_codegen: None) -> None:
    model = tiny_model()
    ple_compile.compile(model.model, whole_graph=False, fuse_gate=False)
    report = ple_compile.explain(model, prompt(6))
    assert "fuse_gate          not applicable: Config.fuse_gate is False" in str(report)
    assert "merge_kv_proj      not applicable: there is no fused gate" in str(report)
    events = [event for graph in report.to_dict()["graphs"] for event in graph["events"]]
    assert {event["layer"] for event in events} == set(report.layers)
    layer = Case().layer()
    streams, ids, _ = Case().inputs()
    report = ple_compile.explain(layer, streams.requires_grad_() * 2, ids, None)
    assert sum(graph.ple_layers for _, graph in report.graphs) == 1
