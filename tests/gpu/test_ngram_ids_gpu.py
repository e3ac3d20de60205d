"""ple::ngram_ids on the device: equal to the reference, one launch, no host synchronisation."""

import pytest
import torch

from ple_compile.ops import ngram_ids
from tests.gpu import synchronisation

EOS = 3
RELEASED_SIZES = [20000003 + 10 * head for head in range(16)]


def hashes(device="cuda"):
    multipliers = torch.tensor([23703573157769, 9876543210987, 1357913579135], device=device)
    sizes = torch.tensor(RELEASED_SIZES, device=device)
    return multipliers, sizes, sizes.cumsum(0) - sizes


def draw(batch, seq, dtype=torch.int64):
    tokens = torch.randint(0, 248_320, (batch, seq))
    return torch.where(torch.rand(batch, seq) < 0.2, EOS, tokens).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("batch, seq", [(1, 1), (64, 1), (3, 2), (2, 1021), (1, 8192)])
@pytest.mark.parametrize("context_len", [None, 0, 1, 2, 5])
def test_equals_reference(dtype, batch, seq, context_len):
    tokens = draw(batch, seq, dtype)
    context = None if context_len is None else draw(batch, context_len)
    ids = torch.ops.ple.ngram_ids(tokens.cuda(), None if context is None else context.cuda(), *hashes(), EOS)
    assert torch.equal(ids.cpu(), ngram_ids.reference(tokens, context, *hashes("cpu"), EOS))


def test_extreme_and_strided_tokens():
    tokens = torch.tensor([[-1, 10**15, 2**63 - 1, -(2**63), EOS, 0, -EOS, 496640] * 4]).repeat(4, 1)
    strided = tokens.cuda().T.contiguous().T[::2, 1::3]
    ids = torch.ops.ple.ngram_ids(strided, None, *hashes(), EOS)
    assert torch.equal(ids.cpu(), ngram_ids.reference(strided.cpu(), None, *hashes("cpu"), EOS))


def test_one_launch_without_synchronisation():
    tokens, arguments = draw(2, 512).cuda(), hashes()
    torch.ops.ple.ngram_ids(tokens, None, *arguments, EOS)
    with synchronisation.forbidden():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.ops.ple.ngram_ids(tokens, None, *arguments, EOS)
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels == ["ngram_ids_kernel"]


def test_replays_in_a_graph():
    tokens, arguments = draw(2, 100).cuda(), hashes()
    torch.ops.ple.ngram_ids(tokens, None, *arguments, EOS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = torch.ops.ple.ngram_ids(tokens, None, *arguments, EOS)
    for _ in range(3):
        tokens.copy_(draw(2, 100))
        graph.replay()
        assert torch.equal(ids.cpu(), ngram_ids.reference(tokens.cpu(), None, *hashes("cpu"), EOS))
