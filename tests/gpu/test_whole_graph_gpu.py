"""The whole-graph form on a CUDA device: its two ops, and a model whose decode step is one CUDA graph."""

import pytest
import torch

from ple_compile.ops import chunk_gated_delta_rule as delta_rule
from ple_compile.ops import select_tokens as selection
from ple_compile.whole_graph import apply, prepare_cache
from tests.gpu import synchronisation
from tests.whole_graph.tiny_qwen4exp import CACHE, make_cache, make_model

# Eight heads: no block scores exactly zero, so the original's open ties do not matter.
SMALL = dict(
    num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], ple_layer_ids=[1], indexer_n_heads=8
)


def draw_delta_rule(length: int, dtype: torch.dtype, state: bool) -> list:
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to("cuda", dtype)

    query, key, value = normal(1, length, 16, 128), normal(1, length, 16, 128), normal(1, length, 48, 128)
    g = -torch.rand(1, length, 48, generator=generator).cuda()
    beta = torch.rand(1, length, 48, generator=generator).to("cuda", dtype)
    initial = torch.randn(1, 48, 128, 128, generator=generator).cuda() if state else None
    return [query, key, value, g, beta, initial, 64, True]


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("length", [1, 64, 200, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_scan_kernel_against_plain_torch(length, dtype, state):
    inputs = draw_delta_rule(length, dtype, state)
    (out, final), (expected, expected_final) = delta_rule.launch(*inputs), delta_rule.reference(*inputs)
    # Three tf32 products keep 22 of 24 bits.
    tolerance = 4e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert (out.float() - expected.float()).abs().max() <= tolerance * expected.float().abs().max()
    assert (final - expected_final).abs().max() <= 4e-6 * expected_final.abs().max()


def draw_selection(length: int, dtype: torch.dtype) -> list:
    """Released widths: four heads of 128, blocks of four keys, 512 of them."""
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(1, length, 4, 128, generator=generator).to(dtype)
    keys = torch.randn(1, length, 128, generator=generator).to(dtype)
    angles = torch.arange(length)[:, None] * torch.rand(32, generator=generator)
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(0)
    weight = torch.randn(128, generator=generator) * 0.1
    return [x.cuda() for x in (query, keys, angles.cos().to(dtype), angles.sin().to(dtype))], weight.to("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selection_equals_the_one_of_the_cpu(dtype):
    tensors, weight = draw_selection(2600, dtype)
    visible = torch.ones(1, 2600, 2600, dtype=torch.bool, device="cuda").tril()
    results = []
    for device in ("cuda", "cpu"):
        moved = [x.to(device) for x in (*tensors, visible, weight)]
        results.append(torch.ops.ple.select_tokens(*moved, 1e-6, 4, 512, "prefix").cpu())
    ours, theirs = results
    assert torch.equal(ours.sum(-1), theirs.sum(-1))
    # One block of 512 may change places with the next where rounding decides.
    assert (ours != theirs).sum(-1).max() <= 8 and (ours != theirs).any(-1).float().mean() < 0.02


def test_selection_memory_is_bounded():
    tensors, weight = draw_selection(8192, torch.bfloat16)
    visible = torch.ones(1, 8192, 8192, dtype=torch.bool, device="cuda").tril()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    selected = torch.ops.ple.select_tokens(*tensors, visible, weight, 1e-6, 4, 512, "prefix")
    # Heads times keys times queries in float32 would be 1,024 MiB over blocks, 4,096 over keys.
    assert (torch.cuda.max_memory_allocated() - before - selected.nbytes) / 2**20 < 640


def test_selection_of_known_masks_does_not_wait_for_the_device():
    tensors, weight = draw_selection(300, torch.bfloat16)
    visible = torch.ones(1, 300, 300, dtype=torch.bool, device="cuda").tril()
    arguments = *tensors, visible, weight, 1e-6, 4, 16
    torch.ops.ple.select_tokens(*arguments, "prefix")
    with synchronisation.forbidden():
        for layout in ("prefix", "interval"):
            torch.ops.ple.select_tokens(*arguments, layout)
        selection.select_rows(tensors[0][:, -1], *tensors[1:], visible[:, -1], weight, 1e-6, 4, 16)


@torch.no_grad()
def test_decode_as_one_cuda_graph_gives_the_tokens_of_the_plain_model():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, plain = make_model(**SMALL).cuda(), make_model(**SMALL).cuda()
    apply(model)
    prefill = torch.compile(model.forward, fullgraph=True, dynamic=True)
    decode = torch.compile(model.forward, fullgraph=True, dynamic=False, mode="reduce-overhead")
    caches = [make_cache("static", model.config), None]
    for length in (20, 9, 33):
        prompt = torch.randint(4, 97, (2, length), generator=torch.Generator().manual_seed(length)).cuda()
        # The same static cache again: its addresses are those of the recorded graph.
        caches[0].reset()
        prepare_cache(model.model, caches[0], 2)
        caches[1] = make_cache("static", model.config)
        tokens = [prompt, prompt]
        for step in range(12):
            calls = (prefill if step == 0 else decode, plain)
            logits = [call(t, **{CACHE: c}).logits[:, -1] for call, t, c in zip(calls, tokens, caches)]
            torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-4)
            tokens = [x.argmax(-1, keepdim=True) for x in logits]
            assert torch.equal(*tokens)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
