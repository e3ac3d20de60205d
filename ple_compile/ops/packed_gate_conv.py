"""The whole PLE layer behind its projections for requests laid end to end, with their states in a pool.

    gated, normed = gate(key, value, hidden, ...)                    ple_compile/ops/gate.py
    out = gated + short_conv(normed, conv_weight, pool, ...)         ple_compile/ops/packed_short_conv.py
    out = hidden + out                                               with add_hidden
    every request's slot takes its newest columns, in place; every token has read the old ones

key and hidden are [T, C], value [T, C / streams], out [T, C]; pool [slots, C, W] and the requests' index tensors are
described in ple_compile/ops/_packed.py. Decode rows, prefill rows and speculative rows may stand in one batch. With
`boundaries` [P] (numbers of tokens of the batch) the second result [P, C, reach] holds what a request that went on
after each of them would look back on: states for prefix caching from the same pass. Without, it is empty.

Rounds where the two ops round. No tensor is gathered by request and none is larger than two numbers per token and
stream. Launches: one for up to `few_rows` single tokens, two for more of them, else three; one more for `boundaries`.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ple_compile.ops import _packed
from ple_compile.ops import gate as gate_op
from ple_compile.ops import packed_short_conv as conv_op
from ple_compile.ops._launches import Launch, Plans, Roles, Step, layout, take
from ple_compile.ops._library import define
from ple_compile.ops._packed import Requests
from ple_compile.ops._packed_gate_conv_kernels import columns_kernel, decode_kernel, window_kernel
from ple_compile.ops._rounding import TRITON_DTYPE
from ple_compile.ops._sizes import cdiv, next_power_of_2
from ple_compile.ops._tiles import row_parts, vector_size
from ple_compile.ops.gate_conv import Tuning, aligned, depends, scalars_launch, scalars_size, tuned, turns_of

# Decoding knows one or two launches (gate_conv's `few_rows` says which is faster). They are right for any batch with as
# many tokens as requests, and slow for requests of many tokens in it, which they walk through one by one; telling those
# apart takes a third launch, about 2 us of every decode step.
WALK_WHERE_TOKENS_ARE_AS_MANY_AS_REQUESTS = True

# gate_conv's choices; but decode_kernel's tile of a slot needs twice the threads and shorter parts of a row, or it does
# not stay in registers (211 to 255 a thread and spills, where this way takes 121).
PACKED = Tuning(step_warps=8, few_rows=32)


class Inputs(NamedTuple):
    """The op's arguments, in schema order."""

    key: Tensor
    value: Tensor
    hidden: Tensor
    norm_key_weight: Tensor
    norm_query_weight: Tensor
    norm_conv_weight: Tensor
    conv_weight: Tensor
    pool: Tensor
    query_start_loc: Tensor
    state_indices: Tensor
    has_initial_state: Tensor
    num_accepted_tokens: Tensor | None
    boundaries: Tensor | None
    eps: list[float]
    eps_tensors: list[Tensor]
    gate_dtype: torch.dtype
    dilation: int
    add_hidden: bool
    plain: bool = False

    @property
    def requests(self) -> Requests:
        return Requests(*self[8:12])

    @property
    def reach(self) -> int:
        return (self.conv_weight.shape[-1] - 1) * self.dilation

    @property
    def gated_dtype(self) -> torch.dtype:
        return torch.promote_types(self.gate_dtype, self.value.dtype)

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.promote_types(self.gated_dtype, self.hidden.dtype) if self.add_hidden else self.gated_dtype

    def new_export(self) -> Tensor:
        count = 0 if self.boundaries is None else self.boundaries.shape[0]
        return self.pool.new_empty(count, self.pool.shape[1], self.reach)


def reference(*args) -> tuple[Tensor, Tensor]:
    inputs = Inputs(*args)
    check(inputs)
    if inputs.key.shape[0] == 0:
        return fake(*args)[0], inputs.new_export().zero_()
    gated, normed = gate_op.reference(
        *inputs[:6], None, inputs.eps, inputs.eps_tensors, inputs.gate_dtype, inputs.plain
    )
    out = gated + conv_op.short_conv(normed, inputs.conv_weight, inputs.pool, inputs.requests, inputs.dilation)
    exported = inputs.new_export()
    if inputs.boundaries is not None:
        exported = conv_op.columns_at(normed, inputs.pool, inputs.requests, inputs.reach, inputs.boundaries)
    conv_op.store_columns(normed, inputs.pool, inputs.requests, inputs.reach)
    return (inputs.hidden + out if inputs.add_hidden else out), exported


def launch(*args) -> tuple[Tensor, Tensor]:
    inputs = Inputs(*args)
    if inputs.gate_dtype == torch.float64 or not gate_op.computes(*inputs[:8]):
        return reference(*args)
    return run(inputs, tuned("packed_gate_conv", PACKED, inputs.value))


ROLES = Roles("out", "exported", "scalars", *Inputs._fields[:13])
REQUESTS = Requests._fields


class Plan(NamedTuple):
    """What one layout of the inputs takes."""

    steps: tuple[Step, ...]
    num_scalars: int
    copies: bool  # whether the kernels need some inputs in another layout


_PLANS: Plans[Plan] = Plans()


def run(inputs: Inputs, tuning: Tuning) -> tuple[Tensor, Tensor]:
    eps = tuple(gate_op.epsilons(inputs.eps, inputs.eps_tensors))
    key = (layout(*inputs[:13]), eps, inputs[15:], WALK_WHERE_TOKENS_ARE_AS_MANY_AS_REQUESTS, tuning)
    plan = _PLANS.find(key, planned, inputs, tuning)
    out, exported = fake(*inputs)
    if out.numel() == 0:
        return out, exported.zero_()
    scalars = torch.empty(plan.num_scalars, dtype=torch.float32, device=out.device)
    take(plan.steps, out, exported, scalars, *(prepared(inputs) if plan.copies else inputs)[:13])
    return out, exported


def planned(inputs: Inputs, tuning: Tuning) -> Plan:
    check(inputs)
    tokens, channels = inputs.key.shape
    if inputs.key.numel() == 0:
        return Plan((), 0, False)
    ready = prepared(inputs)
    rows = tokens * (channels // inputs.value.shape[-1])
    decoding = WALK_WHERE_TOKENS_ARE_AS_MANY_AS_REQUESTS and tokens == inputs.requests.num_requests
    steps: tuple[Step, ...]
    if decoding and inputs.boundaries is None:
        if rows <= tuning.few_rows:
            steps = (decode_step(ready, tuning, given=False),)
        else:
            steps = (scalars_step(ready, tuning), decode_step(ready, tuning, given=True))
    else:
        steps = (scalars_step(ready, tuning), window_step(ready, tuning))
        if inputs.boundaries is not None and inputs.boundaries.shape[0]:
            steps += (columns_step(ready, inputs.new_export(), inputs.boundaries, "exported", "boundaries"),)
        steps += (columns_step(ready, inputs.pool, None, "pool", "none"),)
    copies = any(a is not b for a, b in zip(ready[:13], inputs[:13]))
    return Plan(steps, scalars_size(rows, inputs.dilation, tuning), copies)


def prepared(inputs: Inputs) -> Inputs:
    """The inputs as the kernels take them: rows and weights contiguous, the taps aligned, bools as bytes."""
    ready: dict[str, Any] = inputs.requests.without_bools()._asdict()
    ready |= {name: x if x.stride(-1) == 1 else x.contiguous() for name, x in zip(Inputs._fields, inputs[:3])}
    ready |= {name: getattr(inputs, name).contiguous() for name in Inputs._fields[3:6]}
    return inputs._replace(conv_weight=aligned(inputs.conv_weight), **ready)


def scalars_step(inputs: Inputs, tuning: Tuning) -> Step:
    launch = scalars_launch(inputs, None, tuning)
    return ROLES.step(launch, "none", "none", "scalars", *Inputs._fields[:6], "none")


def decode_step(inputs: Inputs, tuning: Tuning, *, given: bool) -> Step:
    """`given`: the scalars are there; else every program computes its own."""
    tokens, width = inputs.value.shape
    streams = inputs.key.shape[1] // width
    if given:
        block, num_warps = min(tuning.step_block, next_power_of_2(width)), tuning.step_warps
    else:
        num_warps = max(1, min(tuning.few_warps, next_power_of_2(width) // 128))
        # The scalars are computed by every program of a row: cut rows only as far as the GPU has room for.
        block = min(512, next_power_of_2(width))
        while block < width and cdiv(width, block) * streams * tokens > tuning.few_programs:
            block *= 2
    follows = given and depends(inputs.key.device, tuning)
    launch = Launch(
        decode_kernel,
        cdiv(width, block) * streams * tokens,
        *inputs.requests.strides(),
        tokens,
        inputs.key.stride(0),
        inputs.value.stride(0),
        inputs.hidden.stride(0),
        *inputs.pool.stride(),
        *gate_op.epsilons(inputs.eps, inputs.eps_tensors),
        1.0 / math.sqrt(width),
        STREAMS=streams,
        WIDTH=width,
        KERNEL=inputs.conv_weight.shape[-1],
        DILATION=inputs.dilation,
        WINDOW=inputs.pool.shape[-1],
        COLUMNS=next_power_of_2(max(1, inputs.reach - 1)),
        LANES=32 * num_warps,
        PARTS=row_parts(width, 32 * num_warps, vector_size(*inputs[:3])),
        BLOCK=block,
        ADD_HIDDEN=inputs.add_hidden,
        GIVEN=given,
        FOLLOWS=follows,
        PLAIN=inputs.plain,
        num_warps=num_warps,
        launch_pdl=follows,
        **gate_op.dtypes(*inputs[:3], inputs.gate_dtype),
    )
    return ROLES.step(launch, "out", "scalars", *Inputs._fields[:7], "pool", *REQUESTS)


def window_step(inputs: Inputs, tuning: Tuning) -> Step:
    tokens, width = inputs.value.shape
    streams = inputs.key.shape[1] // width
    # The largest power of two that divides the row, so that no thread idles, unless that is very small.
    block = min(max(tuning.conv_block // 4, width & -width), tuning.conv_block, next_power_of_2(width))
    blocks = cdiv(width, block) * streams
    turns, segments = turns_of(1, tokens, inputs.dilation, tuning.conv_steps, tuning.conv_programs // blocks)
    follows = depends(inputs.key.device, tuning)
    launch = Launch(
        window_kernel,
        blocks * segments * inputs.dilation,
        *inputs.requests.strides(),
        tokens,
        inputs.requests.num_requests,
        turns,
        inputs.value.stride(0),
        inputs.hidden.stride(0),
        *inputs.pool.stride(),
        STREAMS=streams,
        WIDTH=width,
        KERNEL=inputs.conv_weight.shape[-1],
        DILATION=inputs.dilation,
        SPARE=inputs.pool.shape[-1] - inputs.reach,
        STEPS=tuning.conv_steps,
        BLOCK=block,
        REQUESTS=_packed.search_block(inputs.requests.num_requests),
        ADD_HIDDEN=inputs.add_hidden,
        FOLLOWS=follows,
        GATED=TRITON_DTYPE[inputs.gated_dtype],
        PLAIN=inputs.plain,
        num_warps=max(1, block // (32 * tuning.conv_vector)),
        launch_pdl=follows,
    )
    weights = ("norm_conv_weight", "conv_weight")
    return ROLES.step(launch, "out", "scalars", "value", "hidden", *weights, "pool", *REQUESTS)


def columns_step(inputs: Inputs, new: Tensor, boundaries: Tensor | None, into: str, at: str) -> Step:
    """The slots' new columns, or those at `boundaries` into `new` [boundaries, C, reach], whose roles these are."""
    tokens, width = inputs.value.shape
    streams = inputs.pool.shape[1] // width
    count = inputs.requests.num_requests if boundaries is None else boundaries.shape[0]
    block = min(64, next_power_of_2(width))
    launch = Launch(
        columns_kernel,
        cdiv(width, block) * streams * count,
        0 if boundaries is None else boundaries.stride(0),
        *inputs.requests.strides(),
        tokens,
        inputs.requests.num_requests,
        inputs.value.stride(0),
        *new.stride(),
        *inputs.pool.stride(),
        STREAMS=streams,
        WIDTH=width,
        REACH=inputs.reach,
        WINDOW=new.shape[-1],
        COLUMNS=next_power_of_2(new.shape[-1]),
        SPARE=inputs.pool.shape[-1] - inputs.reach,
        BLOCK=block,
        REQUESTS=_packed.search_block(inputs.requests.num_requests),
        GATED=TRITON_DTYPE[inputs.gated_dtype],
        PLAIN=inputs.plain,
        num_warps=4,
    )
    return ROLES.step(launch, into, "pool", "scalars", "value", "norm_conv_weight", at, *REQUESTS)


def check(inputs: Inputs) -> None:
    name = "packed_gate_conv_"
    gate_op.check(*inputs[:3], inputs[3:6])
    tokens, channels = inputs.key.shape[0], inputs.key.shape[-1]
    weight = inputs.conv_weight
    if inputs.key.dim() != 2 or weight.shape[0] != channels or weight.numel() != channels * weight.shape[-1]:
        raise ValueError(
            f"{name}: key {tuple(inputs.key.shape)} must be [tokens, channels] and conv_weight {tuple(weight.shape)} "
            "[channels, 1, taps] or [channels, taps]"
        )
    if inputs.reach < 1:
        raise ValueError(f"{name}: a convolution of {weight.shape[-1]} tap has no state; pass at least two taps")
    _packed.check(name, tokens, **inputs.requests._asdict())
    _packed.check_pool(name, channels, inputs.pool, inputs.reach)
    if torch.promote_types(inputs.pool.dtype, inputs.gated_dtype) != inputs.pool.dtype:
        raise ValueError(f"{name}: a pool of {inputs.pool.dtype} cannot hold columns of {inputs.gated_dtype}")
    if inputs.boundaries is not None and (
        inputs.boundaries.dim() != 1 or inputs.boundaries.dtype not in _packed.INTEGERS
    ):
        raise ValueError(
            f"{name}: boundaries is {inputs.boundaries.dtype} {tuple(inputs.boundaries.shape)}; "
            "pass int32 or int64 [boundaries]"
        )


def fake(*args) -> tuple[Tensor, Tensor]:
    inputs = Inputs(*args)
    return inputs.key.new_empty(inputs.key.shape, dtype=inputs.out_dtype), inputs.new_export()


packed_gate_conv_ = define(
    "packed_gate_conv_(Tensor key, Tensor value, Tensor hidden, Tensor norm_key_weight, Tensor norm_query_weight, "
    "Tensor norm_conv_weight, Tensor conv_weight, Tensor(a!) pool, Tensor query_start_loc, Tensor state_indices, "
    "Tensor has_initial_state, Tensor? num_accepted_tokens, Tensor? boundaries, float[] eps, Tensor[] eps_tensors, "
    "ScalarType gate_dtype, int dilation, bool add_hidden, bool plain) -> (Tensor out, Tensor exported)",
    cpu=reference,
    cuda=launch,
    fake=fake,
)
