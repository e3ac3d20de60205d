"""The whole transformers model captured as one graph per kind of call, with the tokens of the plain model."""

import pytest
import torch
from torch import nn

from ple_compile.whole_graph import apply, apply_indexer, prepare_cache, sources
from tests.whole_graph.tiny_qwen4exp import CACHE, make_cache, make_model, modeling

# Two layers, each kind once. Eight heads: with two, a quarter of all block scores is exactly zero, and the original
# leaves ties open.
SMALL = dict(
    num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], ple_layer_ids=[1], indexer_n_heads=8
)


class CountingBackend:
    """Runs graphs as they are and remembers them."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, example_inputs):
        self.graphs.append(graph)
        return graph.forward


def compiled_pair(**changes):
    """A compiled model with the whole-graph form, the same model as it is, and the backend."""
    torch._dynamo.reset()
    model, plain, backend = make_model(**SMALL, **changes), make_model(**SMALL, **changes), CountingBackend()
    apply(model)
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True, dynamic=True)
    return model, plain, backend


def draw_prompt(length: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(4, 97, (rows, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def test_ten_prompt_lengths_without_a_cache():
    model, plain, backend = compiled_pair()
    for length in (5, 3, 4, 8, 9, 17, 33, 40, 64, 65):
        prompt = draw_prompt(length)
        actual, expected = (m(prompt, use_cache=False).logits for m in (model, plain))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert len(backend.graphs) == 1


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "most_graphs"),
    # A static cache takes prompts and later chunks through one graph; so could a default one, but for its empty keys.
    [("dynamic", 3), ("static", 2), pytest.param("default", 3, marks=pytest.mark.slow)],
)
def test_ten_prompt_lengths_with_a_cache(kind, most_graphs):
    model, plain, backend = compiled_pair()
    for length in (5, 3, 4, 8, 9, 17, 33, 40, 64, 65):
        prompt = draw_prompt(length)
        runs = []
        for m in (model, plain):
            cache = None if kind == "default" else make_cache(kind, m.config, max_cache_len=80)
            if kind == "static" and m is model:
                prepare_cache(m.model, cache, len(prompt))
            tokens, kept = prompt, []
            # The prompt, a chunk of three forced tokens, then greedy single tokens.
            for step in range(5):
                output = m(tokens, **({} if cache is None else {CACHE: cache}))
                cache = output[CACHE]
                best = output.logits[:, -1:].argmax(-1)
                kept.append(best)
                tokens = prompt[:, :3].clone() if step == 0 else best
            runs.append((torch.cat(kept, dim=1), output.logits))
        (actual, actual_logits), (expected, expected_logits) = runs
        assert torch.equal(actual, expected)
        torch.testing.assert_close(actual_logits, expected_logits, rtol=0, atol=1e-5)
    assert len(backend.graphs) <= most_graphs


@torch.no_grad()
@pytest.mark.parametrize("kind, attention", [(None, "sdpa"), pytest.param("static", "eager", marks=pytest.mark.slow)])
def test_generate_with_left_padding(kind, attention):
    model, plain, backend = compiled_pair(attn_implementation=attention)
    model.set_attn_implementation(attention)
    plain.set_attn_implementation(attention)
    for seed in range(4):
        prompt, mask = draw_prompt(20 + seed, rows=3), torch.ones(3, 20 + seed, dtype=torch.int64)
        mask[0, :7], mask[1, : 2 + seed] = 0, 0
        prompt[mask == 0] = 0
        settings = dict(max_new_tokens=5, do_sample=False, cache_implementation=kind, eos_token_id=-1)
        actual, expected = (m.generate(prompt, attention_mask=mask, **settings) for m in (model, plain))
        assert torch.equal(actual, expected)
    assert len(backend.graphs) == 2


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_reset_cache_gives_what_a_fresh_one_gives(kind):
    model, plain = make_model(**SMALL), make_model(**SMALL)
    apply(model)
    cache = make_cache(kind, model.config)
    model(draw_prompt(30), **{CACHE: cache})
    cache.reset()
    if kind == "dynamic" and cache.get_seq_length() != 0:
        pytest.skip("this transformers' reset leaves a dynamic cache's length as it was")
    fresh = make_cache(kind, model.config)
    for tokens in (draw_prompt(20), draw_prompt(1), draw_prompt(4)):
        actual = model(tokens, **{CACHE: cache}).logits
        expected = plain(tokens, **{CACHE: fresh}).logits
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_the_cache_after_each_step_is_that_of_the_plain_model(kind):
    model, plain = make_model(**SMALL), make_model(**SMALL)
    apply(model)
    caches = [make_cache(kind, model.config) for _ in range(2)]
    for tokens in (draw_prompt(2), draw_prompt(11), draw_prompt(1)):
        for m, cache in zip((model, plain), caches):
            m(tokens, **{CACHE: cache})
        for ours, theirs in zip(caches[0].layers, caches[1].layers):
            for name in vars(theirs):
                if name == "indexer_position_ids" and kind == "static":
                    continue
                assert_same_state(getattr(ours, name), getattr(theirs, name), name)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 14


def assert_same_state(ours, theirs, name):
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_same_state(ours[key], theirs[key], f"{name}[{key}]")
    elif isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, name
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5, msg=name)
    else:
        assert ours == theirs, name


@torch.no_grad()
def test_a_cache_filled_by_the_plain_model_is_continued():
    model, plain, _ = compiled_pair()
    for kind in ("dynamic", "static"):
        caches = [make_cache(kind, model.config) for _ in range(2)]
        for cache in caches:
            plain(draw_prompt(20), **{CACHE: cache})
        actual, expected = (m(draw_prompt(1), **{CACHE: c}).logits for m, c in zip((model, plain), caches))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_shapes_of_a_static_cache_do_not_grow():
    """What CUDA graphs need: a decode step's inputs keep shape and address."""
    model = make_model(**SMALL)
    apply(model)
    cache = make_cache("static", model.config)
    prepare_cache(model.model, cache, 2)

    def tensors(value):
        values = value.values() if isinstance(value, dict) else [value]
        return [(x.shape, x.data_ptr()) for x in values if isinstance(x, torch.Tensor)]

    def state():
        return [tensors(v) for owner in (cache, *cache.layers) for v in vars(owner).values()]

    before = state()
    for length in (9, 1, 3, 1):
        model(draw_prompt(length), **{CACHE: cache})
        assert state() == before


@torch.no_grad()
@pytest.mark.parametrize("kind", [pytest.param("none", marks=pytest.mark.slow), "dynamic"])
def test_hidden_states_and_router_logits_in_one_graph(kind):
    model, plain, backend = compiled_pair()
    wanted = dict(output_hidden_states=True, output_router_logits=True)
    outputs = []
    for m in (model, plain):
        cache = make_cache(kind, m.config)
        outputs.append(m(draw_prompt(12), **wanted, **({"use_cache": False} if cache is None else {CACHE: cache})))
    assert len(backend.graphs) == 1
    for name in ("hidden_states", "router_logits"):
        actual, expected = (getattr(output, name) for output in outputs)
        assert len(actual) == len(expected) >= 2
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_packed_sequences_and_a_mask_with_holes():
    model, plain, _ = compiled_pair()
    prompt = draw_prompt(30)
    positions = torch.cat([torch.arange(n) for n in (7, 13, 10)]).expand(2, -1)
    packed = dict(position_ids=positions, use_cache=False)
    visible = torch.ones(30, 30, dtype=torch.bool).tril()
    visible = (visible & (torch.rand(30, 30, generator=torch.Generator().manual_seed(0)) < 0.7)) | torch.eye(30).bool()
    holes = dict(attention_mask=visible.expand(2, 1, -1, -1), use_cache=False)
    for settings in (dict(use_cache=False), packed, holes):
        actual, expected = (m(prompt, **settings).logits for m in (model, plain))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_indexer_alone_changes_no_bit(dtype):
    model, plain = (make_model(**SMALL).to(dtype) for _ in range(2))
    undo = apply_indexer(model)
    assert undo.changes == ["Qwen4ExpTextModel", "Qwen4ExpTextQSAIndexer"]
    prompt, padding = draw_prompt(30), torch.ones(2, 30, dtype=torch.int64)
    padding[0, :7] = 0
    positions = torch.cat([torch.arange(n) for n in (7, 13, 10)]).expand(2, -1)
    holes = torch.ones(30, 30, dtype=torch.bool).tril()
    holes[20:, 3] = False
    for settings in (
        dict(use_cache=False),
        dict(attention_mask=padding),
        dict(position_ids=positions, use_cache=False),
        dict(attention_mask=holes.expand(2, 1, -1, -1), use_cache=False),
    ):
        assert torch.equal(model(prompt, **settings).logits, plain(prompt, **settings).logits), settings
    for kind in ("dynamic", "static"):
        caches = [make_cache(kind, model.config) for _ in range(2)]
        for tokens in (prompt, draw_prompt(1), draw_prompt(5)):
            ours, theirs = (m(tokens, **{CACHE: cache}).logits for m, cache in zip((model, plain), caches))
            assert torch.equal(ours, theirs), (kind, tokens.shape)
    undo()
    assert "forward" not in vars(model.model) and "forward" not in vars(model.model.layers[1].self_attn.indexer)


@torch.no_grad()
def test_eager_experts_are_captured():
    model, plain, backend = compiled_pair()
    for m in (model, plain):
        m.set_experts_implementation("eager")
    actual, expected = (m(draw_prompt(20), use_cache=False).logits for m in (model, plain))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert len(backend.graphs) == 1


@pytest.mark.slow
@torch.no_grad()
def test_inductor_in_float32():
    """Its outputs become the next call's inputs: their strides must be eager's, or every other step recompiles."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, plain = make_model(**SMALL), make_model(**SMALL)
    apply(model)
    compiled = torch.compile(model.forward, fullgraph=True, dynamic=True)
    caches = [make_cache("dynamic", model.config) for _ in range(2)]
    for length in (20, 1, 1, 1):
        tokens = draw_prompt(length)
        actual, expected = (m(tokens, **{CACHE: c}).logits for m, c in zip((compiled, plain), caches))
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_undo_gives_the_methods_back():
    model = make_model(**SMALL)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    hooks = {name: list(module._forward_hooks) for name, module in model.named_modules()}
    undo = apply(model)
    assert undo.changes and "forward" in vars(model.model.layers[1].self_attn.indexer)
    assert vars(modeling.Qwen4ExpTextQSAIndexer)["forward"].__module__ == modeling.__name__
    undo()
    for name, module in model.named_modules():
        assert {k for k in vars(module)} - {"_output_capturing_hooks_installed"} == set(before[name])
        assert list(module._forward_hooks) == hooks[name]
    apply(model)


def test_refusals(monkeypatch):
    with pytest.raises(ValueError, match="Linear holds no transformers Qwen4ExpTextModel"):
        apply(nn.Linear(1, 1))
    model = make_model(**SMALL)
    undo = apply(model)
    with pytest.raises(ValueError, match="already has a forward of its own"):
        apply(model)
    undo()
    foreign = {release: {**known, "Qwen4ExpTextModel": "0"} for release, known in sources.KNOWN.items()}
    monkeypatch.setattr(sources, "KNOWN", foreign)
    with pytest.raises(ValueError, match="knows Qwen4Exp as in transformers 5.17.0 and 5.24.0.*Qwen4ExpTextModel"):
        apply(model)
