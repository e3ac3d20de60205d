"""Table rows of the hashed n-grams that end at each token.

    window_j(t) = token[t - j], or EOS once any of token[t - j .. t - 1] is EOS or lies before the start
    mixed_g(t)  = xor over j < g of window_j(t) * multipliers[j]          wrapping int64, g = 2 .. N
    ids[t, h]   = floor_mod(mixed_g(t), sizes[h]) + offsets[h]            heads order-major, the same number per order

tokens [B, S] and context [B, L] (the tokens just before, oldest first, any L >= 0; what is missing reads as EOS) are
int32 or int64 with any strides; multipliers [N], sizes and offsets [heads] are int64; ids are int64 [B, S, heads].
The current token may itself be EOS and still sees its history. Sizes must be positive.

Bytes moved per token: N * 8 read (mostly from cache), heads * 8 written. One launch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ple_compile.ops._launches import Launch, Plans, layout
from ple_compile.ops._library import define
from ple_compile.ops._sizes import cdiv, next_power_of_2
from ple_compile.tuning.table import chosen


def stages(
    tokens: Tensor, context: Tensor | None, multipliers: Tensor, sizes: Tensor, offsets: Tensor, eos: int
) -> dict[str, Tensor]:
    """Every intermediate result by name, in the order in which they are computed."""
    _check(tokens, context, multipliers, sizes, offsets)
    batch, seq = tokens.shape
    ngram, heads = multipliers.numel(), sizes.numel() // (multipliers.numel() - 1)
    history = tokens.long() if context is None else torch.cat([context.long(), tokens.long()], dim=1)
    history = torch.cat([history.new_full((batch, ngram - 1), eos), history], dim=1)
    end = history.shape[1]

    found: dict[str, Tensor] = {}
    mixed = history[:, end - seq :] * multipliers[0]
    hidden = torch.zeros_like(mixed, dtype=torch.bool)
    orders = []
    for shift in range(1, ngram):
        shifted = history[:, end - seq - shift : end - shift]
        hidden = hidden | (shifted == eos)
        window = shifted.masked_fill(hidden, eos)
        mixed = mixed ^ (window * multipliers[shift])
        order = slice((shift - 1) * heads, shift * heads)
        orders.append(torch.remainder(mixed[..., None], sizes[order]) + offsets[order])
        found |= {f"token {shift} back": shifted, f"token {shift} back, EOS hiding what is older": window}
        found |= {f"hash of {shift + 1} tokens": mixed, f"rows of {shift + 1} tokens": orders[-1]}
    return {**found, "ids": torch.cat(orders, dim=-1)}


def reference(
    tokens: Tensor, context: Tensor | None, multipliers: Tensor, sizes: Tensor, offsets: Tensor, eos: int
) -> Tensor:
    return stages(tokens, context, multipliers, sizes, offsets, eos)["ids"]


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "seq",
        "context_len",
        "eos",
        "tokens_stride_b",
        "tokens_stride_s",
        "context_stride_b",
        "context_stride_l",
    ]
)
def ngram_ids_kernel(
    ids_ptr,
    tokens_ptr,
    context_ptr,
    multipliers_ptr,
    sizes_ptr,
    offsets_ptr,
    num_tokens,
    seq,
    context_len,
    eos,
    tokens_stride_b,
    tokens_stride_s,
    context_stride_b,
    context_stride_l,
    NGRAM: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token_index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token_index < num_tokens
    # Divide in int32 (cheap), address in int64.
    batch, position = (token_index // seq).to(tl.int64), (token_index % seq).to(tl.int64)
    index = token_index.to(tl.int64)
    eos_id = tl.zeros([BLOCK], tl.int64) + eos

    head = tl.arange(0, HEADS_PADDED)
    real_head = head < HEADS
    store_mask = inside[:, None] & real_head[None, :]

    token = tl.load(tokens_ptr + batch * tokens_stride_b + position * tokens_stride_s, mask=inside, other=0)
    mixed = token.to(tl.int64) * tl.load(multipliers_ptr)
    hidden = token_index < 0
    for shift in tl.static_range(1, NGRAM):
        # A shifted position is negative inside the context, and below -context_len before the start.
        source = position - shift
        from_tokens = inside & (source >= 0)
        from_context = inside & (source < 0) & (source + context_len >= 0)
        recent = tl.load(tokens_ptr + batch * tokens_stride_b + source * tokens_stride_s, mask=from_tokens, other=0)
        older = tl.load(
            context_ptr + batch * context_stride_b + (source + context_len) * context_stride_l,
            mask=from_context,
            other=0,
        )
        shifted = tl.where(from_tokens, recent.to(tl.int64), tl.where(from_context, older.to(tl.int64), eos_id))
        hidden = hidden | (shifted == eos_id)
        mixed = mixed ^ (tl.where(hidden, eos_id, shifted) * tl.load(multipliers_ptr + shift))

        # `%` truncates toward zero: bring a negative remainder up by one size. Padded heads divide by 1.
        first = (shift - 1) * HEADS
        size = tl.load(sizes_ptr + first + head, mask=real_head, other=1)
        offset = tl.load(offsets_ptr + first + head, mask=real_head, other=0)
        row = mixed[:, None] % size[None, :]
        row = tl.where(row < 0, row + size[None, :], row) + offset[None, :]
        tl.store(ids_ptr + index[:, None] * ((NGRAM - 1) * HEADS) + first + head[None, :], row, mask=store_mask)


class Choices(NamedTuple):
    """Launch choices."""

    block: int = 32  # tokens of a program
    num_warps: int = 4


def launch(
    tokens: Tensor, context: Tensor | None, multipliers: Tensor, sizes: Tensor, offsets: Tensor, eos: int
) -> Tensor:
    choices = chosen("ngram_ids", Choices(), tokens.device, heads=sizes.numel())
    return run(tokens, context, multipliers, sizes, offsets, eos, choices)


def run(
    tokens: Tensor,
    context: Tensor | None,
    multipliers: Tensor,
    sizes: Tensor,
    offsets: Tensor,
    eos: int,
    choices: Choices,
) -> Tensor:
    key = (layout(tokens, context, multipliers, sizes, offsets), eos, choices)
    launch = _LAUNCHES.find(key, planned, tokens, context, multipliers, sizes, offsets, eos, choices)
    ids = torch.empty((*tokens.shape, sizes.shape[0]), dtype=torch.int64, device=tokens.device)
    if ids.numel():
        hashes = (multipliers.contiguous(), sizes.contiguous(), offsets.contiguous())
        launch(ids, tokens, tokens if context is None else context, *hashes)
    return ids


_LAUNCHES: Plans[Launch] = Plans()


def planned(
    tokens: Tensor,
    context: Tensor | None,
    multipliers: Tensor,
    sizes: Tensor,
    offsets: Tensor,
    eos: int,
    choices: Choices,
) -> Launch:
    _check(tokens, context, multipliers, sizes, offsets)
    batch, seq = tokens.shape
    ngram, heads = multipliers.numel(), sizes.numel() // (multipliers.numel() - 1)
    return Launch(
        ngram_ids_kernel,
        cdiv(batch * seq, choices.block),
        batch * seq,
        seq,
        0 if context is None else context.shape[1],
        eos,
        tokens.stride(0),
        tokens.stride(1),
        0 if context is None else context.stride(0),
        0 if context is None else context.stride(1),
        NGRAM=ngram,
        HEADS=heads,
        HEADS_PADDED=next_power_of_2(heads),
        BLOCK=choices.block,
        num_warps=choices.num_warps,
    )


def fake(
    tokens: Tensor, context: Tensor | None, multipliers: Tensor, sizes: Tensor, offsets: Tensor, eos: int
) -> Tensor:
    _check(tokens, context, multipliers, sizes, offsets)
    return tokens.new_empty((*tokens.shape, sizes.shape[0]), dtype=torch.int64)


def _check(tokens: Tensor, context: Tensor | None, multipliers: Tensor, sizes: Tensor, offsets: Tensor) -> None:
    for name, tensor in (("tokens", tokens), ("context", context)):
        if tensor is not None and tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ngram_ids: {name} is {tensor.dtype}; pass int32 or int64 token ids")
        if tensor is not None and tensor.dim() != 2:
            raise ValueError(f"ngram_ids: {name} has shape {tuple(tensor.shape)}; pass [batch, tokens]")
    if context is not None and context.shape[0] != tokens.shape[0]:
        raise ValueError(f"ngram_ids: context has {context.shape[0]} rows and tokens {tokens.shape[0]}; pass as many")
    for name, tensor in (("multipliers", multipliers), ("sizes", sizes), ("offsets", offsets)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1:
            raise ValueError(f"ngram_ids: {name} is {tensor.dtype} {tuple(tensor.shape)}; pass a 1-D int64 tensor")
    orders = multipliers.shape[0] - 1
    if orders < 1 or sizes.shape[0] == 0 or sizes.shape[0] % orders or offsets.shape[0] != sizes.shape[0]:
        raise ValueError(
            f"ngram_ids: {multipliers.shape[0]} multipliers, {sizes.shape[0]} sizes and {offsets.shape[0]} offsets do "
            "not fit; for n-grams up to N pass N >= 2 multipliers and (N - 1) * heads sizes and offsets"
        )


ngram_ids = define(
    "ngram_ids(Tensor tokens, Tensor? context, Tensor multipliers, Tensor sizes, Tensor offsets, int eos) -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=fake,
)
