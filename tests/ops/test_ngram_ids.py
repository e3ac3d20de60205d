"""ple::ngram_ids against plain-integer arithmetic; the kernel runs in Triton's interpreter."""

import pytest
import torch

from ple_compile.ops import ngram_ids
from tests import oracle

EOS = 3
IMPLEMENTATIONS = [ngram_ids.reference, ngram_ids.launch]
MULTIPLIERS = [23703573157769, 9876543210987, 1357913579135, 4611686018427387905]
PRIMES = [101, 103, 107, 109, 113, 127, 20000003, 20000023, 20000033, 20000047, 20000089, 20000093]


def hash_tensors(ngram, heads, strided=False):
    """Multipliers, sizes and offsets for `heads` heads per order, optionally as every second element of a buffer."""
    count = (ngram - 1) * heads
    sizes = (PRIMES * 4)[:count]
    offsets = [sum(sizes[:head]) for head in range(count)]
    tensors = [torch.tensor(values) for values in (MULTIPLIERS[:ngram], sizes, offsets)]
    return [t.repeat_interleave(2)[::2] for t in tensors] if strided else tensors


def draw_tokens(batch, seq, seed=0, dtype=torch.int64):
    """A third EOS, the rest from a small vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 12, (batch, seq), generator=generator)
    return torch.where(torch.rand(batch, seq, generator=generator) < 1 / 3, EOS, tokens).to(dtype)


def expected(history, hashes, heads, keep):
    multipliers, sizes, offsets = (t.tolist() for t in hashes)
    rows = [oracle.ngram_ids(request, multipliers, sizes, offsets, EOS, heads) for request in history.tolist()]
    return torch.tensor([request[len(request) - keep :] for request in rows], dtype=torch.int64).reshape(
        len(rows), keep, len(sizes)
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("ngram, heads", [(2, 1), (2, 8), (3, 1), (3, 8), (4, 3)])
@pytest.mark.parametrize("context_len", [None, 0, 1, 2, 5])
@pytest.mark.parametrize("seq", [1, 2, 37])
def test_equals_the_integer_oracle(implementation, ngram, heads, context_len, seq):
    history = draw_tokens(3, (context_len or 0) + seq, seed=seq)
    context = None if context_len is None else history[:, :context_len]
    hashes = hash_tensors(ngram, heads)
    # The oracle sees only what the op can see: N - 1 tokens before the first.
    visible = history[:, max(0, (context_len or 0) - (ngram - 1)) :]
    ids = implementation(history[:, context_len or 0 :], context, *hashes, EOS)
    assert ids.is_contiguous()
    assert torch.equal(ids, expected(visible, hashes, heads, seq))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_wraps_and_floors_for_ids_outside_the_vocabulary(implementation):
    extremes = [-1, 10**15, -(10**15), 2**63 - 1, -(2**63), EOS, 0, -EOS, 496640, 7, EOS, EOS, -1]
    tokens = torch.tensor([extremes, extremes[::-1]])
    hashes = hash_tensors(4, 3)
    assert torch.equal(implementation(tokens, None, *hashes, EOS), expected(tokens, hashes, 3, len(extremes)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("eos", [0, -1, 1, 3])
def test_any_eos_id(implementation, eos):
    tokens = draw_tokens(2, 19).masked_fill_(draw_tokens(2, 19, seed=1) == EOS, eos)
    multipliers, sizes, offsets = hash_tensors(3, 2)
    rows = [oracle.ngram_ids(r, *(t.tolist() for t in (multipliers, sizes, offsets)), eos, 2) for r in tokens.tolist()]
    assert torch.equal(implementation(tokens, None, multipliers, sizes, offsets, eos), torch.tensor(rows))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_chunking_gives_the_ids_of_the_whole(implementation):
    history, hashes = draw_tokens(2, 24), hash_tensors(3, 2)
    whole = expected(history, hashes, 2, 24)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        cuts = sorted({0, 24, *torch.randint(1, 24, (5,), generator=generator).tolist()})
        for start, stop in zip(cuts, cuts[1:]):
            # The context as caches keep it: exactly N - 1 columns, EOS where there was nothing.
            context = torch.nn.functional.pad(history[:, :start], (2, 0), value=EOS)[:, -2:]
            ids = implementation(history[:, start:stop], context, *hashes, EOS)
            assert torch.equal(ids, whole[:, start:stop])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("context_dtype", [torch.int32, torch.int64])
def test_strided_inputs_of_either_width(implementation, dtype, context_dtype):
    history, hashes = draw_tokens(4, 30), hash_tensors(3, 2, strided=True)
    tokens = history.to(dtype)[::2, 4::3]
    context = history.to(context_dtype).T.contiguous().T[::2, 1:4]
    joined = torch.cat([context.long(), tokens.long()], dim=1)[:, 1:]
    ids = implementation(tokens, context, *hashes, EOS)
    assert torch.equal(ids, expected(joined, hashes, 2, tokens.shape[1]))
    broadcast = tokens[:1].expand(3, -1)
    assert torch.equal(
        implementation(broadcast, None, *hashes, EOS), expected(broadcast.long(), hashes, 2, tokens.shape[1])
    )


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, ngram_ids.fake])
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_empty(implementation, shape):
    tokens = torch.zeros(shape, dtype=torch.int64)
    assert implementation(tokens, None, *hash_tensors(3, 2), EOS).shape == (*shape, 4)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, ngram_ids.fake])
def test_bad_inputs_name_the_argument(implementation):
    tokens, (multipliers, sizes, offsets) = draw_tokens(2, 4), hash_tensors(3, 2)
    with pytest.raises(ValueError, match="tokens is torch.float32; pass int32 or int64"):
        implementation(tokens.float(), None, multipliers, sizes, offsets, EOS)
    with pytest.raises(ValueError, match=r"tokens has shape \(8,\)"):
        implementation(tokens.flatten(), None, multipliers, sizes, offsets, EOS)
    with pytest.raises(ValueError, match="context has 1 rows and tokens 2"):
        implementation(tokens, tokens[:1], multipliers, sizes, offsets, EOS)
    with pytest.raises(ValueError, match="3 multipliers, 3 sizes and 4 offsets"):
        implementation(tokens, None, multipliers, sizes[:3], offsets, EOS)
    with pytest.raises(ValueError, match="sizes is torch.int32"):
        implementation(tokens, None, multipliers, sizes.int(), offsets, EOS)


def test_operator_contract():
    op = torch.ops.ple.ngram_ids.default
    for context in (None, draw_tokens(2, 2)):
        torch.library.opcheck(op, (draw_tokens(2, 5), context, *hash_tensors(3, 2), EOS))


def test_compiles_whole_with_dynamic_shapes():
    hashes = hash_tensors(3, 2)

    @torch.compile(fullgraph=True, dynamic=True)
    def compiled(tokens, context):
        return torch.ops.ple.ngram_ids(tokens, context, *hashes, EOS) + 1

    for seq in (5, 9):
        history = draw_tokens(2, seq + 2)
        assert torch.equal(compiled(history[:, 2:], history[:, :2]), expected(history, hashes, 2, seq) + 1)
