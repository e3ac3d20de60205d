"""ple::ngram_lookup is ple::lookup of ple::ngram_ids; the kernel runs in Triton's interpreter."""

import pytest
import torch

from ple_compile.ops import ngram_ids, ngram_lookup

EOS = 3
IMPLEMENTATIONS = [ngram_lookup.reference, ngram_lookup.launch]
MULTIPLIERS = [23703573157769, 9876543210987, 1357913579135, 4611686018427387905]
PRIMES = [101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179]


def hash_tensors(ngram, heads):
    sizes = torch.tensor(PRIMES[: (ngram - 1) * heads])
    return torch.tensor(MULTIPLIERS[:ngram]), sizes, sizes.cumsum(0) - sizes


def make_table(sizes, width, dtype=torch.bfloat16):
    """Random bytes: NaN payloads and negative zeros are to survive too."""
    return torch.randint(0, 256, (int(sizes.sum()), width * dtype.itemsize), dtype=torch.uint8).view(dtype)


def draw_tokens(batch, seq, dtype=torch.int64):
    tokens = torch.randint(0, 12, (batch, seq))
    return torch.where(torch.rand(batch, seq) < 0.3, EOS, tokens).to(dtype)


def assert_same_bytes(rows, expected):
    assert rows.dtype == expected.dtype and rows.shape == expected.shape and rows.is_contiguous()
    assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("ngram, heads", [(2, 1), (2, 8), (3, 1), (3, 8), (4, 3)])
@pytest.mark.parametrize("context_len", [None, 0, 1, 5])
@pytest.mark.parametrize("batch, seq", [(3, 1), (1, 2), (2, 37)])
def test_rows_of_the_ids(implementation, ngram, heads, context_len, batch, seq):
    hashes = hash_tensors(ngram, heads)
    table, tokens = make_table(hashes[1], 20), draw_tokens(batch, seq)
    context = None if context_len is None else draw_tokens(batch, context_len)
    ids = ngram_ids.reference(tokens, context, *hashes, EOS)
    assert_same_bytes(implementation(table, tokens, context, *hashes, EOS), table[ids])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.uint8], ids=str)
@pytest.mark.parametrize("width", [1, 3, 160])
def test_any_row(implementation, dtype, width):
    hashes = hash_tensors(3, 2)
    table, tokens = make_table(hashes[1], width, dtype), draw_tokens(2, 9, torch.int32)
    ids = ngram_ids.reference(tokens, None, *hashes, EOS)
    assert_same_bytes(implementation(table, tokens, None, *hashes, EOS), table[ids])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strided_inputs_and_ids_outside_the_vocabulary(implementation):
    hashes = hash_tensors(3, 8)
    table = make_table(hashes[1], 24)[:, 4:20]
    extremes = torch.tensor([[-1, 10**15, -(10**15), 2**63 - 1, -(2**63), EOS, 0, -EOS, 496640, 7, EOS, -1]] * 4)
    tokens, context = extremes.T.contiguous().T[::2, 1::3], extremes.T.contiguous().T[::2, :2]
    ids = ngram_ids.reference(tokens, context, *hashes, EOS)
    assert_same_bytes(implementation(table, tokens, context, *hashes, EOS), table[ids].contiguous())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_no_tokens(implementation, shape):
    hashes = hash_tensors(3, 2)
    rows = implementation(make_table(hashes[1], 8), draw_tokens(*shape), None, *hashes, EOS)
    assert rows.shape == (*shape, 4, 8) and rows.dtype == torch.bfloat16


def test_rows_outside_the_table_are_never_read():
    hashes = hash_tensors(2, 2)
    whole = torch.full((300, 8), 7.0)
    table = whole[50 : 50 + 120]
    table.fill_(1.0)
    tokens = draw_tokens(2, 40)
    ids = ngram_ids.reference(tokens, None, *hashes, EOS)
    rows = ngram_lookup.launch(table, tokens, None, *hashes, EOS)
    assert (ids >= 120).any() and torch.equal(rows, (ids < 120).float()[..., None].expand_as(rows))
    with pytest.raises(ValueError, match="lie outside the table"):
        ngram_lookup.reference(table, tokens, None, *hashes, EOS)


def test_many_rows_take_larger_programs():
    choices = ngram_lookup.Choices(many_rows=1)
    test_rows_of_the_ids(lambda *args: ngram_lookup.run(*args, choices), 3, 8, 2, 2, 37)


def test_opcheck():
    hashes = hash_tensors(3, 2)
    table = torch.randn(int(hashes[1].sum()), 8)
    for context in (None, draw_tokens(2, 2)):
        torch.library.opcheck(torch.ops.ple.ngram_lookup.default, (table, draw_tokens(2, 5), context, *hashes, EOS))


def test_wrong_arguments_are_named():
    multipliers, sizes, offsets = hash_tensors(3, 2)
    with pytest.raises(ValueError, match="float32; pass int32 or int64 token ids"):
        ngram_lookup.launch(make_table(sizes, 8), torch.rand(1, 3), None, multipliers, sizes, offsets, EOS)
    with pytest.raises(ValueError, match="the table is on meta .* use ple::ngram_ids and ple::lookup"):
        ngram_lookup.launch(
            torch.empty(9, 8, device="meta"), draw_tokens(1, 3), None, multipliers, sizes, offsets, EOS
        )  # fmt: skip
