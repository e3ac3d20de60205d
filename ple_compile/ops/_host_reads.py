"""How kernels read rows from page-locked host memory.

What bounds random rows over the bus is neither their bytes nor the number of programs but the translation of their
addresses. One H200 on PCIe 5 x16, 131,072 rows of 320 bytes from 22 GiB, million rows per second:

    programs, rows of a tile, warps    as they come    by address
    2, 16, 8                           12.5            13.0
    4, 16, 8                           24.8            25.8
    8, 16, 8                           27.8            46.4
    8, 64, 16                          29.3            49.3
    132, 16, 8                         29.3            36.9

So few programs keep many rows in flight, and many rows are read in the order of their addresses. Those programs take
as long as the bus does, so they run beside other work; all other kernels of a lookup are short, and would wait for a
place among programs that fill the device.
"""

from collections.abc import Callable
from typing import NamedTuple

PROGRAMS = 8
TILE_WORDS, MOST_ROWS, NUM_WARPS = 4096, 64, 16

# From this many ids on they are put in order.
ORDERED_FROM = 8192


class Gather(NamedTuple):
    """A lookup of which everything that comes before its long kernel has been launched."""

    fetch: Callable[[], object]  # launches that kernel, on whatever stream is current
    finish: Callable[[], object] = lambda: None  # launches what comes after it
