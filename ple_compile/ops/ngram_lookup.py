"""Rows of a device table for the hashed n-grams that end at each token: ids and gather in one launch.

    rows[b, s, h, :] = table[ngram_ids(tokens, context, multipliers, sizes, offsets, eos)[b, s, h], :]

Arguments as of ple_compile/ops/ngram_ids.py and ple_compile/ops/lookup.py; the table [R, D] lies on the tokens' device,
rows are [B, S, heads, D] contiguous in its dtype. The ids are never written. An id outside the table gives a row of
zeros on the device and is an error on the CPU; memory outside the table is never read.

Bytes moved per token: heads * D elements in, as many out; offsets into the table are int64.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ple_compile.ops import lookup as lookup_op
from ple_compile.ops import ngram_ids as ids_op
from ple_compile.ops._launches import Launch, Plans, layout
from ple_compile.ops._library import define
from ple_compile.ops._sizes import cdiv, next_power_of_2
from ple_compile.ops._words import in_words, word_type
from ple_compile.tables import pinning
from ple_compile.tuning.table import chosen


class Choices(NamedTuple):
    """Launch choices. Rows of a program: enough reads in flight where there are many, enough programs where few."""

    many_rows: int = 64
    few_rows: int = 16
    num_warps: int = 4


def reference(
    table: Tensor,
    tokens: Tensor,
    context: Tensor | None,
    multipliers: Tensor,
    sizes: Tensor,
    offsets: Tensor,
    eos: int,
) -> Tensor:
    return lookup_op.reference(table, ids_op.reference(tokens, context, multipliers, sizes, offsets, eos))


@triton.jit
def once(x):
    """`x`, computed by one thread per element.

    Without this Triton moves the hash into the layout of the rows, where every thread computes the ids of all the rows
    that it helps to copy: 16 remainders a thread in place of one. It does not move assembly with side effects.
    """
    return tl.gather(x, tl.arange(0, x.shape[0]), 0)


@triton.jit(
    do_not_specialize=[
        "num_ids",
        "num_rows",
        "seq",
        "context_len",
        "eos",
        "tokens_stride_b",
        "tokens_stride_s",
        "context_stride_b",
        "context_stride_l",
    ]
)
def ngram_lookup_kernel(
    rows_ptr,
    table_ptr,
    tokens_ptr,
    context_ptr,
    multipliers_ptr,
    sizes_ptr,
    offsets_ptr,
    num_ids,
    num_rows,
    seq,
    context_len,
    eos,
    tokens_stride_b,
    tokens_stride_s,
    context_stride_b,
    context_stride_l,
    NGRAM: tl.constexpr,
    HEADS: tl.constexpr,
    WORD: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    # One id per row of the block; neighbours are the heads of one token.
    index = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    wanted = index < num_ids
    head = index % HEADS
    token_index = index // HEADS
    batch, position = (token_index // seq).to(tl.int64), (token_index % seq).to(tl.int64)
    last_shift = head // (HEADS // (NGRAM - 1)) + 1  # heads are order-major
    size = tl.load(sizes_ptr + head, mask=wanted, other=1)
    offset = tl.load(offsets_ptr + head, mask=wanted, other=0)
    eos_id = tl.zeros([BLOCK_ROWS], tl.int64) + eos

    tokens_ptr += batch * tokens_stride_b
    context_ptr += batch * context_stride_b
    token = tl.load(tokens_ptr + position * tokens_stride_s, mask=wanted, other=0)
    mixed = token.to(tl.int64) * tl.load(multipliers_ptr)
    hidden = index < 0
    for shift in tl.static_range(1, NGRAM):
        # A shifted position is negative inside the context, and below -context_len before the start.
        source = position - shift
        from_tokens = wanted & (source >= 0)
        from_context = wanted & (source < 0) & (source + context_len >= 0)
        recent = tl.load(tokens_ptr + source * tokens_stride_s, mask=from_tokens, other=0)
        older = tl.load(context_ptr + (source + context_len) * context_stride_l, mask=from_context, other=0)
        shifted = tl.where(from_tokens, recent.to(tl.int64), tl.where(from_context, older.to(tl.int64), eos_id))
        hidden = hidden | (shifted == eos_id)
        term = tl.where(hidden, eos_id, shifted) * tl.load(multipliers_ptr + shift)
        mixed = tl.where(shift <= last_shift, mixed ^ term, mixed)
    # `%` truncates toward zero: bring a negative remainder up by one size.
    row = mixed % size
    row = once(tl.where(row < 0, row + size, row) + offset)

    inside = wanted & (row >= 0) & (row < num_rows)
    word = tl.arange(0, BLOCK_WORDS)
    real_word = word < ROW_WORDS
    words = tl.load(
        table_ptr.to(tl.pointer_type(WORD)) + row[:, None] * ROW_STRIDE + word[None, :],
        mask=inside[:, None] & real_word[None, :],
        other=0,
    )
    destination = index.to(tl.int64)[:, None] * ROW_WORDS + word[None, :]
    tl.store(
        rows_ptr.to(tl.pointer_type(WORD)) + destination, words, mask=wanted[:, None] & real_word[None, :]
    )  # fmt: skip


def launch(
    table: Tensor,
    tokens: Tensor,
    context: Tensor | None,
    multipliers: Tensor,
    sizes: Tensor,
    offsets: Tensor,
    eos: int,
) -> Tensor:
    choices = chosen("ngram_lookup", Choices(), tokens.device, row_bytes=table.shape[1] * table.element_size())
    return run(table, tokens, context, multipliers, sizes, offsets, eos, choices)


def run(
    table: Tensor,
    tokens: Tensor,
    context: Tensor | None,
    multipliers: Tensor,
    sizes: Tensor,
    offsets: Tensor,
    eos: int,
    choices: Choices,
) -> Tensor:
    if table.device != tokens.device:
        raise ValueError(
            f"ngram_lookup: the table is on {table.device} and the tokens on {tokens.device}; for a table in host "
            "memory use ple::ngram_ids and ple::lookup"
        )
    if table.is_cuda and pinning.is_host_memory(table):
        # A view of host memory: few programs, and hot rows from their cache.
        return lookup_op.launch(table, ids_op.launch(tokens, context, multipliers, sizes, offsets, eos))
    key = (layout(tokens, context, multipliers, sizes, offsets, table), eos, choices)
    launch = _LAUNCHES.find(key, planned, table, tokens, context, multipliers, sizes, offsets, eos, choices)
    shape = (*tokens.shape, sizes.shape[0], table.shape[1])
    rows = torch.empty(shape, dtype=table.dtype, device=tokens.device)
    if rows.numel():
        hashes = (multipliers.contiguous(), sizes.contiguous(), offsets.contiguous())
        launch(rows, table, tokens, tokens if context is None else context, *hashes)
    return rows


_LAUNCHES: Plans[Launch] = Plans()


def planned(
    table: Tensor,
    tokens: Tensor,
    context: Tensor | None,
    multipliers: Tensor,
    sizes: Tensor,
    offsets: Tensor,
    eos: int,
    choices: Choices,
) -> Launch:
    ids_op._check(tokens, context, multipliers, sizes, offsets)
    lookup_op.check_table(table)
    num_ids = tokens.numel() * sizes.numel()
    word = word_type(table)
    row_words = in_words(table.shape[1], table, word)
    block_rows = choices.many_rows if num_ids >= 512 * choices.many_rows else choices.few_rows
    return Launch(
        ngram_lookup_kernel,
        cdiv(num_ids, block_rows),
        num_ids,
        table.shape[0],
        tokens.shape[1],
        0 if context is None else context.shape[1],
        eos,
        *tokens.stride(),
        *((0, 0) if context is None else context.stride()),
        NGRAM=multipliers.numel(),
        HEADS=sizes.numel(),
        WORD=word,
        ROW_WORDS=row_words,
        ROW_STRIDE=in_words(table.stride(0), table, word),
        BLOCK_ROWS=block_rows,
        BLOCK_WORDS=next_power_of_2(row_words),
        num_warps=choices.num_warps,
    )


def fake(
    table: Tensor,
    tokens: Tensor,
    context: Tensor | None,
    multipliers: Tensor,
    sizes: Tensor,
    offsets: Tensor,
    eos: int,
) -> Tensor:
    ids_op._check(tokens, context, multipliers, sizes, offsets)
    return tokens.new_empty((*tokens.shape, sizes.shape[0], table.shape[1]), dtype=table.dtype)


ngram_lookup = define(
    "ngram_lookup(Tensor table, Tensor tokens, Tensor? context, Tensor multipliers, Tensor sizes, Tensor offsets, "
    "int eos) -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=fake,
)
