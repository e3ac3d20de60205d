"""ple::ngram_lookup on the device: equal to indexing by ple::ngram_ids, one launch, far rows, CUDA graphs."""

import pytest
import torch

from ple_compile.ops.ngram_ids import ngram_ids
from ple_compile.ops.ngram_lookup import ngram_lookup
from ple_compile.tables.pinning import page_lock
from tests.gpu import synchronisation

EOS = 3
HEADS = 16


def hashes(rows):
    sizes = torch.tensor([rows // HEADS - 2 * head - 1 for head in range(HEADS)], device="cuda")
    multipliers = torch.tensor([23703573157769, 9876543210987, 1357913579135], device="cuda")
    return multipliers, sizes, sizes.cumsum(0) - sizes


def draw(batch, seq, dtype=torch.int64):
    tokens = torch.randint(0, 248_320, (batch, seq), device="cuda")
    return torch.where(torch.rand(batch, seq, device="cuda") < 0.2, EOS, tokens).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("width", [160, 20, 33])
@pytest.mark.parametrize("batch, seq", [(1, 1), (64, 1), (3, 2), (2, 1021), (1, 8192)])
@pytest.mark.parametrize("context_len", [None, 2])
def test_equals_indexing(dtype, width, batch, seq, context_len):
    table = torch.randint(0, 256, (40_000, width * dtype.itemsize), dtype=torch.uint8, device="cuda").view(dtype)
    tokens = draw(batch, seq, torch.int32)
    context = None if context_len is None else draw(batch, context_len)
    rows = ngram_lookup(table, tokens, context, *hashes(40_000), EOS)
    expected = table.view(torch.uint8)[ngram_ids(tokens, context, *hashes(40_000), EOS)]
    assert torch.equal(rows.view(torch.uint8), expected)


def test_offsets_past_31_bits():
    rows = 30_000_000
    table = torch.zeros(rows, 160, dtype=torch.bfloat16, device="cuda")
    table.view(torch.int64)[:, 0] = torch.arange(rows, device="cuda")
    tokens = draw(1, 4096)
    found = ngram_lookup(table, tokens, None, *hashes(rows), EOS).view(torch.int64)[..., 0]
    assert torch.equal(found, ngram_ids(tokens, None, *hashes(rows), EOS)) and found.max() > 29_000_000


def test_one_launch_without_synchronisation():
    table, tokens, arguments = torch.randn(40_000, 160, device="cuda"), draw(2, 512), hashes(40_000)
    ngram_lookup(table, tokens, None, *arguments, EOS)
    with synchronisation.forbidden():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            ngram_lookup(table, tokens, None, *arguments, EOS)
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels == ["ngram_lookup_kernel"]


def test_replays_in_a_graph():
    table, tokens, arguments = torch.randn(40_000, 160, device="cuda"), draw(2, 100), hashes(40_000)
    ngram_lookup(table, tokens, None, *arguments, EOS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = ngram_lookup(table, tokens, None, *arguments, EOS)
    for _ in range(3):
        tokens.copy_(draw(2, 100))
        graph.replay()
        assert torch.equal(rows, table[ngram_ids(tokens, None, *arguments, EOS)])


def test_a_table_on_the_host_is_refused():
    table = torch.randn(1000, 8)
    page_lock(table)
    with pytest.raises(ValueError, match="use ple::ngram_ids and ple::lookup"):
        ngram_lookup(table, draw(1, 4), None, *hashes(1000), EOS)
