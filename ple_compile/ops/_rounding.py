"""Triton helpers that round where eager PyTorch rounds.

Between two eager ops every tensor is rounded to its dtype, so a fused kernel that keeps float32 in between gives
other bits. The product or sum of two 16-bit numbers, computed in float32 and rounded, has the same bits as the
hardware's packed 16-bit instruction (float32 carries more than twice their precision), and the packed one handles two
elements without any conversion: half of this arithmetic is free of casts. Written as assembly because Triton's own
16-bit operators may be contracted into a fused multiply-add, which rounds once instead of twice; `fma.rn.bf16x2` with
a neutral third operand is the form of multiply and add that sm80 has too.

Triton's interpreter has no assembly and computes bf16 wrongly: there, and for other dtypes, the float32 form runs.
"""

import torch
import triton
import triton.language as tl

TRITON_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

PACKED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def to_float32(x):
    """`x` in float32. A pair of bf16 takes two instructions; left to itself the compiler takes three."""
    if PACKED and x.dtype == tl.bfloat16 and x.numel > 1:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(tl.float32)


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """`x` in DTYPE, rounded to nearest even."""
    if PACKED or DTYPE != tl.bfloat16 or x.dtype == tl.bfloat16:
        return x.to(tl.float32).to(DTYPE)
    else:
        # The interpreter truncates to bf16.
        x = x.to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x).to(DTYPE)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """`x` rounded to DTYPE, as float32."""
    return to_float32(cast(x, DTYPE))


@triton.jit
def mul_rounded(a, b, DTYPE: tl.constexpr):
    """a * b rounded to DTYPE."""
    if PACKED and a.dtype == DTYPE and b.dtype == DTYPE and DTYPE == tl.bfloat16:
        a, b = tl.broadcast(a, b)
        return tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",  # + -0.0
            "=r,r,r",
            [a, b],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif PACKED and a.dtype == DTYPE and b.dtype == DTYPE and DTYPE == tl.float16:
        a, b = tl.broadcast(a, b)
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return cast(a.to(tl.float32) * b.to(tl.float32), DTYPE)


@triton.jit
def add_rounded(a, b, DTYPE: tl.constexpr):
    """a + b rounded to DTYPE."""
    if PACKED and a.dtype == DTYPE and b.dtype == DTYPE and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 one; mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $0, $1, one, $2; }",  # * 1.0
            "=r,r,r",
            [a, b],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif PACKED and a.dtype == DTYPE and b.dtype == DTYPE and DTYPE == tl.float16:
        return tl.inline_asm_elementwise(
            "add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return cast(a.to(tl.float32) + b.to(tl.float32), DTYPE)


@triton.jit
def weighted(x, weight, PLAIN: tl.constexpr):
    """x * weight (PLAIN), or x * (1 + weight), in float32.

    The latter in one instruction: 1 + w is exact there for all but tiny 16-bit w.
    """
    if PLAIN:
        return x * weight
    else:
        return tl.fma(x, weight, x)


@triton.jit
def silu(x):
    """x / (1 + exp(-x)) in float32, to about two units in the last place."""
    if PACKED:
        # Triton's exp and division guard against subnormals, which cannot occur in 1 + exp(-x): twice the work.
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;  // -log2(e)
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 t, t;
            mul.f32 $0, $1, t;
            }""",
            "=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return x / (1.0 + tl.exp(-x))
