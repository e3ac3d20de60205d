"""The reference model against transformers: the same weights by name, the same logits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from examples.reference import Config, ForCausalLM, flash_next, text_weights, tiny
from examples.reference.packed import PackedBatch, PackedPLE

pytest.importorskip("transformers.models.qwen4_exp")
from transformers import DynamicCache
from transformers.models.qwen4_exp import (
    Qwen4ExpConfig,
    Qwen4ExpForCausalLM,
    Qwen4ExpForConditionalGeneration,
    Qwen4ExpTextConfig,
)
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf_module

TOLERANCE = 1e-5
HAS_NEW_CACHE_NAME = "cache" in hf_module.Qwen4ExpTextGatedDeltaNet.forward.__annotations__
CONFIGS = {
    "tiny": tiny(),
    "three_ple_layers": tiny(ple_layer_ids=(1, 2, 3), heads_per_ngram=1),
    "no_ple_two_attention_layers": tiny(ple_layer_ids=(), layer_types=("full_attention", "linear_attention") * 2),
    "four_streams_bigrams": tiny(hc_count=4, ngram_size=2, ple_conv_kernel_size=2, ple_embed_dim=20),
    "four_grams_odd_widths": tiny(
        ngram_size=4, ple_conv_kernel_size=3, ple_embed_dim=42, hidden_size=27, output_gate_type="sigmoid"
    ),
    "more": tiny(norm_topk_prob=False, attention_bias=True, indexer_compress_ratio=4, num_key_value_heads=1),
}


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights of order one: transformers starts norms and the PLE convolution at zero, which would test nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            scale = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            if "embed" in name or "conv1d" in name:
                scale = 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def build_pair(config: Config, attention: str = "sdpa") -> tuple[Qwen4ExpForCausalLM, ForCausalLM]:
    hf_config = Qwen4ExpTextConfig(
        **config.to_transformers(), attn_implementation=attention, experts_implementation="eager"
    )
    hf = Qwen4ExpForCausalLM(hf_config).eval()
    randomize(hf)
    model = ForCausalLM(Config.from_transformers(hf.config)).eval()
    model.load_state_dict(hf.state_dict())
    return hf, model


def hf_logits(hf, input_ids, cache=None, **kwargs) -> torch.Tensor:
    if cache is not None:
        kwargs["cache" if HAS_NEW_CACHE_NAME else "past_key_values"] = cache
    return hf(input_ids=input_ids, use_cache=cache is not None, **kwargs).logits


def random_ids(batch_size: int, length: int, seed: int = 0, vocab_size: int = 96) -> torch.Tensor:
    """Token ids, every fifth or so of them EOS (3)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (batch_size, length), generator=generator)
    return torch.where(torch.rand(ids.shape, generator=generator) < 0.2, 3, ids)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, where: torch.Tensor | None = None) -> None:
    assert ours.shape == theirs.shape and theirs.abs().max() > 0.3
    assert torch.isfinite(ours).all()
    difference = (ours - theirs).abs()
    assert (difference if where is None else difference[where]).max() <= TOLERANCE


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def test_config_round_trip():
    for config in [*CONFIGS.values(), flash_next()]:
        assert Config.from_transformers(Qwen4ExpTextConfig(**config.to_transformers())) == config


@pytest.mark.parametrize("name", CONFIGS)
def test_state_dict_and_hash_constants(name):
    hf = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**CONFIGS[name].to_transformers()))
    model = ForCausalLM(CONFIGS[name])
    ours, theirs = model.state_dict(), hf.state_dict()
    assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {n: (t.shape, t.dtype) for n, t in theirs.items()}
    constants = [n for n, t in ours.items() if t.dtype == torch.int64]
    assert len(constants) == 3 * len(CONFIGS[name].ple_layer_ids)
    assert all(torch.equal(ours[n], theirs[n]) for n in constants)


@pytest.mark.parametrize("length", [1, 2, 7, 40])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name, length):
    hf, model = build_pair(CONFIGS[name])
    ids = random_ids(2, length)
    assert_close(model(ids), hf_logits(hf, ids))


def test_long_prompt_and_eager_attention():
    hf, model = build_pair(CONFIGS["tiny"], attention="eager")
    ids = random_ids(1, 150)
    assert_close(model(ids), hf_logits(hf, ids))


def test_logits_to_keep():
    _, model = build_pair(CONFIGS["tiny"])
    ids = random_ids(2, 9)
    torch.testing.assert_close(model(ids, logits_to_keep=2), model(ids)[:, -2:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_mask(side):
    hf, model = build_pair(CONFIGS["tiny"])
    ids = random_ids(3, 23)
    mask = torch.ones_like(ids)
    for row, pad in enumerate([5, 0, 11]):
        mask[row, slice(None, pad) if side == "left" else slice(23 - pad, None)] = 0
    assert_close(model(ids, mask), hf_logits(hf, ids, attention_mask=mask), where=mask.bool())


def test_position_ids():
    hf, model = build_pair(CONFIGS["tiny"])
    ids = random_ids(2, 12)
    positions = torch.arange(12).expand(2, -1) * 2 + torch.tensor([[3], [0]])
    # Without a mask transformers takes positions that jump for several sequences packed into a row.
    theirs = hf_logits(hf, ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    assert_close(model(ids, position_ids=positions), theirs)


@pytest.mark.parametrize("chunks", [(17, 9, 1, 1, 1), (1, 1, 1, 5), (2, 1, 3, 2), (40,)])
@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_chunks_and_decode(name, chunks):
    hf, model = build_pair(CONFIGS[name])
    ids = random_ids(2, sum(chunks), seed=1)
    cache, hf_cache = model.new_cache(2, sum(chunks) + 3), DynamicCache(config=hf.config)
    addresses = [t.data_ptr() for layer in cache.layers for state in layer if state for t in state]
    outputs = []
    for chunk in ids.split(chunks, dim=1):
        outputs.append(model(chunk, cache=cache))
        assert_close(outputs[-1], hf_logits(hf, chunk, hf_cache))
    assert_close(torch.cat(outputs, 1), model(ids))
    assert addresses == [t.data_ptr() for layer in cache.layers for state in layer if state for t in state]


def test_padding_mask_with_cache():
    hf, model = build_pair(CONFIGS["tiny"])
    ids = random_ids(2, 20, seed=2)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, hf_cache = model.new_cache(2, 20), DynamicCache(config=hf.config)
    for start, end in [(0, 9), (9, 14), (14, 15), (15, 20)]:
        kwargs = dict(attention_mask=mask[:, :end], position_ids=positions[:, start:end])
        theirs = hf_logits(hf, ids[:, start:end], hf_cache, **kwargs)
        assert_close(model(ids[:, start:end], cache=cache, **kwargs), theirs, where=mask[:, start:end].bool())


def test_two_caches_do_not_meet():
    _, model = build_pair(CONFIGS["tiny"])
    ids, other = random_ids(1, 10), random_ids(1, 10, seed=5)
    alone = model(ids)
    first, second = model.new_cache(1, 16), model.new_cache(1, 16)
    model(ids[:, :4], cache=first)
    model(other, cache=second)
    assert_close(model(ids[:, 4:], cache=first), alone[:, 4:])


def test_text_side_of_conditional_generation():
    text = tiny().to_transformers()
    vision = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=24, patch_size=4)
    hf = Qwen4ExpForConditionalGeneration(Qwen4ExpConfig(text_config=text, vision_config=vision)).eval()
    randomize(hf)
    model = ForCausalLM(Config.from_transformers(hf.config.text_config)).eval()
    model.load_state_dict(text_weights(hf.state_dict()))
    ids = random_ids(2, 11)
    assert_close(model(ids), hf(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ple_layer_rounds_where_transformers_does(dtype):
    """In low precision the layer is bit-equal, padded and packed."""
    hf, model = build_pair(CONFIGS["three_ple_layers"])
    theirs, padded = hf.model.layers[1].ple.to(dtype), model.model.layers[1].ple.to(dtype)
    packed = PackedPLE(model.config, ple_index=1).to(dtype)
    packed.load_state_dict(padded.state_dict())
    ids, streams = random_ids(2, 23), torch.randn(2, 23, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = theirs(streams, ids, None)
    assert torch.equal(padded(streams, ids), expected)
    batch = PackedBatch(
        query_start_loc=torch.tensor([0, 23, 46]),
        ngram_context=torch.full((2, 2), 3),
        state_indices=torch.tensor([1, 2]),
        has_initial_state=torch.zeros(2, dtype=torch.bool),
    )
    pool = torch.zeros(3, 48, 9, dtype=dtype)
    assert torch.equal(packed(streams.flatten(0, 1), ids.flatten(), batch, pool), expected.flatten(0, 1))


@torch.enable_grad()
def test_gradients():
    hf, model = build_pair(CONFIGS["tiny"])
    ids = random_ids(2, 11)
    model(ids).square().sum().backward()
    hf_logits(hf, ids).square().sum().backward()
    theirs = {name: parameter.grad for name, parameter in hf.named_parameters()}
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (theirs[name] is None), name
        if parameter.grad is not None:
            assert (parameter.grad - theirs[name]).abs().max() <= 2e-5 * theirs[name].abs().max(), name


def test_full_graph_with_any_length():
    """One graph serves every prompt length, and one every chunk of a cached prompt."""
    types = ("linear_attention", "full_attention")
    _, model = build_pair(tiny(num_hidden_layers=2, layer_types=types, ple_layer_ids=(1,)))
    graphs = []

    def count(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=count, fullgraph=True, dynamic=True)
    for length in (5, 9, 14, 30):
        ids = random_ids(2, length)
        assert_close(compiled(ids), model(ids))
    assert len(graphs) == 1

    graphs.clear()
    cache, expected = model.new_cache(2, 24), model.new_cache(2, 24)
    for length in (7, 3, 6):
        ids = random_ids(2, length)
        assert_close(compiled(ids, cache=cache), model(ids, cache=expected))
    assert len(graphs) == 1


def test_flash_next_keeps_released_widths_at_any_size():
    config = flash_next(num_hidden_layers=1, ngram_vocab_size_base=1009, ple_layer_ids=(1,), num_experts=2)
    config = dataclasses.replace(config, num_experts_per_tok=1)
    with torch.device("meta"):
        model = ForCausalLM(config)
    ple = model.model.layers[0].ple
    assert ple.key_proj.weight.shape == (10240, 2560) and ple.conv1d.weight.shape == (10240, 1, 4)
    assert ple.ple_embedding.ngram_embedding.weight.shape[1] == 160
