# mypy: disable-error-code="assignment"
"""Depthwise, causal, dilated convolution with silu.

    y[b, t, c] = silu(sum over k of weight[c, k] * x[b, t - (K - 1 - k) * dilation, c])

Before the sequence x reads the last columns of `state` [B, C, W] (oldest first, W >= (K - 1) * dilation), or zeros.
x is [B, S, C], weight [C, 1, K] or [C, K]; y is [B, S, C] in weight's dtype. x and state are cast to that dtype, the
taps accumulate in float32, the sum is rounded, and silu computes in float32.

Bytes per token: 2 * C elements. A program walks along tokens of equal residue modulo the dilation: each tap is read
once and stays in registers.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ple_compile.ops._library import define
from ple_compile.ops._rounding import cast, round_to, silu, to_float32
from ple_compile.ops._sizes import cdiv, next_power_of_2
from ple_compile.ops._tiles import when
from ple_compile.tuning.table import chosen


def stages(x: Tensor, weight: Tensor, state: Tensor | None, dilation: int) -> dict[str, Tensor]:
    """Every intermediate result by name, in the order in which they are computed."""
    check(x, weight, state, dilation)
    history = with_history(x, state, (weight.shape[-1] - 1) * dilation)
    sums, activated = _convolution(history, weight, dilation)
    return {"padded sequence": history.to(weight.dtype), "convolution": sums, "activation": activated}


def reference(x: Tensor, weight: Tensor, state: Tensor | None, dilation: int) -> Tensor:
    return stages(x, weight, state, dilation)["activation"]


def with_history(x: Tensor, state: Tensor | None, columns: int) -> Tensor:
    """[B, C, columns + S]: the last `columns` columns of `state`, or zeros, and then x."""
    if state is None:
        return F.pad(x.transpose(1, 2), (columns, 0))
    return torch.cat([state[..., state.shape[-1] - columns :], x.transpose(1, 2)], dim=-1)


def convolved(history: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """[B, S, C]: the convolution with silu of `history` [B, C, (K - 1) * dilation + S]."""
    return _convolution(history, weight, dilation)[1]


def _convolution(history: Tensor, weight: Tensor, dilation: int) -> tuple[Tensor, Tensor]:
    """Sums [B, C, S], and what silu makes of them [B, S, C]."""
    batch, channels, columns = history.shape
    seq = columns - (weight.shape[-1] - 1) * dilation
    if batch * seq * channels == 0:
        sums = history.new_empty(batch, channels, seq, dtype=weight.dtype)
        return sums, sums.transpose(1, 2)
    taps = weight.reshape(channels, 1, -1)
    sums = F.conv1d(history.to(weight.dtype), taps, groups=channels, dilation=dilation)
    return sums, F.silu(sums).transpose(1, 2).contiguous()


@triton.jit
def load_taps(weight_ptr, channels, mask, KERNEL: tl.constexpr):
    """The conv weights [.., KERNEL] of `channels` as a tuple of KERNEL float32 vectors, oldest tap first."""
    taps = ()
    if KERNEL == 4:
        # One contiguous read, taken apart: single taps would be strided 2-byte loads.
        tap = tl.arange(0, 4)[None, :]
        rows = tl.load(weight_ptr + channels[:, None] * 4 + tap, mask=mask[:, None], other=0.0)
        even, odd = tl.split(tl.reshape(rows, (rows.shape[0], 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        taps += (to_float32(first), to_float32(second), to_float32(third), to_float32(fourth))
    else:
        for k in tl.static_range(KERNEL):
            taps += (to_float32(tl.load(weight_ptr + channels * KERNEL + k, mask=mask, other=0.0)),)
    return taps


@triton.jit
def load_tap_words(weight_ptr, channels, mask, KERNEL: tl.constexpr):
    """As `load_taps`, for weights aligned to 16 bytes: the four or two 16-bit taps of a channel are one integer.

    Taking integers apart keeps the layout of `channels`; taking rows apart has every later tile moved to another one.
    """
    TAP: tl.constexpr = weight_ptr.dtype.element_ty
    if TAP.primitive_bitwidth == 16 and (KERNEL == 4 or KERNEL == 2):
        WORD: tl.constexpr = tl.int64 if KERNEL == 4 else tl.int32
        words = tl.load(weight_ptr.to(tl.pointer_type(WORD)) + channels, mask=mask, other=0)
        taps = ()
        for k in tl.static_range(KERNEL):
            bits = (words >> (16 * k)).to(tl.int32)
            if TAP == tl.bfloat16:
                taps += ((bits << 16).to(tl.float32, bitcast=True),)
            else:
                taps += (bits.to(tl.int16).to(TAP, bitcast=True).to(tl.float32),)
        return taps
    else:
        return load_taps(weight_ptr, channels, mask, KERNEL)


@triton.jit(do_not_specialize=["seq", "segments", "steps", "state_columns"])
def short_conv_kernel(
    y_ptr,
    x_ptr,
    weight_ptr,
    state_ptr,
    seq,
    segments,
    steps,
    x_batch,
    x_row,
    x_channel,
    state_batch,
    state_channel,
    state_column,
    state_columns,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    DILATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    CONV: tl.constexpr = weight_ptr.dtype.element_ty
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    channels = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < CHANNELS
    chain = tl.program_id(0) // BLOCKS
    batch = (chain // DILATION // segments).to(tl.int64)
    first = (chain // DILATION % segments) * steps * DILATION + chain % DILATION
    steps = tl.minimum(steps, (seq - first + DILATION - 1) // DILATION)
    taps = load_taps(weight_ptr, channels, inside, KERNEL)
    x_ptr += batch * x_batch + channels.to(tl.int64) * x_channel

    # The window first: the taps before `first`, from earlier tokens or from the state.
    window = ()
    for k in tl.static_range(KERNEL - 1):
        row = (first - (KERNEL - 1 - k) * DILATION).to(tl.int64)
        tap = round_to(tl.load(x_ptr + row * x_row, mask=when(row >= 0, inside), other=0.0), CONV)
        if state_ptr is not None:
            column = state_ptr + batch * state_batch + (state_columns + row) * state_column
            past = tl.load(column + channels.to(tl.int64) * state_channel, mask=when(row < 0, inside), other=0.0)
            tap += round_to(past, CONV)
        window += (tap,)

    for step in tl.range(0, steps, loop_unroll_factor=KERNEL):
        row = (first + step * DILATION).to(tl.int64)
        tap = round_to(tl.load(x_ptr + row * x_row, mask=inside, other=0.0), CONV)
        total = tap * taps[KERNEL - 1]
        for k in tl.static_range(KERNEL - 1):
            total += window[k] * taps[k]
        y = cast(silu(round_to(total, CONV)), CONV)
        tl.store(y_ptr + (batch * seq + row) * CHANNELS + channels, y, mask=inside)
        if KERNEL > 1:
            window = window[1:] + (tap,)


def chains(batch: int, tokens: int, dilation: int, wanted: int) -> tuple[int, int]:
    """Segments per sequence and steps per chain, for about `wanted` chains (one per batch, segment and residue)."""
    segments = max(1, min(wanted // (batch * dilation), cdiv(tokens, dilation)))
    steps = cdiv(tokens, dilation * segments)
    return cdiv(tokens, dilation * steps), steps


class Choices(NamedTuple):
    """Launch choices."""

    block: int = 512  # channels of a program
    chains: int = 4096  # programs, about
    num_warps: int = 2


def launch(x: Tensor, weight: Tensor, state: Tensor | None, dilation: int) -> Tensor:
    if torch.float64 in (x.dtype, weight.dtype):
        return reference(x, weight, state, dilation)
    choices = chosen("short_conv", Choices(), x.device, channels=x.shape[-1], bytes=x.element_size())
    return run(x, weight, state, dilation, choices)


def run(x: Tensor, weight: Tensor, state: Tensor | None, dilation: int, choices: Choices) -> Tensor:
    check(x, weight, state, dilation)
    y = fake(x, weight, state, dilation)
    if y.numel() == 0:
        return y
    batch, seq, width = x.shape
    block = min(choices.block, next_power_of_2(width))
    blocks = cdiv(width, block)
    segments, steps = chains(batch, seq, dilation, wanted=choices.chains // blocks)
    short_conv_kernel[(blocks * batch * segments * dilation,)](
        y,
        x,
        weight.contiguous(),
        state,
        seq,
        segments,
        steps,
        *x.stride(),
        *((0, 0, 0, 0) if state is None else (*state.stride(), state.shape[-1])),
        CHANNELS=width,
        KERNEL=weight.shape[-1],
        DILATION=dilation,
        BLOCK=block,
        num_warps=choices.num_warps,
    )
    return y


def fake(x: Tensor, weight: Tensor, state: Tensor | None, dilation: int) -> Tensor:
    return x.new_empty(x.shape, dtype=weight.dtype)


def check(x: Tensor, weight: Tensor, state: Tensor | None, dilation: int) -> None:
    if x.dim() != 3 or weight.shape[0] != x.shape[-1] or weight.numel() != weight.shape[0] * weight.shape[-1]:
        raise ValueError(
            f"short_conv: x {tuple(x.shape)} must be [batch, tokens, channels] and "
            f"weight {tuple(weight.shape)} [channels, 1, taps] or [channels, taps]"
        )
    left = (weight.shape[-1] - 1) * dilation
    if state is not None and (state.shape[:2] != (x.shape[0], x.shape[2]) or state.shape[2] < left):
        raise ValueError(
            f"short_conv: state {tuple(state.shape)} must be [{x.shape[0]}, {x.shape[2]}, columns] with at least "
            f"(taps - 1) * dilation = {left} columns"
        )


short_conv = define(
    "short_conv(Tensor x, Tensor weight, Tensor? state, int dilation) -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=fake,
)
