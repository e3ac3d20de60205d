# mypy: disable-error-code="assignment"
"""Sums over a row's 16-bit numbers, on the tensor cores where the row has a program of its own.

A sum takes two instructions an element (unpack, add), and a sum of squares as many. One matrix product takes four
elements of every thread at once, still packed: x times ones, or x times itself, whose diagonal holds the squares. Its
products are exact and it accumulates in float32. A warp adds up all that its threads hold, so a tile must have one row
and no copies, as _tiles.py lays it out.

Triton's interpreter has no assembly: there, for several rows and for float32, plain sums run.
"""

import triton
import triton.language as tl

from ple_compile.ops._rounding import PACKED, to_float32


@triton.constexpr_function
def takes_matrix(part):
    """Whether the tensor cores can add up a part [LANES, rows, n]."""
    return PACKED.value and part.dtype in (tl.bfloat16, tl.float16) and part.shape[1] == 1 and part.shape[2] % 4 == 0


@triton.constexpr_function
def product(dtype, squares):
    """Outputs $0-$3, x in $4 and $5, addends $6-$9."""
    kind = "bf16" if dtype == tl.bfloat16 else "f16"
    one = "0x3f803f80" if dtype == tl.bfloat16 else "0x3c003c00"
    shape, a, b = ("m16n8k16", "$4, zero, $5, zero", "$4, $5") if squares else ("m16n8k8", "$4, $5", "one")
    return (
        f"{{ .reg .b32 zero, one; mov.b32 zero, 0; mov.b32 one, {one}; "
        f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 "
        f"{{$0, $1, $2, $3}}, {{{a}}}, {{{b}}}, {{$6, $7, $8, $9}}; }}"
    )


@triton.jit
def add_products(x, total, SQUARES: tl.constexpr):
    """`total` plus the products of four elements a thread: each 16 x 8 result lies in four numbers a thread."""
    ASM: tl.constexpr = product(x.dtype, SQUARES)
    return tl.inline_asm_elementwise(ASM, "=f,=f,=f,=f,r,r,f,f,f,f", [x, total], dtype=tl.float32, is_pure=True, pack=4)


@triton.jit
def diagonal(total):
    """Zeros but for the diagonal of each 8 x 8 result: row lane / 4, columns 2 * (lane % 4) and the next."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred even, odd;
        .reg .u32 lane, row, column;
        mov.u32 lane, %laneid;
        shr.u32 row, lane, 2;
        and.b32 column, lane, 3;
        shl.b32 column, column, 1;
        setp.eq.u32 even, row, column;
        add.u32 column, column, 1;
        setp.eq.u32 odd, row, column;
        selp.f32 $0, $4, 0f00000000, even;
        selp.f32 $1, $5, 0f00000000, odd;
        mov.f32 $2, 0f00000000;
        mov.f32 $3, 0f00000000;
        }""",
        "=f,=f,=f,=f,f,f,f,f",
        [total],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def lane_sums(parts, SQUARES: tl.constexpr):
    """Sums over a row's parts, or over their squares, one for each lane and row: [LANES, rows] in float32."""
    lanes = tl.zeros([parts[0].shape[0], parts[0].shape[1]], tl.float32)
    for p in tl.static_range(len(parts)):
        if takes_matrix(parts[p]):
            if p == 0 or parts[p].shape[2] != parts[p - 1].shape[2]:
                total = tl.zeros(parts[p].shape, tl.float32)
            total = add_products(parts[p], total, SQUARES)
            if p == len(parts) - 1 or parts[p].shape[2] != parts[p + 1].shape[2]:
                if SQUARES:
                    lanes += tl.sum(diagonal(total), 2)
                else:
                    lanes += tl.sum(total, 2) * 0.125
        else:
            x = to_float32(parts[p])
            if SQUARES:
                lanes += tl.sum(x * x, 2)
            else:
                lanes += tl.sum(x, 2)
    return lanes
