"""Rows of a sharded table, each read from its owner's memory: symmetric memory inside one node.

    rows[i] = shard of rank ids[i] // rows_per_rank, row ids[i] % rows_per_rank;  zeros for an id outside the table

shard [rows_per_rank, D] is this rank's, allocated as symmetric memory; peers int64 [num_ranks] holds the addresses of
all ranks' shards; ids int32 or int64 of any shape; rows [*ids.shape, D] in the shard's dtype. Plain loads over NVLink:
no collective, no multicast, nothing read on the host, and no rank waits for another. So nobody may write a table while
others look it up, and a rank that has ended goes unnoticed: its shard stays mapped, and its rows stay right.

Bytes moved: each row in once (from the owner) and out once. Offsets are int64; a division by `rows_per_rank` is by a
constant, which the compiler turns into a multiplication.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ple_compile.ops._library import define
from ple_compile.ops._sizes import cdiv, next_power_of_2
from ple_compile.sharding.agreement import agree

_TILE_WORDS = 1024


@triton.jit(do_not_specialize=["num_ids"])
def peer_lookup_kernel(
    rows_ptr,
    peers_ptr,
    ids_ptr,
    num_ids,
    NUM_ROWS: tl.constexpr,
    ROWS_PER_RANK: tl.constexpr,
    WORD: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    wanted = index < num_ids
    word = tl.arange(0, BLOCK_WORDS)
    real_word = word < ROW_WORDS

    row = tl.load(ids_ptr + index, mask=wanted, other=-1).to(tl.int64)
    inside = (row >= 0) & (row < NUM_ROWS)
    row = tl.where(inside, row, 0)
    owner = row // ROWS_PER_RANK
    # The owner's address is data, so the compiler cannot see that every row behind it is aligned.
    address = tl.load(peers_ptr + owner) + (row - owner * ROWS_PER_RANK) * (ROW_WORDS * (WORD.primitive_bitwidth // 8))
    source = tl.multiple_of(address.to(tl.pointer_type(WORD)), ROW_ALIGN)
    words = tl.load(source[:, None] + word[None, :], mask=inside[:, None] & real_word[None, :], other=0)

    destination = rows_ptr.to(tl.pointer_type(WORD)) + index[:, None] * ROW_WORDS + word[None, :]
    tl.store(destination, words, mask=wanted[:, None] & real_word[None, :])


def launch(shard: Tensor, ids: Tensor, peers: Tensor, num_rows: int, group: str, what: str) -> Tensor:
    check_arguments(shard, ids, peers)
    agree(group, what)
    return gather(shard, ids.contiguous(), peers, num_rows)


def gather(shard: Tensor, ids: Tensor, peers: Tensor, num_rows: int) -> Tensor:
    rows = torch.empty((*ids.shape, shard.shape[1]), dtype=shard.dtype, device=ids.device)
    if rows.numel() == 0:
        return rows
    row_bytes = shard.shape[1] * shard.element_size()
    word = next(w for w in (tl.int64, tl.int32, tl.int16, tl.int8) if row_bytes % (w.primitive_bitwidth // 8) == 0)
    row_words = row_bytes // (word.primitive_bitwidth // 8)
    block_words = next_power_of_2(row_words)
    block_rows = max(1, min(16, _TILE_WORDS // block_words))
    peer_lookup_kernel[(cdiv(ids.numel(), block_rows),)](
        rows,
        peers,
        ids,
        ids.numel(),
        NUM_ROWS=num_rows,
        ROWS_PER_RANK=shard.shape[0],
        WORD=word,
        ROW_WORDS=row_words,
        ROW_ALIGN=row_bytes & -row_bytes if row_bytes % 16 else 16,
        BLOCK_ROWS=block_rows,
        BLOCK_WORDS=block_words,
        num_warps=8,
    )
    return rows


def check_arguments(shard: Tensor, ids: Tensor, peers: Tensor) -> None:
    if ids.device != shard.device or peers.device != shard.device:
        raise ValueError(f"peer_lookup: shard, ids and peers lie on {shard.device}, {ids.device} and {peers.device}")
    if ids.dtype not in (torch.int32, torch.int64) or peers.dtype != torch.int64:
        raise ValueError(f"peer_lookup: ids are {ids.dtype} and peers {peers.dtype}; pass integers, peers as int64")


def refuse(shard: Tensor, ids: Tensor, peers: Tensor, num_rows: int, group: str, what: str) -> Tensor:
    raise ValueError(f"{what}: processes cannot read each other's CPU memory; choose another Config.etp_lowering")


def fake(shard: Tensor, ids: Tensor, peers: Tensor, num_rows: int, group: str, what: str) -> Tensor:
    return ids.new_empty((*ids.shape, shard.shape[1]), dtype=shard.dtype)


peer_lookup = define(
    "peer_lookup(Tensor shard, Tensor ids, Tensor peers, int num_rows, str group, str what) -> Tensor",
    cpu=refuse,
    cuda=launch,
    fake=fake,
)
