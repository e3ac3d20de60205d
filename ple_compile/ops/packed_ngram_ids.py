"""Table rows of the hashed n-grams that end at each token, for requests laid end to end.

    ids = ngram_ids(...) of every request by itself           ple_compile/ops/ngram_ids.py

tokens [T] are the requests' new tokens, request r's from query_start_loc[r] to query_start_loc[r + 1]; context
[R or more, N - 1] holds those just before, oldest first, EOS before the start. All int32 or int64, any strides;
multipliers, sizes and offsets are int64; ids are int64 [T, heads]. Whatever stands in the context is hashed: keeping
placeholders out of it is the caller's duty (`checked_context`).

Bytes moved per token: N * 8 read (mostly from cache), heads * 8 written. One launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ple_compile.ops import _packed
from ple_compile.ops import ngram_ids as padded
from ple_compile.ops._launches import Launch, Plans, layout
from ple_compile.ops._library import define
from ple_compile.ops._sizes import cdiv, next_power_of_2


def reference(
    tokens: Tensor, query_start_loc: Tensor, context: Tensor, multipliers: Tensor, sizes: Tensor, offsets: Tensor,
    eos: int,
) -> Tensor:  # fmt: skip
    check(tokens, query_start_loc, context, multipliers, sizes, offsets)
    if tokens.shape[0] == 0:
        return fake(tokens, query_start_loc, context, multipliers, sizes, offsets, eos)
    token = torch.arange(tokens.shape[0], device=tokens.device)
    request, place = _packed.locate(query_start_loc, token)
    size = context.shape[1]
    # Each token's last N - 1, oldest first: then it is a sequence of one token with that context.
    before = torch.stack(
        [
            torch.where(
                place >= shift,
                tokens[(token - shift).clamp(min=0)].long(),
                context[request, (size + place - shift).clamp(max=size - 1)].long(),
            )
            for shift in range(size, 0, -1)
        ],
        dim=1,
    )
    return padded.reference(tokens[:, None], before, multipliers, sizes, offsets, eos)[:, 0]


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_requests", "eos", "tokens_stride", "starts_stride", "context_stride_r", "context_stride_l",
    ]
)  # fmt: skip
def packed_ngram_ids_kernel(
    ids_ptr,
    tokens_ptr,
    starts_ptr,
    context_ptr,
    multipliers_ptr,
    sizes_ptr,
    offsets_ptr,
    num_tokens,
    num_requests,
    eos,
    tokens_stride,
    starts_stride,
    context_stride_r,
    context_stride_l,
    NGRAM: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    token_index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token_index < num_tokens
    index = token_index.to(tl.int64)
    eos_id = tl.zeros([BLOCK], tl.int64) + eos
    head = tl.arange(0, HEADS_PADDED)
    real_head = head < (NGRAM - 1) * HEADS
    oldest = head // HEADS + 1  # the farthest token that the head's order looks back on
    size = tl.load(sizes_ptr + head, mask=real_head, other=1)  # padded heads divide by 1
    offset = tl.load(offsets_ptr + head, mask=real_head, other=0)
    token = tl.load(tokens_ptr + index * tokens_stride, mask=inside, other=0)

    # The token's request: so many others end at or before it. Wide reads, not a bisection's chain of dependent ones.
    request = tl.zeros([BLOCK], tl.int32)
    for begin in tl.range(0, num_requests - 1, REQUESTS):
        other = begin + tl.arange(0, REQUESTS)
        listed = other < num_requests - 1
        ends = tl.load(starts_ptr + (other + 1) * starts_stride, mask=listed, other=0)
        ended = listed[None, :] & (ends[None, :] <= token_index[:, None])
        request += tl.sum(ended.to(tl.int32), 1)
    place = token_index - tl.load(starts_ptr + request * starts_stride, mask=inside, other=0)

    mixed = (token.to(tl.int64) * tl.load(multipliers_ptr))[:, None] + tl.zeros([1, HEADS_PADDED], tl.int64)
    hidden = token_index < 0
    for shift in tl.static_range(1, NGRAM):
        from_tokens = inside & (place >= shift)
        recent = tl.load(tokens_ptr + (index - shift) * tokens_stride, mask=from_tokens, other=0)
        older = tl.load(
            context_ptr + request.to(tl.int64) * context_stride_r + (NGRAM - 1 + place - shift) * context_stride_l,
            mask=inside & (place < shift),
            other=0,
        )
        shifted = tl.where(from_tokens, recent.to(tl.int64), older.to(tl.int64))
        hidden = hidden | (shifted == eos_id)
        product = tl.where(hidden, eos_id, shifted) * tl.load(multipliers_ptr + shift)
        mixed = mixed ^ tl.where((oldest >= shift)[None, :], product[:, None], 0)

    # `%` truncates toward zero: bring a negative remainder up by one size.
    row = mixed % size[None, :]
    row = tl.where(row < 0, row + size[None, :], row) + offset[None, :]
    stored = inside[:, None] & real_head[None, :]
    tl.store(ids_ptr + index[:, None] * ((NGRAM - 1) * HEADS) + head[None, :], row, mask=stored)


def launch(
    tokens: Tensor, query_start_loc: Tensor, context: Tensor, multipliers: Tensor, sizes: Tensor, offsets: Tensor,
    eos: int,
) -> Tensor:  # fmt: skip
    key = (layout(tokens, query_start_loc, context, multipliers, sizes, offsets), eos)
    launch = _LAUNCHES.find(key, planned, tokens, query_start_loc, context, multipliers, sizes, offsets, eos)
    ids = fake(tokens, query_start_loc, context, multipliers, sizes, offsets, eos)
    if ids.numel():
        hashes = (multipliers.contiguous(), sizes.contiguous(), offsets.contiguous())
        launch(ids, tokens, query_start_loc, context, *hashes)
    return ids


_LAUNCHES: Plans[Launch] = Plans()


def planned(
    tokens: Tensor, query_start_loc: Tensor, context: Tensor, multipliers: Tensor, sizes: Tensor, offsets: Tensor,
    eos: int,
) -> Launch:  # fmt: skip
    check(tokens, query_start_loc, context, multipliers, sizes, offsets)
    ngram, heads = multipliers.numel(), sizes.numel() // (multipliers.numel() - 1)
    requests = query_start_loc.shape[0] - 1
    block = 8
    return Launch(
        packed_ngram_ids_kernel,
        cdiv(tokens.shape[0], block),
        tokens.shape[0],
        requests,
        eos,
        tokens.stride(0),
        query_start_loc.stride(0),
        *context.stride(),
        NGRAM=ngram,
        HEADS=heads,
        HEADS_PADDED=next_power_of_2(sizes.numel()),
        BLOCK=block,
        REQUESTS=_packed.search_block(requests),
        num_warps=4,
    )


def fake(
    tokens: Tensor, query_start_loc: Tensor, context: Tensor, multipliers: Tensor, sizes: Tensor, offsets: Tensor,
    eos: int,
) -> Tensor:  # fmt: skip
    return tokens.new_empty((tokens.shape[0], sizes.shape[0]), dtype=torch.int64)


def check(
    tokens: Tensor, query_start_loc: Tensor, context: Tensor, multipliers: Tensor, sizes: Tensor, offsets: Tensor
) -> None:
    if tokens.dim() != 1:
        raise ValueError(f"packed_ngram_ids: tokens has shape {tuple(tokens.shape)}; pass [tokens], without padding")
    _packed.check("packed_ngram_ids", tokens.shape[0], query_start_loc)
    padded._check(tokens[:, None], None, multipliers, sizes, offsets)
    before, requests = multipliers.shape[0] - 1, query_start_loc.shape[0] - 1
    fits = context.dim() == 2 and context.shape[0] >= requests and context.shape[1] == before
    if not fits or context.dtype not in _packed.INTEGERS:
        raise ValueError(
            f"packed_ngram_ids: context is {context.dtype} {tuple(context.shape)}; pass int32 or int64 "
            f"[{requests}, {before}], the tokens before each request's first"
        )


packed_ngram_ids = define(
    "packed_ngram_ids(Tensor tokens, Tensor query_start_loc, Tensor context, Tensor multipliers, Tensor sizes, "
    "Tensor offsets, int eos) -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=fake,
)
