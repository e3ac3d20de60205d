# mypy: disable-error-code="assignment, var-annotated"
"""Triton kernels of `ple::packed_gate_conv_`: the padded kernels' idea (ple_compile/ops/_gate_conv_kernels.py) over
requests laid end to end. Neither gated nor normed is written out; taps are rebuilt from `value` and two scalars per
token and stream.

decode_kernel    one launch for as many requests as tokens: a program takes one request, one stream and a part of its
                 channels through gate, convolution and state
window_kernel    takes the scalars from `gate_kernel` and walks along tokens of equal residue modulo the dilation,
                 across requests; where one begins its history enters the window from the pool
columns_kernel   history after window_kernel: every request's new columns into its slot, or those at chosen boundaries
                 into a tensor of their own
"""

import triton
import triton.language as tl

from ple_compile.ops._gate_conv_kernels import finish
from ple_compile.ops._packed import find_request, load_state
from ple_compile.ops._rounding import cast, to_float32
from ple_compile.ops._tiles import load_rows, load_vector, row_offsets, when
from ple_compile.ops.gate import gate_scalars, gated_and_normed
from ple_compile.ops.short_conv import load_taps


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "segments", "steps"])
def window_kernel(
    out_ptr,
    scalars_ptr,
    value_ptr,
    hidden_ptr,
    norm_weight_ptr,
    conv_weight_ptr,
    pool_ptr,
    starts_ptr,
    starts_stride,
    slots_ptr,
    slots_stride,
    has_ptr,
    has_stride,
    accepted_ptr,
    accepted_stride,
    num_tokens,
    num_requests,
    segments,
    steps,
    value_row,
    hidden_row,
    pool_slot,
    pool_channel,
    pool_column,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    KERNEL: tl.constexpr,
    DILATION: tl.constexpr,
    SPARE: tl.constexpr,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
    ADD_HIDDEN: tl.constexpr,
    GATED: tl.constexpr,
):
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    REACH: tl.constexpr = (KERNEL - 1) * DILATION
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    # Programs that read the same tokens' `value` are neighbours and meet in L2.
    block = tl.program_id(0) % (STREAMS * BLOCKS)
    chain = tl.program_id(0) // (STREAMS * BLOCKS)
    stream = block // BLOCKS
    within = (block % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = within < WIDTH
    channels = stream * WIDTH + within
    first = (chain // DILATION) * steps * DILATION + chain % DILATION
    steps = tl.minimum(steps, (num_tokens - first + DILATION - 1) // DILATION)

    norm_weight = tl.load(norm_weight_ptr + channels, mask=inside, other=0.0)
    taps = load_taps(conv_weight_ptr, channels, inside, KERNEL)
    scalars_ptr += stream.to(tl.int64) * num_tokens
    scales_ptr = scalars_ptr + num_tokens.to(tl.int64) * STREAMS
    pool_ptr += channels.to(tl.int64) * pool_channel

    request = find_request(starts_ptr, starts_stride, num_requests, first, REQUESTS)
    start = tl.load(starts_ptr + request * starts_stride).to(tl.int32)
    end = tl.load(starts_ptr + (request + 1) * starts_stride).to(tl.int32)
    end = tl.where(request == num_requests - 1, num_tokens, end)
    slot, has, column = load_state(
        request, slots_ptr, slots_stride, has_ptr, has_stride, accepted_ptr, accepted_stride, SPARE
    )  # fmt: skip

    # The window first: the taps before `first`, from the request's earlier tokens or from its history.
    window = ()
    for k in tl.static_range(KERNEL - 1):
        row = first - (KERNEL - 1 - k) * DILATION
        exists = row >= start
        value = tl.load(value_ptr + row.to(tl.int64) * value_row + within, mask=when(exists, inside), other=0.0)
        gate = tl.load(scalars_ptr + row, mask=exists, other=0.0)
        scale = tl.load(scales_ptr + row, mask=exists, other=0.0)
        gated, normed = gated_and_normed(cast(gate, GATED), scale, value, norm_weight, GATED)
        source = (column + REACH + row - start).to(tl.int64)
        from_pool = tl.where(exists, 0, has) != 0
        past = tl.load(
            pool_ptr + slot * pool_slot + source * pool_column, mask=when(from_pool, inside), other=0.0
        )  # fmt: skip
        window += (tl.where(exists, to_float32(normed), to_float32(past)),)

    # Then step by step; each step loads the next one's inputs before it computes.
    row = first
    place = row.to(tl.int64)
    more = steps > 0
    value = tl.load(value_ptr + place * value_row + within, mask=when(more, inside), other=0.0)
    gate = tl.load(scalars_ptr + row, mask=more, other=0.0)
    scale = tl.load(scales_ptr + row, mask=more, other=0.0)
    if ADD_HIDDEN:
        residual = tl.load(hidden_ptr + place * hidden_row + channels, mask=when(more, inside), other=0.0)
    else:
        residual = value
    for step in tl.range(0, steps, loop_unroll_factor=KERNEL):
        next_row = row + DILATION
        next_place = next_row.to(tl.int64)
        more = step + 1 < steps
        next_value = tl.load(value_ptr + next_place * value_row + within, mask=when(more, inside), other=0.0)
        next_gate = tl.load(scalars_ptr + next_row, mask=more, other=0.0)
        next_scale = tl.load(scales_ptr + next_row, mask=more, other=0.0)
        if ADD_HIDDEN:
            next_residual = tl.load(hidden_ptr + next_place * hidden_row + channels, mask=when(more, inside), other=0.0)
        else:
            next_residual = next_value

        if row >= end:
            # Another request: the token before this one in the chain was not its, so the whole window is history.
            request = find_request(starts_ptr, starts_stride, num_requests, row, REQUESTS)
            start = tl.load(starts_ptr + request * starts_stride).to(tl.int32)
            end = tl.load(starts_ptr + (request + 1) * starts_stride).to(tl.int32)
            end = tl.where(request == num_requests - 1, num_tokens, end)
            slot, has, column = load_state(
                request, slots_ptr, slots_stride, has_ptr, has_stride, accepted_ptr, accepted_stride, SPARE
            )  # fmt: skip
            window = ()
            for k in tl.static_range(KERNEL - 1):
                source = (column + k * DILATION + row - start).to(tl.int64)
                past = tl.load(
                    pool_ptr + slot * pool_slot + source * pool_column, mask=when(has != 0, inside), other=0.0
                )  # fmt: skip
                window += (to_float32(past),)

        gated, normed = gated_and_normed(cast(gate, GATED), scale, value, norm_weight, GATED)
        tap = to_float32(normed)
        total = tap * taps[KERNEL - 1]
        for k in tl.static_range(KERNEL - 1):
            total += window[k] * taps[k]
        total = tl.where(slot != 0, total, 0.0)
        out = finish(total, gated, residual, GATED, GATED, OUT, ADD_HIDDEN)
        tl.store(out_ptr + row.to(tl.int64) * (STREAMS * WIDTH) + channels, out, mask=inside)
        window = window[1:] + (tap,)
        row, value, gate, scale, residual = next_row, next_value, next_gate, next_scale, next_residual


@triton.jit
def move_columns(
    new_ptr, new_channel, new_column, old_ptr, old_channel, old_column, has, first_kept, limit,
    value_ptr, value_row, gate_ptr, scale_ptr, norm_weight_ptr, first,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, REACH: tl.constexpr, BLOCK: tl.constexpr,
    CHANNELS_TOGETHER: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """new[column] = (history, then the request's tokens)[first_kept + column], short of `limit`.

    For CHANNELS channels of one stream, from channel `first` on. Walks along memory, with a slot's channels together
    or its columns, and loads each block before it stores it: sources lie behind what they go to, so `new` may be
    `old`. `value`, `gate` and `scale` begin at the request's first token, `old` at its history's first column.
    """
    for begin in tl.range(0, CHANNELS * COLUMNS, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        if CHANNELS_TOGETHER:
            within, column = first + place % CHANNELS, place // CHANNELS
        else:
            within, column = first + place // COLUMNS, place % COLUMNS
        source = first_kept + column
        inside = (place < CHANNELS * COLUMNS) & (within < WIDTH) & (source < limit)
        row = (source - REACH).to(tl.int64)
        recent = inside & (row >= 0)

        value = tl.load(value_ptr + row * value_row + within, mask=recent, other=0.0)
        weight = tl.load(norm_weight_ptr + within, mask=recent, other=0.0)
        gate = tl.load(gate_ptr + row, mask=recent, other=0.0)
        scale = tl.load(scale_ptr + row, mask=recent, other=0.0)
        gated, normed = gated_and_normed(cast(gate, GATED), scale, value, weight, GATED)
        past = tl.load(
            old_ptr + within.to(tl.int64) * old_channel + source.to(tl.int64) * old_column,
            mask=when(has != 0, inside & (row < 0)),
            other=0.0,
        )
        moved = tl.where(row < 0, past, normed.to(past.dtype))
        tl.debug_barrier()
        tl.store(
            new_ptr + within.to(tl.int64) * new_channel + column.to(tl.int64) * new_column, moved, mask=inside
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_requests"])
def columns_kernel(
    new_ptr,
    pool_ptr,
    scalars_ptr,
    value_ptr,
    norm_weight_ptr,
    boundaries_ptr,
    boundaries_stride,
    starts_ptr,
    starts_stride,
    slots_ptr,
    slots_stride,
    has_ptr,
    has_stride,
    accepted_ptr,
    accepted_stride,
    num_tokens,
    num_requests,
    value_row,
    new_slot,
    new_channel,
    new_column,
    pool_slot,
    pool_channel,
    pool_column,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    REACH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPARE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
    CHANNELS_TOGETHER: tl.constexpr,
    GATED: tl.constexpr,
):
    BLOCKS: tl.constexpr = (WIDTH + CHANNELS - 1) // CHANNELS
    first = (tl.program_id(0) % BLOCKS) * CHANNELS
    stream = (tl.program_id(0) // BLOCKS % STREAMS).to(tl.int64)
    index = tl.program_id(0) // (BLOCKS * STREAMS)
    if boundaries_ptr is not None:
        boundary = tl.minimum(tl.load(boundaries_ptr + index * boundaries_stride).to(tl.int32), num_tokens)
        request = find_request(starts_ptr, starts_stride, num_requests, boundary - 1, REQUESTS)
    else:
        request = index
    start = tl.load(starts_ptr + request * starts_stride).to(tl.int32)
    slot, has, column = load_state(
        request, slots_ptr, slots_stride, has_ptr, has_stride, accepted_ptr, accepted_stride, SPARE
    )  # fmt: skip
    if boundaries_ptr is not None:
        first_kept = boundary - start
        limit = first_kept + REACH
        place = index.to(tl.int64)
    else:
        length = tl.load(starts_ptr + (request + 1) * starts_stride).to(tl.int32) - start
        first_kept = length
        if accepted_ptr is not None:
            accepted = tl.load(accepted_ptr + request * accepted_stride)
            speculative = (has != 0) & (accepted > 0) & (REACH - 1 + length <= COLUMNS)
            first_kept = tl.where(speculative, 1, length)
        limit = tl.where((slot != 0) & (length > 0), REACH + length, 0)
        place = slot
    if limit > 0:
        channel = stream * WIDTH
        gate_ptr = scalars_ptr + stream * num_tokens + start
        move_columns(
            new_ptr + place * new_slot + channel * new_channel, new_channel, new_column,
            pool_ptr + slot * pool_slot + channel * pool_channel + column.to(tl.int64) * pool_column,
            pool_channel, pool_column, has, first_kept, limit,
            value_ptr + start.to(tl.int64) * value_row, value_row,
            gate_ptr, gate_ptr + num_tokens.to(tl.int64) * STREAMS,
            norm_weight_ptr + channel, first, WIDTH, CHANNELS, COLUMNS, REACH, BLOCK, CHANNELS_TOGETHER, GATED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def decode_kernel(
    out_ptr,
    scalars_ptr,
    key_ptr,
    value_ptr,
    hidden_ptr,
    key_weight_ptr,
    query_weight_ptr,
    norm_weight_ptr,
    conv_weight_ptr,
    pool_ptr,
    starts_ptr,
    starts_stride,
    slots_ptr,
    slots_stride,
    has_ptr,
    has_stride,
    accepted_ptr,
    accepted_stride,
    num_tokens,
    key_row,
    value_row,
    hidden_row,
    pool_slot,
    pool_channel,
    pool_column,
    key_eps,
    query_eps,
    conv_eps,
    inverse_root,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    KERNEL: tl.constexpr,
    DILATION: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    POOL: tl.constexpr,
    ADD_HIDDEN: tl.constexpr,
    PRODUCT: tl.constexpr,
    GATE: tl.constexpr,
    GATED: tl.constexpr,
):
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    REACH: tl.constexpr = (KERNEL - 1) * DILATION
    BLOCKS: tl.constexpr = (WIDTH + CHANNELS - 1) // CHANNELS
    first = (tl.program_id(0) % BLOCKS) * CHANNELS
    stream = tl.program_id(0) // BLOCKS % STREAMS
    request = tl.program_id(0) // (BLOCKS * STREAMS)
    channel = stream * WIDTH
    within = first + tl.arange(0, BLOCK)
    inside = (within < first + CHANNELS) & (within < WIDTH)

    # As many tokens as requests: one each, in all but odd batches, whose requests of more tokens are walked through.
    start = tl.load(starts_ptr + request * starts_stride).to(tl.int32)
    length = tl.load(starts_ptr + (request + 1) * starts_stride).to(tl.int32) - start
    total_length = tl.load(starts_ptr + num_tokens * starts_stride).to(tl.int32)
    last_slot = tl.load(slots_ptr + (num_tokens - 1) * slots_stride)
    slot, has, column = load_state(
        request, slots_ptr, slots_stride, has_ptr, has_stride, accepted_ptr, accepted_stride, COLUMNS - REACH
    )  # fmt: skip
    # Tokens past the last end are the last request's. If that has no slot they need nobody: one for each program.
    walked = length
    if last_slot == 0:
        walked += (request >= total_length).to(tl.int32)
    elif request == num_tokens - 1:
        walked = num_tokens - start

    # Every load that does not wait for the scalars comes early: at this size the kernel is all latency.
    norm_weight = tl.load(norm_weight_ptr + channel + within, mask=inside, other=0.0)
    taps = load_taps(conv_weight_ptr, channel + within, inside, KERNEL)
    offsets = row_offsets(0, LANES, PARTS)
    key_weight = load_vector(key_weight_ptr + channel, offsets, WIDTH)
    query_weight = load_vector(query_weight_ptr + channel, offsets, WIDTH)
    pool_ptr += slot * pool_slot + channel.to(tl.int64) * pool_channel
    history_ptr = pool_ptr + column.to(tl.int64) * pool_column
    kept = ()
    if POOL == "channels":
        for j in tl.static_range(1, REACH):
            kept += (tl.load(history_ptr + j * pool_column + within, mask=when(has != 0, inside), other=0.0),)
    key_ptr += channel
    hidden_ptr += channel
    gate_ptr = scalars_ptr + stream.to(tl.int64) * num_tokens
    scale_ptr = gate_ptr + num_tokens.to(tl.int64) * STREAMS
    newest = tl.zeros([BLOCK], GATED)

    for i in tl.range(0, walked):
        own = (i < length) | (last_slot != 0)
        place = tl.where(own, i, 0)
        token = tl.where(own, start + i, request)
        row = token.to(tl.int64)
        now = tl.load(value_ptr + row * value_row + within, mask=inside, other=0.0)
        residual = tl.load(hidden_ptr + row * hidden_row + within, mask=inside, other=0.0)
        pasts = ()
        for k in tl.static_range(KERNEL - 1):
            from_pool = tl.where(place < (KERNEL - 1 - k) * DILATION, has, 0) != 0
            source = history_ptr + (k * DILATION + place).to(tl.int64) * pool_column
            past = tl.load(
                source + within.to(tl.int64) * pool_channel, mask=when(from_pool, inside), other=0.0
            )  # fmt: skip
            pasts += (to_float32(past),)
        rows = row + tl.arange(0, 1)
        exists = (rows >= 0)[None, :, None]
        key = load_rows(key_ptr + (rows * key_row)[None, :, None], offsets, exists, WIDTH)
        query = load_rows(hidden_ptr + (rows * hidden_row)[None, :, None], offsets, exists, WIDTH)
        value = load_rows(value_ptr + (rows * value_row)[None, :, None], offsets, exists, WIDTH)
        gates, scales = gate_scalars(
            key, query, value, key_weight, query_weight, key_eps, query_eps, conv_eps, inverse_root,
            WIDTH, PRODUCT, GATE, GATED,
        )  # fmt: skip
        gate = tl.sum(tl.reshape(gates.to(tl.float32), (1,)), 0)
        scale = tl.sum(tl.reshape(scales, (1,)), 0)
        gated, normed = gated_and_normed(cast(gate, GATED), scale, now, norm_weight, GATED)

        total = to_float32(normed) * taps[KERNEL - 1]
        for k in tl.static_range(KERNEL - 1):
            tap = pasts[k]
            if place >= (KERNEL - 1 - k) * DILATION:
                earlier = row - (KERNEL - 1 - k) * DILATION
                past_value = tl.load(value_ptr + earlier * value_row + within, mask=inside, other=0.0)
                past_gate, past_scale = tl.load(gate_ptr + earlier), tl.load(scale_ptr + earlier)
                _, recent = gated_and_normed(cast(past_gate, GATED), past_scale, past_value, norm_weight, GATED)
                tap = to_float32(recent)
            total += tap * taps[k]
        total = tl.where(tl.where(own, slot, 0) != 0, total, 0.0)
        out = finish(total, gated, residual, GATED, GATED, OUT, ADD_HIDDEN)
        tl.store(out_ptr + row * (STREAMS * WIDTH) + channel + within, out, mask=inside)
        tl.store(gate_ptr + row, gate)
        tl.store(scale_ptr + row, scale)
        tl.debug_barrier()  # later tokens read these scalars, and the state below overwrites what was read
        if i < length:
            newest = normed

    if slot != 0:
        FAST: tl.constexpr = POOL != "any"
        if (length == 1) & FAST:
            if POOL == "channels":
                for j in tl.static_range(REACH - 1):
                    tl.store(pool_ptr + j * pool_column + within, kept[j], mask=inside)
                tl.store(pool_ptr + (REACH - 1) * pool_column + within, newest, mask=inside)
            if POOL == "dense":
                # A dense slot of REACH columns: everything moves by one element.
                pool_ptr += first * REACH
                for begin in tl.range(0, CHANNELS * REACH, STATE_BLOCK):
                    element = begin + tl.arange(0, STATE_BLOCK) + 1
                    real = (element < CHANNELS * REACH) & (element < (WIDTH - first) * REACH)
                    past = tl.load(pool_ptr + element, mask=when(has != 0, real), other=0.0)
                    tl.debug_barrier()
                    tl.store(pool_ptr + element - 1, past, mask=real)
                tl.debug_barrier()
                tl.store(pool_ptr + (within - first) * REACH + REACH - 1, newest, mask=inside)
        elif length > 0:
            first_kept = length
            if accepted_ptr is not None:
                accepted = tl.load(accepted_ptr + request * accepted_stride)
                speculative = (has != 0) & (accepted > 0) & (REACH - 1 + length <= COLUMNS)
                first_kept = tl.where(speculative, 1, length)
            move_columns(
                pool_ptr, pool_channel, pool_column, history_ptr, pool_channel, pool_column, has, first_kept,
                REACH + length, value_ptr + start.to(tl.int64) * value_row, value_row, gate_ptr + start,
                scale_ptr + start, norm_weight_ptr + channel, first, WIDTH, CHANNELS, COLUMNS, REACH, LANES * 2,
                POOL == "channels", GATED,
            )  # fmt: skip
