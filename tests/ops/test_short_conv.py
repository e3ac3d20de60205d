import pytest
import torch
import torch.nn.functional as F
from ple_inputs import DEVICE, assert_close_to_exact, new_seed

from ple_compile.ops.short_conv import chains, launch, reference, short_conv

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh tensors hold NaN, so an element that a kernel forgets is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make(batch, seq, channels, kernel, columns=None, dtype=torch.float32, device=DEVICE):
    generator = torch.Generator().manual_seed(new_seed())

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x = random(batch, channels, seq).transpose(1, 2)
    state = None if columns is None else random(batch, columns, channels).transpose(1, 2)
    return x, random(channels, 1, kernel), state


def eager(x, weight, state, dilation):
    left = (weight.shape[-1] - 1) * dilation
    history = x.transpose(1, 2) if state is None else torch.cat([state, x.transpose(1, 2)], dim=-1)
    padded = F.pad(history, (left, 0))[..., -(left + x.shape[1]) :].to(weight.dtype)
    return F.silu(F.conv1d(padded, weight, groups=weight.shape[0], dilation=dilation)).transpose(1, 2)


# batch, seq, channels, kernel, dilation, state columns
CASES = [(2, 7, 24, 4, 3, None), (1, 1, 96, 4, 3, 9), (3, 20, 40, 3, 2, 5), (1, 4, 33, 2, 4, 4), (2, 9, 16, 1, 3, None)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_reference_is_eager_bit_for_bit(case, dtype):
    *shape, dilation, columns = case
    x, weight, state = make(*shape, columns, dtype, "cpu")
    actual = reference(x, weight, state, dilation)
    assert torch.equal(actual, eager(x, weight, state, dilation)) and actual.is_contiguous()
    assert torch.equal(actual, reference(x, weight[:, 0], state, dilation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_kernel(case, dtype):
    *shape, dilation, columns = case
    x, weight, state = make(*shape, columns, dtype)
    exact = reference(x.double(), weight.double(), None if state is None else state.double(), dilation)
    actual = launch(x, weight, state, dilation)
    assert actual.is_contiguous()
    assert_close_to_exact(actual, eager(x, weight, state, dilation), exact)


def test_low_precision_weight_casts_the_input():
    x, weight, state = make(2, 6, 24, 4, 9)
    weight = weight.bfloat16()
    expected = launch(x.bfloat16(), weight, state.bfloat16(), 3)
    assert torch.equal(launch(x, weight, state, 3), expected) and expected.dtype == torch.bfloat16


def test_no_tokens():
    for shape in ((0, 3, 24, 4), (2, 0, 24, 4)):
        x, weight, state = make(*shape, 9)
        for implementation in (reference, launch):
            assert implementation(x, weight, state, 3).shape == x.shape


def test_chains_cover_every_token_once():
    for batch, tokens, dilation, wanted in [(1, 1, 3, 500), (2, 100, 3, 50), (1, 8192, 3, 204), (64, 5, 2, 10)]:
        segments, steps = chains(batch, tokens, dilation, wanted)
        assert (segments - 1) * steps * dilation < tokens <= segments * steps * dilation


def test_opcheck():
    for dtype, columns in ((torch.float32, 9), (torch.bfloat16, None)):
        torch.library.opcheck(short_conv, (*make(2, 5, 24, 4, columns, dtype), 3))


def test_mismatches_name_the_tensors():
    x, weight, state = make(2, 5, 24, 4, 9, device="cpu")
    for function in (reference, launch):
        with pytest.raises(ValueError, match="weight"):
            function(x, weight[:-1], state, 3)
        with pytest.raises(ValueError, match="at least .* 9 columns"):
            function(x, weight, state[..., 1:], 3)
