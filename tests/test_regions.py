"""`ple_compile.compile`: every execution of a PLE layer is a compiled one, and the tokens are eager's."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from transformers import CompileConfig, Qwen4ExpForCausalLM

import ple_compile
from ple_compile import accelerate_hooks, regions
from tests.ple_cases import Case, Layers
from tests.tiny_models import generate, prompt, shallow_model, tiny_model

LENGTHS = (1, 2, 5, 9, 13, 33)


def executions() -> int:
    return ple_compile.stats()["ple_executions"]


def forwards(model: Qwen4ExpForCausalLM) -> list[int]:
    """Counts calls of the text model from now on."""
    calls: list[int] = []
    inner = model.model.forward

    def counting(*args: object, **kwargs: object) -> object:
        if not torch.compiler.is_compiling():
            calls.append(1)
        return inner(*args, **kwargs)

    model.model.forward = counting
    return calls


@pytest.mark.parametrize(
    "ple_layer_ids, whole_graph", [pytest.param((1,), True, marks=pytest.mark.slow), ((1, 2), False)]
)
def test_prompts_of_any_length_run_compiled(
    no_codegen: None, ple_layer_ids: tuple[int, ...], whole_graph: bool
) -> None:
    model = shallow_model(ple_layer_ids)
    expected = [generate(model, prompt(length)) for length in LENGTHS]
    ple_compile.compile(model, strict=True, whole_graph=whole_graph)
    actual = [generate(model, prompt(length)) for length in LENGTHS]
    for ours, eager in zip(actual, expected):
        assert torch.equal(ours, eager)
    # One prefill and two decode steps per prompt.
    assert executions() == len(LENGTHS) * 3 * len(ple_layer_ids)


def static_tokens(model: Qwen4ExpForCausalLM, config: CompileConfig | None = None) -> list[torch.Tensor]:
    """Tokens for two prompts, with a static cache; with `config` transformers compiles the decode."""
    settings: dict = dict(cache_implementation="static")
    if config is not None:
        config._compile_all_devices = True
        settings["compile_config"] = config
    return [generate(model, prompt(length), 3, **settings) for length in (5, 20)]


@pytest.mark.parametrize("whole_graph", [pytest.param(True, marks=pytest.mark.slow), False])
def test_static_cache_decode_keeps_ple(no_codegen: None, whole_graph: bool) -> None:
    """transformers compiles decode itself for a static cache; `_compile_all_devices` makes it do so on a CPU."""
    model = shallow_model()
    expected = static_tokens(model)
    ple_compile.compile(model, whole_graph=whole_graph)
    actual = static_tokens(model, CompileConfig())
    for ours, eager in zip(actual, expected):
        assert torch.equal(ours, eager)
    assert executions() == 2 * 3


def test_compile_config_road(no_codegen: None) -> None:
    """`CompileConfig(backend="ple")`: transformers never compiles the prefill."""
    model = shallow_model()
    expected = static_tokens(model)
    actual = static_tokens(model, CompileConfig(backend="ple", mode=None))
    for ours, eager in zip(actual, expected):
        assert torch.equal(ours, eager)
    assert executions() == 2 * (3 - 1)


@torch.no_grad()
def test_the_graphs_of_one_model_do_not_use_up_those_of_another(
    no_codegen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All modules are called through one function, and PyTorch's limit is one of graphs for each function."""
    monkeypatch.setattr(regions, "RECOMPILE_LIMIT", 2)
    layers = [shallow_model(hidden_size=16 * width).model.layers[0].ple for width in (1, 2, 3)]
    with torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1):
        for width, layer in enumerate(layers, start=1):
            ple_compile.compile(layer)
            for length in (5, 1):
                layer(torch.randn(1, length, 4 * 16 * width), prompt(length), None)
        for layer in layers:
            ple_compile.restore(layer)
    assert executions() == 3 * 2


@pytest.mark.parametrize("whole_graph", [True, False])
def test_restore_undoes_everything(no_codegen: None, whole_graph: bool) -> None:
    model = shallow_model()
    limit = torch._dynamo.config.recompile_limit
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    ple_compile.compile(model, whole_graph=whole_graph)
    assert "forward" in vars(model.model)
    assert ("forward" in vars(model.model.layers[0].linear_attn)) == whole_graph
    # The whole model's patched methods leave their marks when they run, compiled (which takes long) or not.
    with torch.no_grad(), torch.compiler.set_stance("force_eager" if whole_graph else "default"):
        model(prompt(5), use_cache=False)
    assert executions() == (not whole_graph)
    ple_compile.restore(model)
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert module._compiled_call_impl is None
    assert torch._dynamo.config.recompile_limit == limit
    ple_compile.reset_stats()
    generate(model, prompt(5))
    assert executions() == 0


def test_a_model_without_ple(no_codegen: None, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert ple_compile.compile(model) is model
    assert "no PLE layer" in caplog.text
    with pytest.raises(ValueError, match="no PLE layer"):
        ple_compile.compile(model, strict=True)


@pytest.mark.parametrize("call", [ple_compile.compile, ple_compile.restore, ple_compile.offload_tables])
@pytest.mark.parametrize("model", ["abc", None, len, [1]])
def test_what_is_no_module_is_named(call: Callable, model: object) -> None:
    with pytest.raises(ValueError, match=f"the model is .*, a {type(model).__name__}; pass the nn.Module that holds"):
        call(model)


FUSED = {"epilogue_fusion": True}
AUTOTUNED = {"prefetch_distance": 3, "mode": "max-autotune"}


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, {"mode": "reduce-overhead"}),
        ({"mode": None}, {}),
        ({"options": {"max_autotune": True}}, {"mode": "reduce-overhead", "inductor": {**FUSED, "max_autotune": True}}),
        ({"backend": "ple", "mode": None}, {}),
        ({"backend": "ple", "options": AUTOTUNED}, AUTOTUNED),
        ({"backend": "ple", "options": {"inductor": {}}, "mode": None}, {"inductor": {}}),
    ],
)
def test_a_compile_config_keeps_its_options(given: dict, expected: dict) -> None:
    """On a compiled model they are added to its configuration, and win over it."""
    mine = {"prefetch_distance": 2, "debug": True, "inductor": FUSED}
    model, config = ple_compile.compile(shallow_model(), **mine), CompileConfig(**given)
    model.get_compiled_call(config)
    asked = model._last_compile_config
    assert (asked.backend, asked.mode) == ("ple", None) and config == CompileConfig(**given)
    assert ple_compile.Config(**asked.options) == ple_compile.Config(**{**mine, **expected})


def test_another_backend_of_a_compile_config_is_left_alone() -> None:
    model = ple_compile.compile(shallow_model())
    model.get_compiled_call(CompileConfig(backend="eager", mode=None))
    assert model._last_compile_config == CompileConfig(backend="eager", mode=None)


def test_a_model_that_is_refused_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the reason is found after part of it was replaced."""
    model = shallow_model((1, 2))
    ple_compile.compile(model)
    compiled = model.model.layers[0].ple._compiled_call_impl
    with pytest.raises(ValueError, match="unknown option"):
        ple_compile.compile(model, fuse_gates=True)
    assert model.model.layers[0].ple._compiled_call_impl is compiled
    model.model.layers[1].ple._hf_hook = object()
    with pytest.raises(ValueError, match=r"inside model.layers.1.ple"):
        ple_compile.compile(model, strict=True)
    assert all(module._compiled_call_impl is None and "forward" not in vars(module) for module in model.modules())
    assert regions.config_of(model) is None and "get_compiled_call" not in vars(model)


def test_hooks_of_one_layer_are_its_own(no_codegen: None) -> None:
    """Layers of a kind share Dynamo's graphs, and by itself it does not tell one with a hook from one without."""
    case = Case(batch=1)
    model, inputs = Layers(case).eval(), case.inputs()[:2]
    model.layers[1].conv1d.register_forward_hook(lambda module, args, output: output.tanh())
    skipped = torch._dynamo.config.skip_nnmodule_hook_guards
    with torch.no_grad():
        expected = model(*inputs)
        torch.testing.assert_close(ple_compile.compile(model)(*inputs), expected)
    ple_compile.restore(model)
    assert torch._dynamo.config.skip_nnmodule_hook_guards == skipped


def test_hooks_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(accelerate_hooks, "idle_inside", lambda layer: asked.append(layer) or [])
    model = ple_compile.compile(shallow_model(), strict=True)
    assert asked == [model.model.layers[0].ple]


@torch.no_grad()
def test_two_caches_through_one_model_do_not_mix(no_codegen: None) -> None:
    plain, model = shallow_model(), ple_compile.compile(shallow_model(), whole_graph=False)
    first, second = prompt(7, seed=1), prompt(7, seed=2)
    expected = [plain(first, use_cache=True), plain(second, use_cache=True)]
    ours = [model(first, use_cache=True), model(second, use_cache=True)]
    token = torch.tensor([[5]])
    for mine, eagers in zip(ours, expected):
        name = "cache" if hasattr(mine, "cache") else "past_key_values"
        step = model(token, **{name: getattr(mine, name)}).logits
        torch.testing.assert_close(step, plain(token, **{name: getattr(eagers, name)}).logits)
    assert executions() == 4


def test_a_model_of_unknown_source_is_compiled_by_layers(
    no_codegen: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ple_compile.whole_graph.sources, "KNOWN", {})
    model = tiny_model()
    ple_compile.compile(model, whole_graph=True)
    assert "each PLE layer is compiled by itself" in caplog.text
    assert model.model.layers[1].ple._compiled_call_impl is not None
    assert model.model._compiled_call_impl is None
    with pytest.raises(ValueError):
        ple_compile.compile(model, strict=True, whole_graph=True)


def test_the_indexer_is_replaced_by_default(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shallow_model()
    indexer = model.model.layers[-1].self_attn.indexer
    for options, replaced in (({}, True), ({"indexer": False}, False), ({"whole_graph": True}, True)):
        ple_compile.compile(model, **options)
        assert ("forward" in vars(indexer)) == ("forward" in vars(model.model)) == replaced
    ple_compile.restore(model)
    assert "forward" not in vars(indexer) and caplog.text == ""
    monkeypatch.setattr(ple_compile.whole_graph.sources, "KNOWN", {})
    ple_compile.compile(model, strict=True)
    assert "the QSA indexer keeps its loop over queries" in caplog.text and "forward" not in vars(indexer)
    assert model.model.layers[0].ple._compiled_call_impl is not None


@torch.no_grad()
def test_a_mask_of_floats_is_no_weight(no_codegen: None) -> None:
    plain, model = shallow_model(), ple_compile.compile(shallow_model(), strict=True)
    ids, mask = prompt(7, batch=2), torch.ones(2, 7)
    mask[0, :3] = 0
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits)
    assert executions() == 1


def test_gradients_run_as_plain_pytorch(no_codegen: None, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    expected = model(prompt(6)).logits
    ple_compile.compile(model)
    logits = model(prompt(6)).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    logits.sum().backward()
    assert model.model.layers[1].ple.key_proj.weight.grad is not None
    assert "gradients are recorded" in caplog.text and executions() == 0


@pytest.mark.parametrize("frozen", ["before", "in between"])
def test_gradients_pass_through_frozen_layers(no_codegen: None, caplog: pytest.LogCaptureFixture, frozen: str) -> None:
    """What is recorded is decided at each call: by the inputs where no parameter of the layer is trained."""
    plain, model = shallow_model(), shallow_model()
    for layer in (plain.model.layers[0].ple, model.model.layers[0].ple):
        layer.requires_grad_(False)
    ple_compile.compile(model, strict=True)
    if frozen == "in between":  # what embeds the tokens is frozen in the place of the layer
        for part in (plain, model):
            part.model.layers[0].ple.requires_grad_(True)
            part.model.embed_tokens.requires_grad_(False)
    for part in (plain, model):
        part(prompt(6)).logits.sum().backward()
    for (name, expected), actual in zip(plain.named_parameters(), model.parameters()):
        assert (expected.grad is None) == (actual.grad is None), name
        torch.testing.assert_close(actual.grad, expected.grad)
    assert "gradients are recorded" in caplog.text and executions() == 0


@pytest.mark.slow
@torch.no_grad()
def test_copies_are_plain_models(no_codegen: None) -> None:
    model = ple_compile.compile(tiny_model(), whole_graph=False)
    config = CompileConfig()
    config._compile_all_devices = True
    settings = dict(cache_implementation="static", compile_config=config)
    assert torch.equal(generate(copy.deepcopy(model), prompt(5), **settings), generate(model, prompt(5), **settings))


def pickled(model: torch.nn.Module) -> torch.nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@torch.no_grad()
def test_copies_can_be_restored_and_compiled(no_codegen: None, copied: Callable) -> None:
    model = ple_compile.compile(shallow_model(), whole_graph=False)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    restored = ple_compile.restore(copied(model))
    for module in restored.modules():
        assert not {"forward", "get_compiled_call", "_ple_compile"} & vars(module).keys()
    compiled = ple_compile.compile(copied(model), indexer=False)
    assert regions.changes_of(compiled) == [] and all("forward" not in vars(module) for module in compiled.modules())
    assert ple_compile.compile(copied(model)) is not model and regions.changes_of(model)
    # The original is as it was.
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    ids = prompt(7)
    assert torch.equal(compiled(ids).logits, restored(ids).logits)


def test_restore_of_a_part_of_a_compiled_model_leaves_it(no_codegen: None) -> None:
    model = ple_compile.compile(shallow_model(), whole_graph=False)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    ple_compile.restore(model.model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("options", [{}, {"indexer": False}, {"whole_graph": True}], ids=str)
@torch.no_grad()
def test_a_compiled_model_can_die(no_codegen: None, options: dict) -> None:
    model = ple_compile.compile(shallow_model(), **options)
    model(prompt(7))
    limit = torch._dynamo.config.recompile_limit
    table = weakref.ref(model.model.layers[0].ple.ple_embedding.ngram_embedding.weight)
    model = None
    gc.collect()
    assert table() is None
    ple_compile.restore(ple_compile.compile(shallow_model()))
    assert torch._dynamo.config.recompile_limit < limit


def test_each_model_warns_that_gradients_are_recorded(no_codegen: None, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        model = ple_compile.compile(shallow_model(), whole_graph=False)
        for _ in range(2):
            model(prompt(7))
    warnings = [message for message in caplog.messages if "gradients are recorded" in message]
    assert len(warnings) == 2


def test_restore_after_the_model_was_changed(no_codegen: None) -> None:
    model = ple_compile.compile(tiny_model(), whole_graph=False)
    layer = copy.deepcopy(model.model.layers[1].ple)
    model.model.layers[1].ple = layer
    ple_compile.restore(model)
    assert "get_compiled_call" not in vars(model)


@pytest.mark.parametrize("whole_graph", [True, False])
@pytest.mark.parametrize("inner_first", [True, False])
def test_restore_of_a_model_compiled_inside_another(no_codegen: None, whole_graph: bool, inner_first: bool) -> None:
    model = ple_compile.compile(tiny_model(), whole_graph=whole_graph)
    ple_compile.compile(model.model, whole_graph=whole_graph)
    for compiled in (model.model, model) if inner_first else (model, model.model):
        ple_compile.restore(compiled)
    assert all(module._compiled_call_impl is None for module in model.modules())
    assert all("forward" not in vars(module) for module in model.modules())
