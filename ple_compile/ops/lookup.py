"""Rows of a table by id, as bytes, from device memory or straight from page-locked host memory.

    rows[..., :] = table[ids[...], :]

table [R, D] of any dtype, rows contiguous (a row stride larger than D is fine); ids int32 or int64 of any shape; rows
[*ids.shape, D] contiguous in the table's dtype on the ids' device. With CUDA ids the table lies on the same device or
page-locked on the host; the kernel then reads it over the bus (UVA), with a bounded grid of persistent programs that
leaves the other SMs to whoever runs beside (`_host_reads`), and many ids in the order of their rows' addresses
(`_address_order`).

An id outside the table gives a row of zeros on the device and is an error on the CPU; memory outside the table is
never read. `check_ids` finds such ids at the price of a host synchronisation.
Bytes moved: each row once in, once out; ids once. Offsets are int64 throughout.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ple_compile.ops import _address_order, _host_reads
from ple_compile.ops._launches import Launch, Plans, layout
from ple_compile.ops._library import define
from ple_compile.ops._sizes import cdiv, next_power_of_2
from ple_compile.ops._words import in_words, word_type
from ple_compile.tables import hot_rows, pinning
from ple_compile.tuning.table import chosen


class Choices(NamedTuple):
    """Launch choices."""

    tile_words: int = 1024
    most_rows: int = 16  # of a tile
    programs: int = 2048  # at most; they walk through the ids
    num_warps: int = 8


HOST_CHOICES = Choices(_host_reads.TILE_WORDS, _host_reads.MOST_ROWS, _host_reads.PROGRAMS, _host_reads.NUM_WARPS)


def reference(table: Tensor, ids: Tensor) -> Tensor:
    check_arguments(table, ids)
    check_ids(table, ids)
    return table.detach().index_select(0, ids.reshape(-1)).reshape(*ids.shape, table.shape[1])


@triton.jit(do_not_specialize=["num_ids", "num_rows", "step"])
def lookup_kernel(
    rows_ptr,
    table_ptr,
    ids_ptr,
    positions_ptr,  # where the rows go, or None for the order of the ids
    num_ids,
    num_rows,
    step,
    WORD: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    table_words = table_ptr.to(tl.pointer_type(WORD))
    row_words = rows_ptr.to(tl.pointer_type(WORD))
    word = tl.arange(0, BLOCK_WORDS)
    real_word = word < ROW_WORDS
    # A `range` would do, were it not for Triton 3.6's interpreter, which cannot take its bounds from arguments.
    start = tl.program_id(0) * BLOCK_ROWS
    index = start + tl.arange(0, BLOCK_ROWS)
    row = tl.load(ids_ptr + index, mask=index < num_ids, other=-1).to(tl.int64)
    while start < num_ids:
        wanted = index < num_ids
        inside = (row >= 0) & (row < num_rows)
        words = tl.load(
            table_words + row[:, None] * ROW_STRIDE + word[None, :], mask=inside[:, None] & real_word[None, :], other=0
        )
        position = index.to(tl.int64)
        if positions_ptr is not None:
            position = tl.load(positions_ptr + index, mask=wanted, other=0).to(tl.int64)
        # The next ids arrive while these rows are on their way.
        start += step
        index += step
        row = tl.load(ids_ptr + index, mask=index < num_ids, other=-1).to(tl.int64)
        destination = position[:, None] * ROW_WORDS + word[None, :]
        tl.store(row_words + destination, words, mask=wanted[:, None] & real_word[None, :])


def launch(table: Tensor, ids: Tensor) -> Tensor:
    check_arguments(table, ids)
    rows = empty_rows(table, ids)
    gather = prepared(rows, table, ids.contiguous())
    gather.fetch()
    gather.finish()
    return rows


def empty_rows(table: Tensor, ids: Tensor) -> Tensor:
    return torch.empty((*ids.shape, table.shape[1]), dtype=table.dtype, device=ids.device)


def prepared(rows: Tensor, table: Tensor, ids: Tensor) -> _host_reads.Gather:
    """The gather of contiguous `ids` into `rows`; it holds what it reads."""
    if not rows.numel():
        return _host_reads.Gather(lambda: None)
    if not pinning.is_host_memory(table):
        row_bytes = table.shape[1] * table.element_size()
        choices = chosen("lookup", Choices(), table.device, row_bytes=row_bytes)
        return _host_reads.Gather(lambda: run(rows, table, ids, choices))
    cache = hot_rows.cache_of(table, ids.device) if ids.numel() >= hot_rows.MIN_IDS else None
    if cache is not None and cache.is_current():
        return cache.prepared(rows, table, ids)
    if ids.numel() < _host_reads.ORDERED_FROM:
        return _host_reads.Gather(lambda: run(rows, table, ids, HOST_CHOICES))
    ordered, positions = _address_order.address_order(ids, table.shape[0])
    return _host_reads.Gather(lambda: run(rows, table, ordered, HOST_CHOICES, positions))


def run(rows: Tensor, table: Tensor, ids: Tensor, choices: Choices, positions: Tensor | None = None) -> None:
    key = (layout(ids, rows, table, positions), choices)
    _LAUNCHES.find(key, planned, table, ids, choices)(rows, table, ids, positions)


_LAUNCHES: Plans[Launch] = Plans()


def planned(table: Tensor, ids: Tensor, choices: Choices) -> Launch:
    word = word_type(table)
    row_words = in_words(table.shape[1], table, word)
    block_words = next_power_of_2(row_words)
    block_rows = max(1, min(choices.most_rows, choices.tile_words // block_words))
    programs = min(choices.programs, cdiv(ids.numel(), block_rows))
    return Launch(
        lookup_kernel,
        programs,
        ids.numel(),
        table.shape[0],
        programs * block_rows,
        WORD=word,
        ROW_WORDS=row_words,
        ROW_STRIDE=in_words(table.stride(0), table, word),
        BLOCK_ROWS=block_rows,
        BLOCK_WORDS=block_words,
        num_warps=choices.num_warps,
    )


def check_ids(table: Tensor, ids: Tensor) -> None:
    """Raise when an id lies outside the table. Synchronises with the host: for debugging, and for CPU tensors."""
    outside = (ids < 0) | (ids >= table.shape[0])
    if outside.any():
        example = ids[outside][0].item()
        raise ValueError(
            f"lookup: {int(outside.sum())} of {ids.numel()} ids lie outside the table of {table.shape[0]} rows, "
            f"{example} for one; check the n-gram sizes and offsets against the table"
        )


def fake(table: Tensor, ids: Tensor) -> Tensor:
    return ids.new_empty((*ids.shape, table.shape[1]), dtype=table.dtype)


def check_table(table: Tensor) -> None:
    if table.dim() != 2 or (table.stride(1) != 1 and table.shape[1] > 1):
        raise ValueError(
            f"lookup: the table has shape {tuple(table.shape)} and strides {table.stride()}; pass [rows, width] with "
            "contiguous rows"
        )


def check_arguments(table: Tensor, ids: Tensor) -> None:
    check_table(table)
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"lookup: ids are {ids.dtype}; pass int32 or int64")
    if table.device == ids.device:
        return
    if table.device.type != "cpu":
        raise ValueError(f"lookup: the table is on {table.device} and the ids on {ids.device}; move the ids")
    if not pinning.is_page_locked(table):
        raise ValueError(
            "lookup: the table lies in pageable host memory, which a kernel must not read (was it replaced since it "
            "was page-locked?); call ple_compile.offload_tables(model)"
        )


lookup = define("lookup(Tensor table, Tensor ids) -> Tensor", cpu=reference, cuda=launch, fake=fake)
