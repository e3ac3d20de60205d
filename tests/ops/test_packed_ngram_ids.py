"""ple::packed_ngram_ids against plain-integer arithmetic; the kernel runs in Triton's interpreter."""

import pytest
import torch

from ple_compile.ops import packed_ngram_ids as op
from tests import oracle
from tests.ops.test_ngram_ids import EOS, draw_tokens, hash_tensors

IMPLEMENTATIONS = [op.reference, op.launch]
LENGTHS = {
    "prefill": (5, 1, 40),
    "empty_requests": (0, 5, 0, 0, 2, 0),
    "seven": (1,) * 7,
    "one_empty_request": (0,),
    "nothing": (),
    "many": (1, 0, 3) * 100,
}


def make(lengths, ngram, seed=0, dtype=torch.int64, draw=draw_tokens):
    """Whole histories (up to three tokens before each piece), and the packed batch of what is new."""
    texts = [draw(1, length + request % 4, seed=seed + request)[0] for request, length in enumerate(lengths)]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.cat([torch.empty(0, dtype=torch.int64)] + [t[len(t) - n :] for t, n in zip(texts, lengths)])
    context = torch.full((len(lengths), ngram - 1), EOS)
    for row, text, length in zip(context, texts, lengths):
        before = text[: len(text) - length][-(ngram - 1) :]
        row[len(row) - len(before) :] = before
    return texts, tokens.to(dtype), starts.to(dtype), context.to(dtype)


def expected(texts, lengths, context, hashes, heads, ngram):
    multipliers, sizes, offsets = (t.tolist() for t in hashes)
    rows = []
    for text, length, before in zip(texts, lengths, context.tolist()):
        visible = before + text[len(text) - length :].tolist()
        rows += oracle.ngram_ids(visible, multipliers, sizes, offsets, EOS, heads)[ngram - 1 :]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, len(sizes))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("ngram, heads", [(2, 1), (3, 8), (4, 3)])
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equals_the_integer_oracle(implementation, ngram, heads, name, dtype):
    lengths = LENGTHS[name]
    texts, tokens, starts, context = make(lengths, ngram, dtype=dtype)
    hashes = hash_tensors(ngram, heads)
    ids = implementation(tokens, starts, context, *hashes, EOS)
    assert ids.is_contiguous() and ids.shape == (sum(lengths), heads * (ngram - 1))
    assert torch.equal(ids, expected(texts, lengths, context, hashes, heads, ngram))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strided_tensors_and_ids_outside_the_vocabulary(implementation):
    extremes = [-1, 10**15, -(10**15), 2**63 - 1, -(2**63), EOS, 0, -EOS, 496640, 7, EOS, EOS, -1]

    def draw(batch, seq, seed):
        return torch.tensor([(extremes * 9)[seed : seed + seq]])

    lengths = (4, 0, 11, 1)
    texts, tokens, starts, context = make(lengths, 3, draw=draw)
    hashes = hash_tensors(3, 8, strided=True)
    wide = torch.stack([tokens, tokens + 1], dim=1)[:, 0]
    bounds = torch.stack([starts, starts + 5], dim=1)[:, 0]
    longer = torch.cat([context, context])  # rows of nobody behind those of the requests
    ids = implementation(wide, bounds, longer.T.contiguous().T, *hashes, EOS)
    assert torch.equal(ids, expected(texts, lengths, context, hashes, 8, 3))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_chunking_gives_the_ids_of_the_whole(implementation):
    text, hashes = draw_tokens(1, 24)[0], hash_tensors(3, 2)
    whole = expected([text], (24,), torch.full((1, 2), EOS), hashes, 2, 3)
    cuts = [0, 1, 2, 9, 10, 24]
    history = torch.cat([torch.full((2,), EOS), text])
    context = torch.stack([history[start : start + 2] for start in cuts[:-1]])
    assert torch.equal(implementation(text, torch.tensor(cuts), context, *hashes, EOS), whole)


def test_operator_contract():
    _, tokens, starts, context = make((3, 0, 2), 3)
    torch.library.opcheck(op.packed_ngram_ids, (tokens, starts, context, *hash_tensors(3, 2), EOS))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bad_inputs_name_the_argument(implementation):
    _, tokens, starts, context = make((3, 0, 2), 3)
    hashes = hash_tensors(3, 2)
    with pytest.raises(ValueError, match=r"tokens has shape \(1, 5\)"):
        implementation(tokens[None], starts, context, *hashes, EOS)
    with pytest.raises(ValueError, match=r"context is torch.int64 \(2, 2\); pass int32 or int64 \[3, 2\]"):
        implementation(tokens, starts, context[:2], *hashes, EOS)
    with pytest.raises(ValueError, match=r"pass int32 or int64 \[3, 2\]"):
        implementation(tokens, starts, context[:, :1], *hashes, EOS)
    with pytest.raises(ValueError, match="5 tokens and no request"):
        implementation(tokens, starts[:1], context[:0], *hashes, EOS)
