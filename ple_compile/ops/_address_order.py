"""A counting sort of ids by the address of their rows, into buckets of rows that lie side by side.

Every id takes a rank in its bucket, a scan tells where each bucket begins, and the two give its place. Within a bucket
the order is any order. Three short kernels, where a radix sort by the library is a dozen: 131,072 ids take 88 us there
in a CUDA graph on an H200.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ple_compile.ops._launches import Launch, Plans, layout
from ple_compile.ops._sizes import cdiv

# Finer than 6 MiB of the largest table.
BUCKET_BITS = 14
NUM_BUCKETS = 2**BUCKET_BITS
# Numbers that a count of ids takes: one for each bucket, and how many there are in all.
NUM_COUNTS = NUM_BUCKETS + 1
# The rank of an id that is not listed.
UNLISTED = tl.constexpr(-1)

_BLOCK = 1024
_LAST_BUCKET = tl.constexpr(NUM_BUCKETS - 1)


def bucket_shift(num_rows: int) -> int:
    """Row ids shifted right by this are below NUM_BUCKETS."""
    return max(0, (num_rows - 1).bit_length() - BUCKET_BITS)


def address_order(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Contiguous `ids`, flat and in the order of their rows, and where each of them was, int32."""
    counts = ids.new_zeros(NUM_COUNTS, dtype=torch.int32)
    ranks = ids.new_empty(ids.numel(), dtype=torch.int32)
    _launches(ids, num_rows).rank(ranks, counts, ids)
    return listed(ids, ranks, counts, num_rows)


def listed(ids: Tensor, ranks: Tensor, counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The ids that have a rank, in order, and where each was; `counts[-1]` becomes how many they are."""
    positions, ordered = torch.empty_like(ranks), ids.new_empty(ids.numel())
    launches = _launches(ids, num_rows)
    launches.scan(counts)
    launches.place(ordered, positions, counts, ranks, ids)
    return ordered, positions


class _Launches(NamedTuple):
    rank: Launch
    scan: Launch
    place: Launch


_PLANS: Plans[_Launches] = Plans()


def _launches(ids: Tensor, num_rows: int) -> _Launches:
    """Those for ids of this layout; the other tensors are made here, or as `address_order` makes them."""
    return _PLANS.find((layout(ids), num_rows), _planned, ids.numel(), bucket_shift(num_rows))


def _planned(num_ids: int, shift: int) -> _Launches:
    programs = cdiv(num_ids, _BLOCK)
    return _Launches(
        Launch(rank_kernel, programs, num_ids, shift, BLOCK=_BLOCK),
        Launch(scan_kernel, 1, NUM_BUCKETS=NUM_BUCKETS, num_warps=16),
        Launch(place_kernel, programs, num_ids, shift, BLOCK=_BLOCK),
    )


@triton.jit
def bucket_of(row, shift):
    """Of ids outside the table any."""
    return tl.minimum(tl.maximum(row, 0) >> shift, _LAST_BUCKET).to(tl.int32)


@triton.jit(do_not_specialize=["num_ids", "shift"])
def rank_kernel(ranks_ptr, counts_ptr, ids_ptr, num_ids, shift, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = index < num_ids
    row = tl.load(ids_ptr + index, mask=wanted, other=0).to(tl.int64)
    rank = tl.atomic_add(counts_ptr + bucket_of(row, shift), 1, mask=wanted)
    tl.store(ranks_ptr + index, rank, mask=wanted)


@triton.jit
def scan_kernel(counts_ptr, NUM_BUCKETS: tl.constexpr):
    """Counts become what comes before them."""
    bucket = tl.arange(0, NUM_BUCKETS)
    counts = tl.load(counts_ptr + bucket)
    tl.store(counts_ptr + NUM_BUCKETS, tl.sum(counts, axis=0))
    tl.store(counts_ptr + bucket, tl.cumsum(counts, axis=0) - counts)


@triton.jit(do_not_specialize=["num_ids", "shift"])
def place_kernel(ordered_ptr, positions_ptr, starts_ptr, ranks_ptr, ids_ptr, num_ids, shift, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.load(ranks_ptr + index, mask=index < num_ids, other=UNLISTED)
    is_listed = rank != UNLISTED
    id = tl.load(ids_ptr + index, mask=is_listed, other=0)
    place = tl.load(starts_ptr + bucket_of(id.to(tl.int64), shift), mask=is_listed, other=0) + rank
    tl.store(ordered_ptr + place, id, mask=is_listed)
    tl.store(positions_ptr + place, index, mask=is_listed)
