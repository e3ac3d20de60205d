# mypy: disable-error-code="assignment"
"""Triton kernels of `ple::gate_conv`: gate, norms, dilated causal convolution, silu and residuals.

`normed[t, s, c]` depends on `value[t, c]`, one weight and two numbers per token and stream (the gate g and the conv
norm's scale), so neither `gated` nor `normed` is written out: the convolution rebuilds its taps from `value`.

few_tokens_kernel   one launch; a program takes one token of one stream and computes the scalars of its taps itself,
                    and for single tokens moves the state on
window_kernel       takes the scalars from `gate_kernel` and walks along tokens of equal residue modulo the dilation,
                    so that older taps stay in registers and each is computed once
state_kernel        the state that the next call reads, after window_kernel or several tokens
"""

import triton
import triton.language as tl

from ple_compile.ops._rounding import add_rounded, cast, mul_rounded, round_to, silu
from ple_compile.ops._tiles import load_rows, load_vector, row_offsets, when
from ple_compile.ops.gate import gate_scalars, gated_and_normed, load_mask
from ple_compile.ops.short_conv import load_taps


@triton.jit
def finish(total, gated, residual, CONV: tl.constexpr, SUM: tl.constexpr, OUT: tl.constexpr, ADD_HIDDEN: tl.constexpr):
    """gated + silu(total), plus the residual streams."""
    out = add_rounded(gated, cast(silu(round_to(total, CONV)), CONV), SUM)
    if ADD_HIDDEN:
        out = add_rounded(residual, out, OUT)
    return out


@triton.jit(do_not_specialize=["num_tokens", "seq", "begin", "end", "segments", "steps", "state_columns"])
def window_kernel(
    out_ptr,
    scalars_ptr,
    value_ptr,
    hidden_ptr,
    norm_weight_ptr,
    conv_weight_ptr,
    mask_ptr,
    state_ptr,
    num_tokens,
    seq,
    begin,
    end,
    segments,
    steps,
    value_batch,
    value_row,
    hidden_batch,
    hidden_row,
    mask_batch,
    mask_row,
    state_batch,
    state_channel,
    state_column,
    state_columns,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    KERNEL: tl.constexpr,
    DILATION: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD_HIDDEN: tl.constexpr,
    GATED: tl.constexpr,
    SUM: tl.constexpr,
):
    CONV: tl.constexpr = conv_weight_ptr.dtype.element_ty
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    # Programs that read the same tokens' `value` are neighbours and meet in L2.
    block = tl.program_id(0) % (STREAMS * BLOCKS)
    chain = tl.program_id(0) // (STREAMS * BLOCKS)
    stream = block // BLOCKS
    within = (block % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = within < WIDTH
    channels = stream * WIDTH + within
    batch = (chain // DILATION // segments).to(tl.int64)
    first = begin + (chain // DILATION % segments) * steps * DILATION + chain % DILATION
    steps = tl.minimum(steps, (end - first + DILATION - 1) // DILATION)

    norm_weight = tl.load(norm_weight_ptr + channels, mask=inside, other=0.0)
    taps = load_taps(conv_weight_ptr, channels, inside, KERNEL)
    value_ptr += batch * value_batch
    hidden_ptr += batch * hidden_batch
    scalars_ptr += stream.to(tl.int64) * num_tokens + batch * seq
    out_ptr += batch * seq * (STREAMS * WIDTH)

    # The window first: the taps before `first`, from earlier tokens or from the state.
    window = ()
    for k in tl.static_range(KERNEL - 1):
        row = (first - (KERNEL - 1 - k) * DILATION).to(tl.int64)
        exists = row >= 0
        value = tl.load(value_ptr + row * value_row + within, mask=when(exists, inside), other=0.0)
        gate = tl.load(scalars_ptr + row, mask=exists, other=0.0)
        scale = tl.load(scalars_ptr + num_tokens * STREAMS + row, mask=exists, other=0.0)
        gated, normed = gated_and_normed(cast(gate, GATED), scale, value, norm_weight, GATED)
        if mask_ptr is not None:
            mask = load_mask(mask_ptr + batch * mask_batch + row * mask_row, exists, GATED)
            normed = mul_rounded(normed, mask, GATED)
        tap = round_to(normed, CONV)
        if state_ptr is not None:
            column = state_ptr + batch * state_batch + (state_columns + row) * state_column
            past = tl.load(column + channels.to(tl.int64) * state_channel, mask=when(row < 0, inside), other=0.0)
            tap = tl.where(exists, tap, round_to(past, CONV))
        window += (tap,)

    # Then step by step; each step loads the next one's inputs before it computes.
    row = first.to(tl.int64)
    more = steps > 0
    value = tl.load(value_ptr + row * value_row + within, mask=when(more, inside), other=0.0)
    gate = tl.load(scalars_ptr + row, mask=more, other=0.0)
    scale = tl.load(scalars_ptr + num_tokens * STREAMS + row, mask=more, other=0.0)
    if ADD_HIDDEN:
        residual = tl.load(hidden_ptr + row * hidden_row + channels, mask=when(more, inside), other=0.0)
    else:
        residual = value
    for step in tl.range(0, steps, loop_unroll_factor=KERNEL):
        next_row = row + DILATION
        more = step + 1 < steps
        next_value = tl.load(value_ptr + next_row * value_row + within, mask=when(more, inside), other=0.0)
        next_gate = tl.load(scalars_ptr + next_row, mask=more, other=0.0)
        next_scale = tl.load(scalars_ptr + num_tokens * STREAMS + next_row, mask=more, other=0.0)
        if ADD_HIDDEN:
            next_residual = tl.load(hidden_ptr + next_row * hidden_row + channels, mask=when(more, inside), other=0.0)
        else:
            next_residual = next_value

        gated, normed = gated_and_normed(cast(gate, GATED), scale, value, norm_weight, GATED)
        if mask_ptr is not None:
            mask = load_mask(mask_ptr + batch * mask_batch + row * mask_row, True, GATED)
            gated, normed = mul_rounded(gated, mask, GATED), mul_rounded(normed, mask, GATED)
        tap = round_to(normed, CONV)
        total = tap * taps[KERNEL - 1]
        for k in tl.static_range(KERNEL - 1):
            total += window[k] * taps[k]
        out = finish(total, gated, residual, CONV, SUM, OUT, ADD_HIDDEN)
        tl.store(out_ptr + row * (STREAMS * WIDTH) + channels, out, mask=inside)
        if KERNEL > 1:
            window = window[1:] + (tap,)
        row, value, gate, scale, residual = next_row, next_value, next_gate, next_scale, next_residual


@triton.jit
def move_state(
    new_ptr, new_channel, new_column, old_ptr, old_channel, old_column, old_columns, value_ptr, value_row,
    gate_ptr, scale_ptr, gate, scale, norm_weight_ptr, mask_ptr, mask_row, seq, first, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The last WINDOW columns of [old state, normed] for CHANNELS channels of one stream, from channel `first` on.

    Walks along memory (a state is stored channel by channel) and loads each block before it stores it: `new` may be
    `old`. Nobody else may read these channels of `old` any more. Scalars come from memory, or are `gate` and `scale`.
    """
    for start in tl.range(0, CHANNELS * WINDOW, BLOCK):
        place = start + tl.arange(0, BLOCK)
        within = first + place // WINDOW
        column = place % WINDOW
        inside = (place < CHANNELS * WINDOW) & (within < WIDTH)
        source = old_columns + seq - WINDOW + column  # a column of [old, normed]; negative: zeros
        row = (source - old_columns).to(tl.int64)
        recent = inside & (row >= 0)

        value = tl.load(value_ptr + row * value_row + within, mask=recent, other=0.0)
        weight = tl.load(norm_weight_ptr + within, mask=recent, other=0.0)
        if gate_ptr is not None:
            row_gate = tl.load(gate_ptr + row, mask=recent, other=0.0)
            row_scale = tl.load(scale_ptr + row, mask=recent, other=0.0)
        else:
            row_gate, row_scale = gate, scale
        gated, normed = gated_and_normed(cast(row_gate, GATED), row_scale, value, weight, GATED)
        if mask_ptr is not None:
            normed = mul_rounded(normed, load_mask(mask_ptr + row * mask_row, recent, GATED), GATED)
        if old_ptr is not None:
            past = tl.load(
                old_ptr + within.to(tl.int64) * old_channel + source * old_column,
                mask=inside & (row < 0) & (source >= 0),
                other=0.0,
            )
            normed = tl.where(row < 0, past, normed)
        tl.debug_barrier()
        tl.store(new_ptr + within.to(tl.int64) * new_channel + column * new_column, normed, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "seq", "old_columns"])
def state_kernel(
    new_ptr,
    old_ptr,
    scalars_ptr,
    value_ptr,
    norm_weight_ptr,
    mask_ptr,
    num_tokens,
    seq,
    value_batch,
    value_row,
    mask_batch,
    mask_row,
    new_batch,
    new_channel,
    new_column,
    old_batch,
    old_channel,
    old_column,
    old_columns,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
):
    BLOCKS: tl.constexpr = (WIDTH + CHANNELS - 1) // CHANNELS
    first = (tl.program_id(0) % BLOCKS) * CHANNELS
    stream = tl.program_id(0) // BLOCKS % STREAMS
    batch = (tl.program_id(0) // (BLOCKS * STREAMS)).to(tl.int64)
    gate_ptr = scalars_ptr + stream.to(tl.int64) * num_tokens + batch * seq
    if old_ptr is not None:
        old_ptr += batch * old_batch + stream.to(tl.int64) * WIDTH * old_channel
    if mask_ptr is not None:
        mask_ptr += batch * mask_batch
    move_state(
        new_ptr + batch * new_batch + stream.to(tl.int64) * WIDTH * new_channel, new_channel, new_column,
        old_ptr, old_channel, old_column, old_columns, value_ptr + batch * value_batch, value_row,
        gate_ptr, gate_ptr + num_tokens * STREAMS, None, None, norm_weight_ptr + stream * WIDTH, mask_ptr, mask_row,
        seq, first, WIDTH, CHANNELS, WINDOW, BLOCK, GATED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "seq", "state_columns"])
def few_tokens_kernel(
    out_ptr,
    new_ptr,
    scalars_ptr,
    key_ptr,
    value_ptr,
    hidden_ptr,
    key_weight_ptr,
    query_weight_ptr,
    norm_weight_ptr,
    conv_weight_ptr,
    mask_ptr,
    state_ptr,
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
    new_batch,
    new_channel,
    new_column,
    state_batch,
    state_channel,
    state_column,
    state_columns,
    key_eps,
    query_eps,
    conv_eps,
    inverse_root,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    KERNEL: tl.constexpr,
    DILATION: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    ADD_HIDDEN: tl.constexpr,
    PRODUCT: tl.constexpr,
    GATE: tl.constexpr,
    GATED: tl.constexpr,
    SUM: tl.constexpr,
):
    CONV: tl.constexpr = conv_weight_ptr.dtype.element_ty
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    BLOCKS: tl.constexpr = (WIDTH + CHANNELS - 1) // CHANNELS
    first = (tl.program_id(0) % BLOCKS) * CHANNELS
    stream = tl.program_id(0) // BLOCKS % STREAMS
    token = tl.program_id(0) // (BLOCKS * STREAMS)
    batch, position = (token // seq).to(tl.int64), (token % seq).to(tl.int64)
    channel = stream * WIDTH
    key_ptr += batch * key_batch + channel
    value_ptr += batch * value_batch
    hidden_ptr += batch * hidden_batch + channel
    if state_ptr is not None:
        state_ptr += batch * state_batch + stream.to(tl.int64) * WIDTH * state_channel
    if mask_ptr is not None:
        mask_ptr += batch * mask_batch

    # Every load that does not wait for the scalars comes first: at this size the kernel is all latency.
    within = first + tl.arange(0, BLOCK)
    inside = (within < first + CHANNELS) & (within < WIDTH)
    norm_weight = tl.load(norm_weight_ptr + channel + within, mask=inside, other=0.0)
    taps = load_taps(conv_weight_ptr, channel + within, inside, KERNEL)
    residual = tl.load(hidden_ptr + position * hidden_row + within, mask=inside, other=0.0)
    values = ()
    pasts = ()
    for k in tl.static_range(KERNEL):
        source = position - (KERNEL - 1 - k) * DILATION
        values += (tl.load(value_ptr + source * value_row + within, mask=when(source >= 0, inside), other=0.0),)
        if state_ptr is not None:
            column = state_ptr + (state_columns + source) * state_column
            past = tl.load(column + within.to(tl.int64) * state_channel, mask=when(source < 0, inside), other=0.0)
            pasts += (round_to(past, CONV),)

    # Scalars of this token and of its earlier taps, one row each; a lone token's earlier taps all lie in the state.
    back = ROWS - 1 - tl.arange(0, ROWS)  # the last row is this token
    rows = position - back * DILATION
    exists = ((rows >= 0) & (back < KERNEL))[None, :, None]
    offsets = row_offsets(0, LANES, PARTS)
    key = load_rows(key_ptr + (rows * key_row)[None, :, None], offsets, exists, WIDTH)
    query = load_rows(hidden_ptr + (rows * hidden_row)[None, :, None], offsets, exists, WIDTH)
    value = load_rows(value_ptr + (rows * value_row)[None, :, None], offsets, exists, WIDTH)
    key_weight = load_vector(key_weight_ptr + channel, offsets, WIDTH)
    query_weight = load_vector(query_weight_ptr + channel, offsets, WIDTH)
    gates, scales = gate_scalars(
        key, query, value, key_weight, query_weight, key_eps, query_eps, conv_eps, inverse_root,
        WIDTH, PRODUCT, GATE, GATED,
    )  # fmt: skip
    gates = tl.reshape(gates.to(tl.float32), (ROWS,))
    scales = tl.reshape(scales, (ROWS,))

    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(KERNEL):
        source = position - (KERNEL - 1 - k) * DILATION
        if k == KERNEL - 1 or ROWS > 1:
            this = back == KERNEL - 1 - k
            gate = tl.sum(tl.where(this, gates, 0.0), 0)
            scale = tl.sum(tl.where(this, scales, 0.0), 0)
            gated, normed = gated_and_normed(cast(gate, GATED), scale, values[k], norm_weight, GATED)
            if mask_ptr is not None:
                mask = load_mask(mask_ptr + source * mask_row, source >= 0, GATED)
                gated, normed = mul_rounded(gated, mask, GATED), mul_rounded(normed, mask, GATED)
            total += tl.where(source >= 0, round_to(normed, CONV), 0.0) * taps[k]
        if state_ptr is not None:
            total += pasts[k] * taps[k]
    out = finish(total, gated, residual, CONV, SUM, OUT, ADD_HIDDEN)
    tl.store(out_ptr + token.to(tl.int64) * (STREAMS * WIDTH) + channel + within, out, mask=inside)

    # `gate` and `scale` are now this token's.
    if new_ptr is not None:
        tl.debug_barrier()
        move_state(
            new_ptr + batch * new_batch + stream.to(tl.int64) * WIDTH * new_channel, new_channel, new_column,
            state_ptr, state_channel, state_column, state_columns, value_ptr, value_row, None, None, gate, scale,
            norm_weight_ptr + channel, mask_ptr, mask_row, 1, first, WIDTH, CHANNELS, WINDOW, STATE_BLOCK, GATED,
        )  # fmt: skip
    elif scalars_ptr is not None:
        place = scalars_ptr + stream.to(tl.int64) * num_tokens + token
        tl.store(place, gate)
        tl.store(place + num_tokens * STREAMS, scale)
