# mypy: disable-error-code="assignment"
"""A row of any width as a tuple of power-of-two Triton tiles.

Triton tiles have power-of-two sides; the released width is 5 x 512, and one padded tile would waste 37 % of every
instruction. A row is therefore cut into parts of LANES * PARTS[i] channels, LANES = threads of the program. Within a
part each thread holds PARTS[i] neighbouring channels (at most one 16-byte load), so the parts of a thread add up
without any exchange and a row costs one reduction across lanes, however many parts it has.

Tiles are [LANES, rows, PARTS[i]]; with the rows in the middle, Triton lays its threads along the lanes.
"""

import triton
import triton.language as tl
from torch import Tensor


def row_parts(width: int, lanes: int, vector: int) -> tuple[int, ...]:
    """Channels per thread of each part: powers of two up to `vector` that cover `width`; only the last may overhang."""
    parts = []
    left = -(-width // lanes)
    while left > 0:
        parts.append(min(vector, 1 << (left.bit_length() - 1)))
        left -= parts[-1]
    return tuple(parts)


def vector_size(*tensors: Tensor) -> int:
    """Elements in a 16-byte load of the widest of these dtypes."""
    return 16 // max(t.element_size() for t in tensors)


@triton.jit
def row_offsets(first, LANES: tl.constexpr, PARTS: tl.constexpr):
    """Channel numbers of each part, [LANES, 1, PARTS[i]], from `first` on."""
    offsets = ()
    start = tl.constexpr(0)
    for p in tl.static_range(len(PARTS)):
        lane = tl.arange(0, LANES)[:, None, None] * PARTS[p]
        offsets += (first + start + lane + tl.arange(0, PARTS[p])[None, None, :],)
        start = start + LANES * PARTS[p]
    return offsets


@triton.constexpr_function
def within_row(offsets, p, width):
    """Whether part `p` (and with it every part before) ends within a row of `width`."""
    return sum(part.shape[0] * part.shape[2] for part in offsets[: p + 1]) <= width


@triton.jit
def load_rows(row_ptr, offsets, row_mask, WIDTH: tl.constexpr, ONCE: tl.constexpr = False):
    """The parts of the rows at `row_ptr` [1, rows, 1]; zeros under the mask (None: no mask) and past WIDTH.

    ONCE: nobody reads them again, so they need not stay in L2.
    """
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    parts = ()
    for p in tl.static_range(len(offsets)):
        # A part within the row needs no mask, nor the instructions that clear registers for it.
        if row_mask is None:
            if within_row(offsets, p, WIDTH):
                parts += (tl.load(row_ptr + offsets[p], eviction_policy=POLICY),)
            else:
                parts += (tl.load(row_ptr + offsets[p], mask=offsets[p] < WIDTH, other=0.0, eviction_policy=POLICY),)
        else:
            if within_row(offsets, p, WIDTH):
                mask = row_mask
            else:
                mask = row_mask & (offsets[p] < WIDTH)
            parts += (tl.load(row_ptr + offsets[p], mask=mask, other=0.0, eviction_policy=POLICY),)
    return parts


@triton.jit
def load_vector(ptr, offsets, WIDTH: tl.constexpr):
    """The parts of one vector (a weight), [LANES, 1, PARTS[i]] each."""
    return load_rows(ptr, offsets, None, WIDTH)


@triton.jit
def when(condition, mask):
    """The tile `mask` where the scalar `condition` holds. Not `&`: the interpreter widens a scalar's bool."""
    return tl.where(condition, mask, False)
