"""Depthwise, causal, dilated convolution with silu over requests laid end to end, each with its columns in a pool.

    y[t, c] = silu(sum over k of weight[c, k] * x[t - (K - 1 - k) * dilation, c])

x is [T, C], weight [C, 1, K] or [C, K], pool [slots, C, W] with W >= reach = (K - 1) * dilation; the requests' index
tensors are described in ple_compile/ops/_packed.py. Before its first new token a request reads its slot's history, or
zeros; with slot 0 y is zero. Taps accumulate in float32, the sum is rounded to x's dtype, silu computes in float32.
Reads the pool, and leaves it alone.

Bytes per token: (K + 1) * C elements, of which K - 1 reads are in L2. Used where the gate could not be merged in.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ple_compile.ops import _packed
from ple_compile.ops._library import define
from ple_compile.ops._packed import Requests, find_request, load_state
from ple_compile.ops._rounding import cast, round_to, silu, to_float32
from ple_compile.ops._sizes import cdiv, next_power_of_2
from ple_compile.ops._tiles import when
from ple_compile.ops.short_conv import load_taps


def short_conv(x: Tensor, weight: Tensor, pool: Tensor, requests: Requests, dilation: int) -> Tensor:
    compute = torch.float64 if torch.float64 in (x.dtype, weight.dtype, pool.dtype) else torch.float32
    taps = weight.reshape(x.shape[-1], -1).to(compute)
    kernel = taps.shape[-1]
    token = torch.arange(x.shape[0], device=x.device)
    request, place = _packed.locate(requests.query_start_loc, token)
    slot = requests.state_indices.long()[request]
    has = (requests.has_initial_state != 0)[request]

    total = x.to(compute) * taps[:, -1]
    for tap in range(kernel - 1):
        lag = (kernel - 1 - tap) * dilation
        column = _packed.first_columns(requests)[request] + ((kernel - 1) * dilation + place - lag).clamp(
            max=(kernel - 1) * dilation - 1
        )
        past = torch.where(has[:, None], pool[slot, :, column], 0)
        recent = x[(token - lag).clamp(min=0)]
        total = total + torch.where((place >= lag)[:, None], recent, past).to(compute) * taps[:, tap]
    return torch.where((slot != 0)[:, None], F.silu(total.to(x.dtype)), 0)


def columns_after(
    x: Tensor, pool: Tensor, request: Tensor, first_kept: Tensor, requests: Requests, reach: int, columns: int
) -> Tensor:
    """[len(request), C, columns]: of each request's history and tokens, laid end to end, those from `first_kept` on."""
    slot = requests.state_indices.long()[request]
    has = (requests.has_initial_state != 0)[request] & (slot != 0)
    source = first_kept[:, None] + torch.arange(columns, device=x.device)
    in_history = (_packed.first_columns(requests)[request][:, None] + source).clamp(max=pool.shape[-1] - 1)
    history = pool[slot].gather(-1, in_history[:, None].expand(-1, pool.shape[1], -1))
    history = torch.where(has[:, None, None], history, 0)
    start = requests.query_start_loc.long()[request]
    tokens = x[(start[:, None] + source - reach).clamp(0, x.shape[0] - 1)].mT
    return torch.where((source < reach)[:, None], history, tokens)


def store_columns(x: Tensor, pool: Tensor, requests: Requests, reach: int) -> None:
    """Writes the newest columns of every request that has tokens and a slot.

    A final request's last `reach` columns go to its window's beginning. A speculative one (with state, accepted
    tokens, and a window wide enough) keeps its history less one column and all its tokens.
    """
    slot = requests.state_indices.long()
    length = requests.query_start_loc.long().diff()
    first_kept = length
    window = pool.shape[-1]
    if requests.num_accepted_tokens is not None:
        accepted = (requests.has_initial_state != 0) & (requests.num_accepted_tokens > 0)
        first_kept = torch.where(accepted & (reach - 1 + length <= window), 1, length)
    request = torch.arange(requests.num_requests, device=pool.device)
    new = columns_after(x, pool, request, first_kept, requests, reach, window)
    source = first_kept[:, None] + torch.arange(window, device=pool.device)
    written = ((slot != 0) & (length > 0))[:, None] & (source < reach + length[:, None])
    pool[slot] = torch.where(written[:, None], new, pool[slot])


def columns_at(x: Tensor, pool: Tensor, requests: Requests, reach: int, boundaries: Tensor) -> Tensor:
    """[len(boundaries), C, reach]: what a request that went on after the batch's first `boundary` tokens looks back on.

    A boundary belongs to the request of the token before it; 0 gives the first request's history as it is.
    """
    request, place = _packed.locate(requests.query_start_loc, boundaries.long() - 1)
    return columns_after(x, pool, request, place + 1, requests, reach, reach).contiguous()


def reference(x: Tensor, weight: Tensor, pool: Tensor, *indices_and_dilation) -> Tensor:
    *indices, dilation = indices_and_dilation
    check(x, weight, pool, Requests(*indices), dilation)
    return short_conv(x, weight, pool, Requests(*indices), dilation) if x.numel() else fake(x)


@triton.jit(do_not_specialize=["num_tokens", "num_requests"])
def packed_short_conv_kernel(
    y_ptr,
    x_ptr,
    weight_ptr,
    pool_ptr,
    starts_ptr,
    slots_ptr,
    has_ptr,
    accepted_ptr,
    starts_stride,
    slots_stride,
    has_stride,
    accepted_stride,
    num_tokens,
    num_requests,
    x_row,
    x_channel,
    pool_slot,
    pool_channel,
    pool_column,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    DILATION: tl.constexpr,
    SPARE: tl.constexpr,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    token = tl.program_id(0) // BLOCKS
    channels = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < CHANNELS
    taps = load_taps(weight_ptr, channels, inside, KERNEL)
    request = find_request(starts_ptr, starts_stride, num_requests, token, REQUESTS)
    place = token - tl.load(starts_ptr + request * starts_stride).to(tl.int32)
    slot, has, column = load_state(
        request, slots_ptr, slots_stride, has_ptr, has_stride, accepted_ptr, accepted_stride, SPARE
    )  # fmt: skip
    row = token.to(tl.int64)
    x_ptr += channels.to(tl.int64) * x_channel
    pool_ptr += slot * pool_slot + channels.to(tl.int64) * pool_channel

    total = to_float32(tl.load(x_ptr + row * x_row, mask=inside, other=0.0)) * taps[KERNEL - 1]
    for k in tl.static_range(KERNEL - 1):
        lag = (KERNEL - 1 - k) * DILATION
        recent = tl.load(x_ptr + (row - lag) * x_row, mask=when(place >= lag, inside), other=0.0)
        from_pool = tl.where(place < lag, has, 0) != 0
        source = column + k * DILATION + place
        past = tl.load(pool_ptr + source.to(tl.int64) * pool_column, mask=when(from_pool, inside), other=0.0)
        total += (to_float32(recent) + to_float32(past)) * taps[k]  # one of the two is masked
    total = tl.where(slot != 0, total, 0.0)
    y = cast(silu(round_to(total, DTYPE)), DTYPE)
    tl.store(y_ptr + row * CHANNELS + channels, y, mask=inside)


def launch(x: Tensor, weight: Tensor, pool: Tensor, *indices_and_dilation) -> Tensor:
    if torch.float64 in (x.dtype, weight.dtype, pool.dtype):
        return reference(x, weight, pool, *indices_and_dilation)
    *indices, dilation = indices_and_dilation
    requests = Requests(*indices)
    check(x, weight, pool, requests, dilation)
    y = fake(x)
    if y.numel() == 0:
        return y
    tokens, channels = x.shape
    kernel = weight.shape[-1]
    block = min(512, next_power_of_2(channels))
    packed_short_conv_kernel[(cdiv(channels, block) * tokens,)](
        y,
        x,
        weight.contiguous(),
        pool,
        *requests.without_bools(),
        *requests.strides(),
        tokens,
        requests.num_requests,
        *x.stride(),
        *pool.stride(),
        CHANNELS=channels,
        KERNEL=kernel,
        DILATION=dilation,
        SPARE=pool.shape[-1] - (kernel - 1) * dilation,
        BLOCK=block,
        REQUESTS=_packed.search_block(requests.num_requests),
        num_warps=2,
    )
    return y


def fake(x: Tensor, *_) -> Tensor:
    return x.new_empty(x.shape)


def check(x: Tensor, weight: Tensor, pool: Tensor, requests: Requests, dilation: int) -> None:
    if x.dim() != 2 or weight.shape[0] != x.shape[-1] or weight.numel() != weight.shape[0] * weight.shape[-1]:
        raise ValueError(
            f"packed_short_conv: x {tuple(x.shape)} must be [tokens, channels] and "
            f"weight {tuple(weight.shape)} [channels, 1, taps] or [channels, taps]"
        )
    _packed.check("packed_short_conv", x.shape[0], **requests._asdict())
    _packed.check_pool("packed_short_conv", x.shape[-1], pool, (weight.shape[-1] - 1) * dilation)


packed_short_conv = define(
    "packed_short_conv(Tensor x, Tensor weight, Tensor pool, Tensor query_start_loc, Tensor state_indices, "
    "Tensor has_initial_state, Tensor? num_accepted_tokens, int dilation) -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=fake,
)
