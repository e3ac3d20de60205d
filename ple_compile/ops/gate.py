# mypy: disable-error-code="assignment"
"""The PLE gate with its three norms.

    kn = norm(key, norm_key_weight)        qn = norm(hidden, norm_query_weight)          norm: per group of H channels
    d = sum(kn * qn over H) / sqrt(H)      g = sigmoid(sqrt(max(|d|, 1e-6)) * sign(d))   one per token and stream
    gated = g * value * mask               normed = norm(g * value, norm_conv_weight) * mask
    norm(x, w) = x * rsqrt(mean(x ** 2) + eps) * (1 + w)                                 with `plain` times w itself

key, hidden, gated and normed are [..., streams * H], value [..., H] (shared by the streams), mask [...] or None.
Rounds where eager rounds: norms compute in float32 and round to their input's dtype, kn * qn to the promotion of key
and hidden, the sum and everything up to g to `gate_dtype`, gated and normed to the promotion of that and value.

Bytes per token: 4 * streams * H + H elements; with FULL off (the caller rebuilds gated and normed from value and two
scalars per token and stream) 2 * streams * H + H.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ple_compile.ops._launches import Launch
from ple_compile.ops._library import define
from ple_compile.ops._rounding import TRITON_DTYPE, cast, mul_rounded, round_to, to_float32, weighted
from ple_compile.ops._sizes import cdiv, next_power_of_2
from ple_compile.ops._sums import lane_sums
from ple_compile.ops._tiles import load_rows, load_vector, row_offsets, row_parts, vector_size


def rms_norm(x: Tensor, weight: Tensor, width: int, eps: float | Tensor, plain: bool) -> Tensor:
    """Grouped RMS norm in float32 (float64 for float64), rounded back to x's dtype."""
    compute = x if x.dtype == torch.float64 else x.float()
    groups = compute.unflatten(-1, (x.shape[-1] // width, width))
    groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    scale = weight.to(compute.dtype)
    return (groups.flatten(-2) * (scale if plain else 1.0 + scale)).type_as(x)


def apply_mask(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else (x * mask[..., None]).to(x.dtype)


def stages(
    key: Tensor,
    value: Tensor,
    hidden: Tensor,
    norm_key_weight: Tensor,
    norm_query_weight: Tensor,
    norm_conv_weight: Tensor,
    mask: Tensor | None,
    eps: list[float],
    eps_tensors: list[Tensor],
    gate_dtype: torch.dtype,
    plain: bool = False,
) -> dict[str, Tensor]:
    """Every intermediate result by name, in the order in which they are computed."""
    check(key, value, hidden, (norm_key_weight, norm_query_weight, norm_conv_weight))
    key_eps, query_eps, conv_eps = eps_tensors or eps
    width = value.shape[-1]
    streams = (key.shape[-1] // width, width)
    key_normed = rms_norm(key, norm_key_weight, width, key_eps, plain).unflatten(-1, streams)
    query_normed = rms_norm(hidden, norm_query_weight, width, query_eps, plain).unflatten(-1, streams)
    dot = (key_normed * query_normed).sum(dim=-1, keepdim=True, dtype=gate_dtype) / math.sqrt(width)
    magnitude = dot.abs()
    bounded = magnitude.clamp_min(1e-6)
    root = bounded.sqrt()
    scores = root * dot.sign()
    opening = torch.sigmoid(scores)
    product = (opening * value.unsqueeze(-2)).flatten(-2)
    normed = rms_norm(product, norm_conv_weight, width, conv_eps, plain)
    return {
        "key's norm": key_normed,
        "query's norm": query_normed,
        "dot product": dot,
        "magnitude": magnitude,
        "bounded magnitude": bounded,
        "root": root,
        "signed root": scores,
        "sigmoid": opening,
        "product with the value": product,
        "gated value": apply_mask(product, mask).contiguous(),
        "norm of the product": normed,
        "normed value": apply_mask(normed, mask).contiguous(),
    }


def reference(*args: Any) -> tuple[Tensor, Tensor]:
    found = stages(*args)
    return found["gated value"], found["normed value"]


@triton.jit
def norm_scales(key, query, key_eps, query_eps, WIDTH: tl.constexpr):
    """Reciprocal root mean squares of the rows of key and query, [1, rows, 1] each."""
    # Both sums of squares cross the lanes in one reduction.
    for p in tl.static_range(len(key)):
        k, q = to_float32(key[p]), to_float32(query[p])
        if p == 0:
            key_sum, query_sum = tl.sum(k * k, 2), tl.sum(q * q, 2)
        else:
            key_sum, query_sum = key_sum + tl.sum(k * k, 2), query_sum + tl.sum(q * q, 2)
    key_sum, query_sum = tl.split(tl.sum(tl.join(key_sum, query_sum), 0))
    key_scale = tl.rsqrt(key_sum * (1.0 / WIDTH) + key_eps)[None, :, None]
    query_scale = tl.rsqrt(query_sum * (1.0 / WIDTH) + query_eps)[None, :, None]
    return key_scale, query_scale


@triton.jit
def gate_of_normed(
    key, query, value, key_weight, query_weight, key_scale, query_scale, conv_eps, inverse_root,
    WIDTH: tl.constexpr, PRODUCT: tl.constexpr, GATE: tl.constexpr, GATED: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Per row: g (in GATED) and the reciprocal root mean square of the unmasked gated value, [1, rows, 1] each."""
    # The dot product of the normed rows; each product is rounded before it is summed.
    products = ()
    for p in tl.static_range(len(key)):
        kn = weighted(to_float32(key[p]) * key_scale, to_float32(key_weight[p]), PLAIN)
        qn = weighted(to_float32(query[p]) * query_scale, to_float32(query_weight[p]), PLAIN)
        products += (mul_rounded(cast(kn, key[p].dtype), cast(qn, query[p].dtype), PRODUCT),)
    dot = round_to(tl.sum(lane_sums(products, SQUARES=False), 0), GATE)

    # d * (1 / sqrt(H)), not d / sqrt(H): eager CUDA divides by a Python number that way.
    d = round_to(dot * inverse_root, GATE)
    magnitude = round_to(tl.maximum(tl.abs(d), 1e-6, propagate_nan=tl.PropagateNan.ALL), GATE)
    root = round_to(tl.sqrt_rn(magnitude), GATE)
    score = tl.where(d > 0, root, tl.where(d < 0, -root, root * 0.0))
    gate = cast(cast(tl.div_rn(1.0, 1.0 + tl.exp(-score)), GATE), GATED)[None, :, None]

    # The mean square of what norm_conv sees: the rounded g * value.
    gated = ()
    for p in tl.static_range(len(value)):
        gated += (mul_rounded(gate, cast(value[p], GATED), GATED),)
    scale = tl.rsqrt(tl.sum(lane_sums(gated, SQUARES=True), 0) * (1.0 / WIDTH) + conv_eps)[None, :, None]
    return gate, scale


@triton.jit
def gate_scalars(
    key, query, value, key_weight, query_weight, key_eps, query_eps, conv_eps, inverse_root,
    WIDTH: tl.constexpr, PRODUCT: tl.constexpr, GATE: tl.constexpr, GATED: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """g and the conv norm's scale (see gate_of_normed) of the rows of key, query and value."""
    key_scale, query_scale = norm_scales(key, query, key_eps, query_eps, WIDTH)
    return gate_of_normed(
        key, query, value, key_weight, query_weight, key_scale, query_scale, conv_eps, inverse_root,
        WIDTH, PRODUCT, GATE, GATED, PLAIN,
    )  # fmt: skip


@triton.jit
def gated_and_normed(gate, scale, value, conv_weight, DTYPE: tl.constexpr, PLAIN: tl.constexpr):
    """gated = round(g * value) and normed = round(gated * scale * (1 + w)) (PLAIN: * w), unmasked."""
    gated = mul_rounded(gate, cast(value, DTYPE), DTYPE)
    weight = to_float32(conv_weight)
    if not PLAIN:
        weight = 1.0 + weight
    normed = (to_float32(gated) * scale) * weight
    return gated, cast(normed, DTYPE)


@triton.jit
def load_mask(mask_ptr, inside, DTYPE: tl.constexpr):
    """Mask values as float32, rounded to DTYPE where the mask holds integers, as type promotion does."""
    mask = tl.load(mask_ptr, mask=inside, other=0)
    if not mask.dtype.is_floating():
        mask = cast(mask, DTYPE)
    return mask.to(tl.float32)


@triton.jit
def save_scalars(scalars_ptr, token, stream, num_tokens, gate, scale, mask, STREAMS: tl.constexpr):
    """Rows' gate and scale into `scalars` [2, streams, tokens]."""
    place = scalars_ptr + stream.to(tl.int64) * num_tokens + token
    tl.store(place, tl.reshape(gate.to(tl.float32), token.shape), mask=mask)
    tl.store(place + num_tokens * STREAMS, tl.reshape(scale, token.shape), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "seq"])
def gate_kernel(
    gated_ptr,
    normed_ptr,
    scalars_ptr,
    key_ptr,
    value_ptr,
    hidden_ptr,
    key_weight_ptr,
    query_weight_ptr,
    conv_weight_ptr,
    mask_ptr,
    num_tokens,
    seq,
    key_batch,
    key_row,
    value_batch,
    value_row,
    hidden_batch,
    hidden_row,
    mask_batch,
    mask_row,
    key_eps,
    query_eps,
    conv_eps,
    inverse_root,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    PRODUCT: tl.constexpr,
    GATE: tl.constexpr,
    GATED: tl.constexpr,
    PLAIN: tl.constexpr,
    FULL: tl.constexpr,
    LEADS: tl.constexpr,
):
    if LEADS:
        tl.extra.cuda.gdc_launch_dependents()
    # Neighbouring programs are the streams of the same tokens: they share `value` in L2.
    stream = tl.program_id(0) % STREAMS
    token = tl.program_id(0) // STREAMS * ROWS + tl.arange(0, ROWS)
    inside = token < num_tokens
    batch, position = (token // seq).to(tl.int64), (token % seq).to(tl.int64)
    if ROWS == 1:
        row_mask = None  # the grid has a program for each row and no more
    else:
        row_mask = inside[None, :, None]
    offsets = row_offsets(0, LANES, PARTS)
    channel = stream * WIDTH

    key_rows = key_ptr + (batch * key_batch + position * key_row)[None, :, None] + channel
    query_rows = hidden_ptr + (batch * hidden_batch + position * hidden_row)[None, :, None] + channel
    value_rows = value_ptr + (batch * value_batch + position * value_row)[None, :, None]
    # `key` is not read again; hidden and value are, by the convolution, if they are still in L2.
    key = load_rows(key_rows, offsets, row_mask, WIDTH, ONCE=True)
    query = load_rows(query_rows, offsets, row_mask, WIDTH)
    value = load_rows(value_rows, offsets, row_mask, WIDTH)
    key_scale, query_scale = norm_scales(key, query, key_eps, query_eps, WIDTH)
    # The weights only now: they come from L1 or L2, and their registers make room for more rows.
    key_weight = load_vector(key_weight_ptr + channel, offsets, WIDTH)
    query_weight = load_vector(query_weight_ptr + channel, offsets, WIDTH)
    gate, scale = gate_of_normed(
        key, query, value, key_weight, query_weight, key_scale, query_scale, conv_eps, inverse_root,
        WIDTH, PRODUCT, GATE, GATED, PLAIN,
    )  # fmt: skip

    if FULL:
        conv_weight = load_vector(conv_weight_ptr + channel, offsets, WIDTH)
        out_rows = token.to(tl.int64)[None, :, None] * (STREAMS * WIDTH) + channel
        for p in tl.static_range(len(PARTS)):
            gated, normed = gated_and_normed(gate, scale, value[p], conv_weight[p], GATED, PLAIN)
            if mask_ptr is not None:
                mask = load_mask(mask_ptr + batch * mask_batch + position * mask_row, inside, GATED)[None, :, None]
                gated, normed = mul_rounded(gated, mask, GATED), mul_rounded(normed, mask, GATED)
            stored = inside[None, :, None] & (offsets[p] < WIDTH)
            tl.store(gated_ptr + out_rows + offsets[p], gated, mask=stored)
            tl.store(normed_ptr + out_rows + offsets[p], normed, mask=stored)
    else:
        save_scalars(scalars_ptr, token, stream, num_tokens, gate, scale, inside, STREAMS)


def check(key: Tensor, value: Tensor, hidden: Tensor, weights: tuple[Tensor, ...]) -> None:
    if key.shape != hidden.shape or key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"gate: key {tuple(key.shape)} and hidden {tuple(hidden.shape)} must be [..., streams * H] "
            f"and value {tuple(value.shape)} [..., H] with the same leading dimensions"
        )
    if key.shape[-1] % value.shape[-1]:
        raise ValueError(f"gate: key's width {key.shape[-1]} must be a multiple of value's width {value.shape[-1]}")
    if any(weight.shape != key.shape[-1:] for weight in weights):
        raise ValueError(f"gate: every norm weight must be [{key.shape[-1]}], like key's last dimension")


def epsilons(eps: list[float], eps_tensors: list[Tensor]) -> list[float]:
    """The norms' eps as numbers. Under dynamic shapes they arrive as 0-d CPU tensors."""
    return [float(e) for e in eps_tensors] if eps_tensors else list(eps)


def batched(x: Tensor, trailing: int = 1) -> Tensor:
    """`x` with exactly two leading dimensions and a contiguous last one; a view wherever its strides allow."""
    leading = x.shape[: x.dim() - trailing]
    if len(leading) != 2:
        x = x.reshape(1, leading.numel(), *x.shape[x.dim() - trailing :])
    return x if not trailing or x.stride(-1) == 1 else x.contiguous()


def computes(*tensors: Tensor | None) -> bool:
    """Whether the kernels compute these dtypes; float64 takes the reference path on every device."""
    return torch.float64 not in [t.dtype for t in tensors if t is not None]


def dtypes(key: Tensor, value: Tensor, hidden: Tensor, gate_dtype: torch.dtype) -> dict[str, tl.dtype]:
    """The kernels' rounding points."""
    return {
        "PRODUCT": TRITON_DTYPE[torch.promote_types(key.dtype, hidden.dtype)],
        "GATE": TRITON_DTYPE[gate_dtype],
        "GATED": TRITON_DTYPE[torch.promote_types(gate_dtype, value.dtype)],
    }


def launch(
    key: Tensor,
    value: Tensor,
    hidden: Tensor,
    norm_key_weight: Tensor,
    norm_query_weight: Tensor,
    norm_conv_weight: Tensor,
    mask: Tensor | None,
    eps: list[float],
    eps_tensors: list[Tensor],
    gate_dtype: torch.dtype,
    plain: bool = False,
) -> tuple[Tensor, Tensor]:
    args = (key, value, hidden, norm_key_weight, norm_query_weight, norm_conv_weight)
    if not computes(*args, mask) or gate_dtype == torch.float64:
        return reference(*args, mask, eps, eps_tensors, gate_dtype, plain)
    check(key, value, hidden, args[3:])
    gated = torch.empty(key.shape, dtype=torch.promote_types(gate_dtype, value.dtype), device=key.device)
    normed = torch.empty_like(gated)
    key, value, hidden = batched(key), batched(value), batched(hidden)
    mask = None if mask is None else batched(mask, trailing=0)
    if gated.numel():
        gate = planned(key, value, hidden, mask, epsilons(eps, eps_tensors), gate_dtype, plain, full=True)
        gate(gated, normed, None, key, value, hidden, *(weight.contiguous() for weight in args[3:]), mask)
    return gated, normed


def planned(
    key: Tensor,
    value: Tensor,
    hidden: Tensor,
    mask: Tensor | None,
    eps: list[float],
    gate_dtype: torch.dtype,
    plain: bool,
    *,
    full: bool,
    rows: int = 1,
    num_warps: int | None = None,
    max_registers: int | None = None,
    leads: bool = False,
) -> Launch:
    """What writes gated and normed (`full`), or into float32 scalars [2, streams, tokens] g and the conv norm's scale.

    Its tensors: gated, normed, scalars (None for those that it does not write), key, value, hidden, the three norm
    weights and the mask, each as `batched` gives it.
    """
    batch, seq, width = value.shape
    streams = key.shape[-1] // width
    vector = vector_size(key, value, hidden)
    num_warps = num_warps or warps_for(width, vector)
    return Launch(
        gate_kernel,
        cdiv(batch * seq, rows) * streams,
        batch * seq,
        seq,
        *key.stride()[:2],
        *value.stride()[:2],
        *hidden.stride()[:2],
        *((0, 0) if mask is None else mask.stride()),
        *eps,
        1.0 / math.sqrt(width),
        STREAMS=streams,
        WIDTH=width,
        LANES=32 * num_warps,
        PARTS=row_parts(width, 32 * num_warps, vector),
        ROWS=rows,
        PLAIN=plain,
        FULL=full,
        LEADS=leads,
        num_warps=num_warps,
        maxnreg=max_registers,
        **dtypes(key, value, hidden, gate_dtype),
    )


def warps_for(width: int, vector: int) -> int:
    """The fewest warps whose threads hold a row of key, hidden and value in registers: no exchange between warps."""
    return min(16, next_power_of_2(cdiv(width, 32 * 10 * vector)))


def fake(
    key: Tensor,
    value: Tensor,
    hidden: Tensor,
    norm_key_weight: Tensor,
    norm_query_weight: Tensor,
    norm_conv_weight: Tensor,
    mask: Tensor | None,
    eps: list[float],
    eps_tensors: list[Tensor],
    gate_dtype: torch.dtype,
    plain: bool = False,
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(gate_dtype, value.dtype)
    return key.new_empty(key.shape, dtype=dtype), key.new_empty(key.shape, dtype=dtype)


gate = define(
    "gate(Tensor key, Tensor value, Tensor hidden, Tensor norm_key_weight, Tensor norm_query_weight, "
    "Tensor norm_conv_weight, Tensor? mask, float[] eps, Tensor[] eps_tensors, ScalarType gate_dtype, "
    "bool plain=False) -> (Tensor gated, Tensor normed)",
    cpu=reference,
    cuda=launch,
    fake=fake,
)
