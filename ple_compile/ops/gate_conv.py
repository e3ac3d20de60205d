"""The whole PLE layer behind its projections: gate, norms, dilated short convolution and residuals, with its state.

    gated, normed = gate(key, value, hidden, ...)             ple_compile/ops/gate.py
    out = gated + short_conv(normed, conv_weight, state)      ple_compile/ops/short_conv.py
    out = hidden + out                                        with add_hidden
    new_state = last `window` columns of cat([state or zeros, normed])

key and hidden are [B, S, C], value [B, S, C / streams], state [B, C, W] (oldest column first), out [B, S, C]. Rounds
where those two ops round, the two sums to the promotions of their terms.

`gate_conv` leaves the state alone, `gate_conv_update` returns a new one, `gate_conv_update_` writes it into the old
one's memory.

Bytes per token in bf16 at the released widths: 66 KB if every tensor moves once, 92 KB as two kernels (hidden and
value are read by both; what L2 still holds of them is free), 169 KB if gated and normed were written out.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ple_compile.ops import gate as gate_op
from ple_compile.ops import short_conv as short_conv_op
from ple_compile.ops._gate_conv_kernels import few_tokens_kernel, state_kernel, window_kernel
from ple_compile.ops._launches import Launch, Plans, Roles, Step, layout, take
from ple_compile.ops._library import define
from ple_compile.ops._rounding import TRITON_DTYPE
from ple_compile.ops._sizes import cdiv, next_power_of_2
from ple_compile.ops._tiles import row_parts, vector_size
from ple_compile.tuning.table import chosen


class Tuning(NamedTuple):
    """Launch choices; the defaults are the best found on one H200 (benchmarks/kernels.py --sweep).

    Those that ple_compile/tuning may change are listed there, with the reason why not all are.
    """

    few_tokens: int = 32  # up to here one launch does everything
    few_rows: int = 64  # single tokens of several requests: up to so many rows (request x stream) as well
    few_warps: int = 8
    few_programs: int = 132
    gate_rows: int = 1
    gate_warps: int | None = None
    gate_registers: int | None = None
    conv_block: int = 128
    conv_vector: int = 4  # channels per thread
    conv_steps: int = 4  # tokens whose inputs a program reads ahead
    conv_programs: int = 8192
    step_block: int = 512
    step_warps: int = 4
    dependent: bool = True  # the second launch begins while the first one ends, from sm90 on


class Inputs(NamedTuple):
    """The arguments that the three ops share, in schema order."""

    key: Tensor
    value: Tensor
    hidden: Tensor
    norm_key_weight: Tensor
    norm_query_weight: Tensor
    norm_conv_weight: Tensor
    conv_weight: Tensor
    mask: Tensor | None
    state: Tensor | None
    eps: list[float]
    eps_tensors: list[Tensor]
    gate_dtype: torch.dtype
    dilation: int
    add_hidden: bool
    plain: bool = False

    @property
    def gated_dtype(self) -> torch.dtype:
        return torch.promote_types(self.gate_dtype, self.value.dtype)

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.promote_types(self.gated_dtype, self.conv_weight.dtype)

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.promote_types(self.sum_dtype, self.hidden.dtype) if self.add_hidden else self.sum_dtype


def gated_and_normed(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return gate_op.reference(*inputs[:6], inputs.mask, inputs.eps, inputs.eps_tensors, inputs.gate_dtype, inputs.plain)


def reference(*args) -> Tensor:
    inputs = Inputs(*args)
    gated, normed = gated_and_normed(inputs)
    return summed(inputs, gated, short_conv_op.reference(normed, inputs.conv_weight, inputs.state, inputs.dilation))


def summed(inputs: Inputs, gated: Tensor, convolved: Tensor) -> Tensor:
    out = gated + convolved
    return inputs.hidden + out if inputs.add_hidden else out


def reference_update(*args) -> tuple[Tensor, Tensor]:
    *shared, window = args
    inputs = Inputs(*shared)
    check(inputs)
    check_window(inputs, window)
    gated, normed = gated_and_normed(inputs)
    reach = (inputs.conv_weight.shape[-1] - 1) * inputs.dilation
    columns = max(window, reach) if inputs.state is None else inputs.state.shape[-1]
    history = short_conv_op.with_history(normed, inputs.state, columns)
    convolved = short_conv_op.convolved(history[..., columns - reach :], inputs.conv_weight, inputs.dilation)
    new_state = history[..., history.shape[-1] - window :].to(normed.dtype).contiguous()
    return summed(inputs, gated, convolved), new_state


def reference_update_(*args) -> Tensor:
    state: Tensor = args[Inputs._fields.index("state")]
    out, new_state = reference_update(*args, state.shape[-1])
    state.copy_(new_state)
    return out


def launch(*args) -> Tensor:
    inputs = Inputs(*args)
    return run(inputs, None) if computes(inputs) else reference(*args)


def launch_update(*args) -> tuple[Tensor, Tensor]:
    *shared, window = args
    inputs = Inputs(*shared)
    if not computes(inputs):
        return reference_update(*args)
    check_window(inputs, window)
    batch, _, width = inputs.key.shape
    new_state = torch.empty(batch, width, window, dtype=inputs.gated_dtype, device=inputs.key.device)
    return run(inputs, new_state), new_state


def launch_update_(*args) -> Tensor:
    inputs = Inputs(*args)
    return run(inputs, inputs.state) if computes(inputs) else reference_update_(*args)


def computes(inputs: Inputs) -> bool:
    """Whether the kernels compute these dtypes; float64 takes the reference path on every device."""
    return gate_op.computes(*inputs[:9]) and inputs.gate_dtype != torch.float64


def tuned(op: str, defaults: Tuning, value: Tensor) -> Tuning:
    return chosen(op, defaults, value.device, width=value.shape[-1], bytes=value.element_size())


ROLES = Roles("out", "new_state", "scalars", *Inputs._fields[:9])


class Plan(NamedTuple):
    """What one layout of the inputs takes."""

    steps: tuple[Step, ...]
    num_scalars: int
    out_dtype: torch.dtype
    copies: bool  # whether the kernels need some inputs in another layout


_PLANS: Plans[Plan] = Plans()


def run(inputs: Inputs, new_state: Tensor | None, tuning: Tuning | None = None) -> Tensor:
    """Launch the kernels; `new_state` (which may be the old one) receives the next state."""
    tuning = tuning or tuned("gate_conv", Tuning(), inputs.value)
    eps = tuple(gate_op.epsilons(inputs.eps, inputs.eps_tensors))
    key = (layout(*inputs[:9], new_state), eps, inputs[11:], tuning)
    plan = _PLANS.find(key, planned, inputs, new_state, tuning)
    out = torch.empty(inputs.key.shape, dtype=plan.out_dtype, device=inputs.key.device)
    if out.numel() == 0:
        if new_state is not None and new_state is not inputs.state and new_state.numel():
            # No tokens: the state stays as it is.
            past = new_state.new_zeros(new_state.shape) if inputs.state is None else inputs.state
            new_state.copy_(past[..., past.shape[-1] - new_state.shape[-1] :])
        return out
    scalars = torch.empty(plan.num_scalars, dtype=torch.float32, device=out.device) if plan.num_scalars else None
    take(plan.steps, out, new_state, scalars, *(prepared(inputs) if plan.copies else inputs)[:9])
    return out


def planned(inputs: Inputs, new_state: Tensor | None, tuning: Tuning) -> Plan:
    check(inputs)
    batch, seq, width = inputs.key.shape
    if inputs.key.numel() == 0:
        return Plan((), 0, inputs.out_dtype, False)
    ready = prepared(inputs)
    rows = batch * seq * (width // inputs.value.shape[-1])
    num_scalars = scalars_size(rows, inputs.dilation, tuning)
    steps: tuple[Step, ...]
    if seq == 1 and rows <= tuning.few_rows:
        steps, num_scalars = (few_tokens_step(ready, new_state, tuning, "none"),), 0
    elif seq == 1:
        steps = (scalars_step(ready, tuning), few_tokens_step(ready, new_state, tuning, "scalars", given=True))
    else:
        if batch * seq <= tuning.few_tokens:
            steps = (few_tokens_step(ready, None, tuning, "scalars"),)
        else:
            steps = (scalars_step(ready, tuning), window_step(ready, tuning))
        if new_state is not None and new_state.shape[-1]:
            steps += (state_step(ready, new_state),)
    return Plan(steps, num_scalars, inputs.out_dtype, any(a is not b for a, b in zip(ready[:9], inputs[:9])))


def prepared(inputs: Inputs) -> Inputs:
    """The inputs as the kernels take them: rows and weights contiguous, the taps aligned, a batch in front."""
    key, value, hidden = (gate_op.batched(x) for x in inputs[:3])
    weights = {name: getattr(inputs, name).contiguous() for name in Inputs._fields[3:6]}
    return inputs._replace(key=key, value=value, hidden=hidden, conv_weight=aligned(inputs.conv_weight), **weights)


def scalars_size(rows: int, dilation: int, tuning: Tuning) -> int:
    """Room for g and the conv norm's scale of `rows`, the streams of every token: float32 [2, streams, tokens].

    window_kernel also reads, unused, those of the steps that it has past the end or looks ahead to.
    """
    return 2 * rows + 2 * tuning.conv_steps * dilation


def scalars_step(inputs: Inputs, tuning: Tuning) -> Step:
    launch = scalars_launch(inputs, inputs.mask, tuning)
    return ROLES.step(launch, "none", "none", "scalars", *Inputs._fields[:6], "mask")


def scalars_launch(inputs: Any, mask: Tensor | None, tuning: Tuning) -> Launch:
    """The first of two launches, of this op's inputs or of packed_gate_conv's."""
    key, value, hidden = (gate_op.batched(x) for x in inputs[:3])
    return gate_op.planned(
        key, value, hidden, mask, gate_op.epsilons(inputs.eps, inputs.eps_tensors), inputs.gate_dtype, inputs.plain,
        full=False, rows=tuning.gate_rows, num_warps=tuning.gate_warps, max_registers=tuning.gate_registers,
        leads=depends(key.device, tuning),
    )  # fmt: skip


def depends(device: torch.device, tuning: Tuning) -> bool:
    """Whether the second launch waits for the first one itself (programmatic dependent launch)."""
    return tuning.dependent and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def few_tokens_step(
    inputs: Inputs, new_state: Tensor | None, tuning: Tuning, scalars: str, given: bool = False
) -> Step:
    """`scalars` receives g and the conv norm's scale, or (`given`, single tokens) holds them."""
    key, value, hidden = inputs[:3]
    batch, seq, width = value.shape
    streams = key.shape[-1] // width
    kernel = inputs.conv_weight.shape[-1]
    window = 0 if new_state is None else new_state.shape[-1]
    vector = vector_size(key, value, hidden)
    rows = 1 if seq == 1 else next_power_of_2(kernel)
    if given:
        block, num_warps = min(tuning.step_block, next_power_of_2(width)), tuning.step_warps
    else:
        # At least as many warps as keep a thread's share of the rows in registers, at most one per 128 channels.
        num_warps = max(tuning.few_warps, next_power_of_2(cdiv(rows * width, 32 * 64)))
        num_warps = max(1, min(num_warps, next_power_of_2(width) // 128, 16))
        # The scalars are computed by every program of a row: cut rows only as far as the GPU has room for.
        block = min(512, next_power_of_2(width))
        while block < width and cdiv(width, block) * streams * batch * seq > tuning.few_programs:
            block *= 2
    follows = given and depends(key.device, tuning)
    launch = Launch(
        few_tokens_kernel,
        cdiv(width, block) * streams * batch * seq,
        batch * seq,
        seq,
        *key.stride()[:2],
        *value.stride()[:2],
        *hidden.stride()[:2],
        *((0, 0) if inputs.mask is None else inputs.mask.stride()),
        *((0, 0, 0) if new_state is None else new_state.stride()),
        *((0, 0, 0, 0) if inputs.state is None else (*inputs.state.stride(), inputs.state.shape[-1])),
        *gate_op.epsilons(inputs.eps, inputs.eps_tensors),
        1.0 / math.sqrt(width),
        STREAMS=streams,
        WIDTH=width,
        KERNEL=kernel,
        DILATION=inputs.dilation,
        WINDOW=window,
        ROWS=rows,
        LANES=32 * num_warps,
        PARTS=row_parts(width, 32 * num_warps, vector),
        BLOCK=block,
        COLUMNS=next_power_of_2(max(1, window - 1)),
        ADD_HIDDEN=inputs.add_hidden,
        GIVEN=given,
        FOLLOWS=follows,
        SUM=TRITON_DTYPE[inputs.sum_dtype],
        PLAIN=inputs.plain,
        num_warps=num_warps,
        launch_pdl=follows,
        **gate_op.dtypes(key, value, hidden, inputs.gate_dtype),
    )
    return ROLES.step(launch, "out", "new_state" if window else "none", scalars, *Inputs._fields[:9])


def window_step(inputs: Inputs, tuning: Tuning) -> Step:
    value, hidden = inputs.value, inputs.hidden
    batch, seq, width = value.shape
    streams = hidden.shape[-1] // width
    # The largest power of two that divides the row, so that no thread idles, unless that is very small.
    block = min(max(tuning.conv_block // 4, width & -width), tuning.conv_block, next_power_of_2(width))
    blocks = cdiv(width, block) * streams
    turns, segments = turns_of(batch, seq, inputs.dilation, tuning.conv_steps, tuning.conv_programs // blocks)
    follows = depends(hidden.device, tuning)
    launch = Launch(
        window_kernel,
        blocks * batch * segments * inputs.dilation,
        batch * seq,
        seq,
        segments,
        turns,
        *value.stride()[:2],
        *hidden.stride()[:2],
        *((0, 0) if inputs.mask is None else inputs.mask.stride()),
        *((0, 0, 0, 0) if inputs.state is None else (*inputs.state.stride(), inputs.state.shape[-1])),
        STREAMS=streams,
        WIDTH=width,
        KERNEL=inputs.conv_weight.shape[-1],
        DILATION=inputs.dilation,
        STEPS=tuning.conv_steps,
        BLOCK=block,
        ADD_HIDDEN=inputs.add_hidden,
        FOLLOWS=follows,
        GATED=TRITON_DTYPE[inputs.gated_dtype],
        PLAIN=inputs.plain,
        SUM=TRITON_DTYPE[inputs.sum_dtype],
        num_warps=max(1, block // (32 * tuning.conv_vector)),
        launch_pdl=follows,
    )
    return ROLES.step(launch, "out", "scalars", "value", "hidden", "norm_conv_weight", "conv_weight", "mask", "state")


def aligned(weight: Tensor) -> Tensor:
    """Contiguous and aligned to 16 bytes, as nearly every weight is."""
    weight = weight.contiguous()
    return weight if weight.data_ptr() % 16 == 0 else weight.clone()


def turns_of(batch: int, seq: int, dilation: int, steps: int, wanted: int) -> tuple[int, int]:
    """Turns of `steps` tokens per program and programs along a sequence, for about `wanted` in all sequences."""
    all_turns = cdiv(seq, dilation * steps)
    turns = cdiv(all_turns, max(1, min(all_turns, wanted // (batch * dilation))))
    return turns, cdiv(all_turns, turns)


def state_step(inputs: Inputs, new_state: Tensor) -> Step:
    value = inputs.value
    batch, seq, width = value.shape
    streams = new_state.shape[1] // width
    window = new_state.shape[-1]
    block = min(64, next_power_of_2(width))
    launch = Launch(
        state_kernel,
        cdiv(width, block) * streams * batch,
        batch * seq,
        seq,
        *value.stride()[:2],
        *((0, 0) if inputs.mask is None else inputs.mask.stride()),
        *new_state.stride(),
        *((0, 0, 0, window) if inputs.state is None else (*inputs.state.stride(), inputs.state.shape[-1])),
        STREAMS=streams,
        WIDTH=width,
        WINDOW=window,
        COLUMNS=next_power_of_2(window),
        BLOCK=block,
        GATED=TRITON_DTYPE[inputs.gated_dtype],
        PLAIN=inputs.plain,
        num_warps=4,
    )
    return ROLES.step(launch, "new_state", "state", "scalars", "value", "norm_conv_weight", "mask")


def check(inputs: Inputs) -> None:
    gate_op.check(*inputs[:3], inputs[3:6])
    short_conv_op.check(inputs.key, inputs.conv_weight, inputs.state, inputs.dilation)


def check_window(inputs: Inputs, window: int) -> None:
    if inputs.state is not None and window > inputs.state.shape[-1] + inputs.key.shape[1]:
        raise ValueError(
            f"gate_conv_update: window {window} is wider than the state's {inputs.state.shape[-1]} columns and "
            f"{inputs.key.shape[1]} new tokens together; pass at most their sum"
        )


def fake(*args) -> Tensor:
    inputs = Inputs(*args)
    return inputs.key.new_empty(inputs.key.shape, dtype=inputs.out_dtype)


def fake_update(*args) -> tuple[Tensor, Tensor]:
    *shared, window = args
    inputs = Inputs(*shared)
    batch, _, width = inputs.key.shape
    return fake(*shared), inputs.key.new_empty((batch, width, window), dtype=inputs.gated_dtype)


SHARED = (
    "Tensor key, Tensor value, Tensor hidden, Tensor norm_key_weight, Tensor norm_query_weight, "
    "Tensor norm_conv_weight, Tensor conv_weight, Tensor? mask, {state}, float[] eps, Tensor[] eps_tensors, "
    "ScalarType gate_dtype, int dilation, bool add_hidden, bool plain"
)

gate_conv = define(
    f"gate_conv({SHARED.format(state='Tensor? state')}) -> Tensor", cpu=reference, cuda=launch, fake=fake
)
gate_conv_update = define(
    f"gate_conv_update({SHARED.format(state='Tensor? state')}, int window) -> (Tensor out, Tensor new_state)",
    cpu=reference_update,
    cuda=launch_update,
    fake=fake_update,
)
gate_conv_update_ = define(
    f"gate_conv_update_({SHARED.format(state='Tensor(a!) state')}) -> Tensor",
    cpu=reference_update_,
    cuda=launch_update_,
    fake=fake,
)
