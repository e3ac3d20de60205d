"""Rows of a quantised table by id, gathered and dequantised in one launch.

    e4m3:   rows[i, :] = table[ids[i], :] * scale                              one scale, or one for each row
    nvfp4:  rows[i, :] = e2m1(table[ids[i], :]) * scale[ids[i], group] * table_scale

e4m3: table [R, D] float8_e4m3fn, or uint8 with the same bytes; scale float32, bfloat16 or float16, of one value or [R]
or [R, 1]. nvfp4: table uint8 [R, D / 2], two e2m1 codes a byte, the first in the low bits; scale float8_e4m3fn
[R, D / 16]; table_scale float32 of one value. Products are taken in float32, in the order written, and rounded to
`product_dtype` (float32 for nvfp4), then to `dtype`: `rows.to(scale.dtype) * scale` has the scale's type for both.
ids are int32 or int64 of any shape; rows [*ids.shape, D] contiguous.

With CUDA ids, table and scales lie on the same device or page-locked on the host, as for `lookup`. An id outside the
table gives zeros on the device and is an error on the CPU; memory outside is never read.
All codes decode by bit arithmetic, so sm80, which has no FP8, gives the same bits; the NaN codes give NaN.
Bytes moved: the stored row in, D values out. Offsets are int64 throughout.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ple_compile.ops import _host_reads, lookup
from ple_compile.ops._launches import Launch, Plans, layout
from ple_compile.ops._library import define
from ple_compile.ops._rounding import TRITON_DTYPE
from ple_compile.ops._sizes import cdiv
from ple_compile.tables import formats, pinning

GROUP = 16  # values that share one scale in nvfp4
PIECE = 16  # values of a row that one thread handles: a group, or as many bytes as one load takes

# Pieces of a program. On the device every program has one block; over the bus few programs walk through them.
_BLOCK, _NUM_WARPS = 128, 4
_HOST_BLOCK = 1024

# table, scale, table_scale, ids, product_dtype, dtype, as the op takes them
Arguments = tuple[Tensor, Tensor, Tensor | None, Tensor, torch.dtype, torch.dtype]


def reference(*arguments: *Arguments) -> Tensor:
    table, _, _, ids, *_ = arguments
    check_arguments(*arguments)
    lookup.check_ids(table, ids)
    return dequantized(*arguments)


def dequantized(*arguments: *Arguments) -> Tensor:
    """The reference without its look at the arguments."""
    table, scale, table_scale, ids, product_dtype, dtype = arguments
    stored = F.embedding(ids, table)
    if table_scale is None:
        factor = scale.reshape(()) if scale.numel() == 1 else F.embedding(ids, scale.reshape(-1, 1))
        values = stored.view(torch.float8_e4m3fn).to(torch.float32)
        return (values * factor.to(torch.float32)).to(product_dtype).to(dtype)
    values = formats.decode_e2m1(torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2))
    groups = F.embedding(ids, scale).to(torch.float32).repeat_interleave(GROUP, dim=-1)
    return (values * groups * table_scale.reshape(())).to(dtype)


@triton.jit
def decode_e4m3(codes):
    """float32 values of e4m3 bytes: sign, exponent and mantissa land in a float16 that is 2**8 too small."""
    codes = codes.to(tl.uint16)
    bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    values = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), values)


@triton.jit
def decode_e2m1(codes):
    """float32 values of 4-bit codes in uint16: the same, 2**14 too small."""
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit(do_not_specialize=["num_ids", "num_rows", "step"])
def e4m3_lookup_kernel(
    rows_ptr,
    table_ptr,
    scale_ptr,
    ids_ptr,
    num_ids,
    num_rows,
    step,
    WIDTH: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    PRODUCT: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    WALKS: tl.constexpr,
):
    pointers = (rows_ptr, table_ptr, scale_ptr, ids_ptr)
    num_pieces = num_ids.to(tl.int64) * tl.cdiv(WIDTH, PIECE)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    e4m3_pieces(start, num_pieces, pointers, num_rows, WIDTH, ROW_STRIDE, SCALE_STRIDE, PRODUCT, PIECE, BLOCK)
    # The loop alone would cost a tenth of the time on the device, where it has one turn.
    if WALKS:
        start += step
        while start < num_pieces:
            e4m3_pieces(start, num_pieces, pointers, num_rows, WIDTH, ROW_STRIDE, SCALE_STRIDE, PRODUCT, PIECE, BLOCK)
            start += step


@triton.jit
def e4m3_pieces(
    start,
    num_pieces,
    pointers,
    num_rows,
    WIDTH: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    PRODUCT: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows_ptr, table_ptr, scale_ptr, ids_ptr = pointers
    PIECES: tl.constexpr = (WIDTH + PIECE - 1) // PIECE
    piece = start + tl.arange(0, BLOCK)
    index = piece // PIECES
    column = (piece % PIECES * PIECE)[:, None] + tl.arange(0, PIECE)[None, :]
    row = tl.load(ids_ptr + index, mask=piece < num_pieces, other=-1).to(tl.int64)
    inside = (row >= 0) & (row < num_rows)
    codes = tl.load(table_ptr + row[:, None] * ROW_STRIDE + column, mask=inside[:, None] & (column < WIDTH), other=0)
    scale = tl.load(scale_ptr + row * SCALE_STRIDE, mask=inside, other=0.0)
    product = (decode_e4m3(codes) * scale.to(tl.float32)[:, None]).to(PRODUCT)
    tl.store(
        rows_ptr + index[:, None] * WIDTH + column,
        product.to(tl.float32).to(rows_ptr.dtype.element_ty),
        mask=(piece < num_pieces)[:, None] & (column < WIDTH),
    )


@triton.jit(do_not_specialize=["num_ids", "num_rows", "step"])
def nvfp4_lookup_kernel(
    rows_ptr,
    table_ptr,
    scale_ptr,
    table_scale_ptr,
    ids_ptr,
    num_ids,
    num_rows,
    step,
    GROUPS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    table_scale = tl.load(table_scale_ptr)
    num_pieces = num_ids.to(tl.int64) * GROUPS
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < num_pieces:
        piece = start + tl.arange(0, BLOCK)
        group = piece % GROUPS
        row = tl.load(ids_ptr + piece // GROUPS, mask=piece < num_pieces, other=-1).to(tl.int64)
        inside = (row >= 0) & (row < num_rows)
        packed = (row * ROW_STRIDE + group * 8)[:, None] + tl.arange(0, 8)[None, :]
        bytes_ = tl.load(table_ptr + packed, mask=inside[:, None], other=0).to(tl.uint16)
        scale = decode_e4m3(tl.load(scale_ptr + row * SCALE_STRIDE + group, mask=inside, other=0))
        codes = tl.join(bytes_ & 15, bytes_ >> 4).reshape(BLOCK, 16)
        product = decode_e2m1(codes) * scale[:, None] * table_scale
        tl.store(
            rows_ptr + piece[:, None] * 16 + tl.arange(0, 16)[None, :],
            product.to(rows_ptr.dtype.element_ty),
            mask=(piece < num_pieces)[:, None],
        )
        start += step


def launch(*arguments: *Arguments) -> Tensor:
    check_arguments(*arguments)
    table, scale, table_scale, ids, product_dtype, dtype = arguments
    width = row_width(table, table_scale)
    rows = torch.empty((*ids.shape, width), dtype=dtype, device=ids.device)
    if rows.numel() == 0:
        return rows
    on_host = pinning.is_host_memory(table)
    key = (layout(ids, table, scale, table_scale), product_dtype, dtype, on_host)
    launch = _LAUNCHES.find(key, planned, *arguments, on_host)
    # As bytes: on sm80 Triton refuses even a pointer to e4m3.
    if table_scale is None:
        launch(rows, table.view(torch.uint8), scale, ids.contiguous())
    else:
        launch(rows, table, scale.view(torch.uint8), table_scale, ids.contiguous())
    return rows


_LAUNCHES: Plans[Launch] = Plans()


def planned(
    table: Tensor,
    scale: Tensor,
    table_scale: Tensor | None,
    ids: Tensor,
    product_dtype: torch.dtype,
    dtype: torch.dtype,
    on_host: bool,
) -> Launch:
    width = row_width(table, table_scale)
    block, num_warps = (_HOST_BLOCK, _host_reads.NUM_WARPS) if on_host else (_BLOCK, _NUM_WARPS)
    programs = cdiv(ids.numel() * cdiv(width, PIECE), block)
    if on_host:
        programs = min(programs, _host_reads.PROGRAMS)
    counts = (ids.numel(), table.shape[0], programs * block)
    if table_scale is None:
        return Launch(
            e4m3_lookup_kernel,
            programs,
            *counts,
            WIDTH=width,
            ROW_STRIDE=table.stride(0),
            SCALE_STRIDE=0 if scale.numel() == 1 else scale.stride(0),
            PRODUCT=TRITON_DTYPE[product_dtype],
            PIECE=PIECE,
            BLOCK=block,
            WALKS=on_host,
            num_warps=num_warps,
        )
    return Launch(
        nvfp4_lookup_kernel,
        programs,
        *counts,
        GROUPS=width // GROUP,
        ROW_STRIDE=table.stride(0),
        SCALE_STRIDE=scale.stride(0),
        BLOCK=block,
        num_warps=num_warps,
    )


def fake(*arguments: *Arguments) -> Tensor:
    table, _, table_scale, ids, _, dtype = arguments
    return ids.new_empty((*ids.shape, row_width(table, table_scale)), dtype=dtype)


def row_width(table: Tensor, table_scale: Tensor | None) -> int:
    return table.shape[1] if table_scale is None else table.shape[1] * 2


def check_arguments(*arguments: *Arguments) -> None:
    table, scale, table_scale, ids, product_dtype, dtype = arguments
    lookup.check_arguments(table, ids)
    rows, stored = table.shape
    if dtype not in TRITON_DTYPE or product_dtype not in TRITON_DTYPE:
        raise ValueError(f"dequantized_lookup: rows of {product_dtype}, {dtype}; ask for float32, bfloat16 or float16")
    if table_scale is None:
        fits = table.dtype in (torch.float8_e4m3fn, torch.uint8) and scale.dtype in TRITON_DTYPE
        fits &= scale.numel() == 1 or tuple(scale.shape) in ((rows,), (rows, 1))
    else:
        fits = table.dtype == torch.uint8 and scale.dtype == torch.float8_e4m3fn and (stored * 2) % GROUP == 0
        fits &= tuple(scale.shape) == (rows, stored * 2 // GROUP) and (scale.stride(1) == 1 or scale.shape[1] == 1)
        fits &= table_scale.dtype == product_dtype == torch.float32 and table_scale.numel() == 1
    if not fits:
        raise ValueError(
            f"dequantized_lookup: table {table.dtype} {tuple(table.shape)} and scale {scale.dtype} "
            f"{tuple(scale.shape)}{'' if table_scale is None else ' with a table scale'} are no known format; pass an "
            "e4m3 table with one scale or one a row, or uint8 [R, D / 2] with e4m3 scales [R, D / 16]"
        )
    for name, tensor in (("scale", scale), ("table scale", table_scale)):
        if tensor is not None and tensor.device != ids.device:
            if tensor.device.type != "cpu" or not pinning.is_page_locked(tensor):
                raise ValueError(
                    f"dequantized_lookup: the {name} is on {tensor.device}, not page-locked, and the ids are on "
                    f"{ids.device}; move it there, or page-lock it"
                )


dequantized_lookup = define(
    "dequantized_lookup(Tensor table, Tensor scale, Tensor? table_scale, Tensor ids, ScalarType product_dtype, "
    "ScalarType dtype) -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=fake,
)
