"""How kernels read rows from page-locked host memory.

What bounds random rows over the bus is neither their bytes nor the number of programs but the translation of their
addresses. One H200 on PCIe 5 x16, 131,072 rows of 320 bytes from 22 GiB, million rows per second:

    programs, rows of a tile, warps    as they come    by address
    2, 16, 8                           12.5            13.0
    4, 16, 8                           24.8            25.8
    8, 16, 8                           27.8            46.4
    8, 64, 16                          29.3            49.3
    132, 16, 8                         29.3            36.9

So few programs keep many rows in flight, and many rows are read in the order of their addresses: sorting takes 80 to
150 us, which 16,384 rows earn back and 4,096 do not.
"""

import torch
from torch import Tensor

PROGRAMS = 8
TILE_WORDS, MOST_ROWS, NUM_WARPS = 4096, 64, 16

# From this many ids on.
ORDERED_FROM = 8192
# Addresses are told apart by as many bits: finer than 6 MiB of the largest table, and two passes of a radix sort.
BUCKET_BITS = 14


def bucket_shift(num_rows: int) -> int:
    """Row ids shifted right by this are below 2**BUCKET_BITS."""
    return max(0, (num_rows - 1).bit_length() - BUCKET_BITS)


def address_order(ids: Tensor, num_rows: int) -> Tensor:
    """The positions of contiguous `ids`, flat, so that their rows lie one behind the other; int64."""
    return (ids.view(-1) >> bucket_shift(num_rows)).to(torch.int16).argsort()
