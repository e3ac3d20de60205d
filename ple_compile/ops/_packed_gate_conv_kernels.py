# mypy: disable-error-code="assignment, var-annotated"
"""Triton kernels of `ple::packed_gate_conv_`: the padded kernels' idea (ple_compile/ops/_gate_conv_kernels.py) over
requests laid end to end. Neither gated nor normed is written out; taps are rebuilt from `value` and two scalars per
token and stream.

decode_kernel    for as many requests as tokens: a program takes one request, one stream and a part of its channels
                 through convolution and state, with the scalars of `gate_kernel` or its own
window_kernel    takes the scalars from `gate_kernel` and walks along tokens of equal residue modulo the dilation,
                 across requests; where one begins its history enters the window from the pool
columns_kernel   history after window_kernel: every request's new columns into its slot, or those at chosen boundaries
                 into a tensor of their own
"""

import triton
import triton.language as tl

from ple_compile.ops._gate_conv_kernels import finish, load_scalars, load_steps
from ple_compile.ops._packed import find_request, load_state
from ple_compile.ops._rounding import cast, to_float32
from ple_compile.ops._tiles import load_rows, load_vector, row_offsets, when
from ple_compile.ops.gate import gate_scalars, gated_and_normed
from ple_compile.ops.short_conv import load_tap_words


@triton.jit
def load_request(
    request, num_requests, starts_ptr, starts_stride, slots_ptr, slots_stride, has_ptr, has_stride, accepted_ptr,
    accepted_stride, SPARE: tl.constexpr,
):  # fmt: skip
    """(first token, end, slot, whether it holds history, the history's first column); the last request has no end."""
    start = tl.load(starts_ptr + request * starts_stride).to(tl.int32)
    end = tl.load(starts_ptr + (request + 1) * starts_stride).to(tl.int32)
    end = tl.where(request == num_requests - 1, 0x7FFFFFFF, end)
    slot, has, column = load_state(
        request, slots_ptr, slots_stride, has_ptr, has_stride, accepted_ptr, accepted_stride, SPARE
    )
    return start, end, slot, has, column


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "turns"])
def window_kernel(
    out_ptr,
    scalars_ptr,
    value_ptr,
    hidden_ptr,
    norm_weight_ptr,
    conv_weight_ptr,
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
    turns,
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
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
    ADD_HIDDEN: tl.constexpr,
    FOLLOWS: tl.constexpr,
    GATED: tl.constexpr,
    PLAIN: tl.constexpr,
):
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    BEFORE: tl.constexpr = KERNEL - 1
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    # Programs that read the same tokens' `value` are neighbours and meet in L2.
    block = tl.program_id(0) % (STREAMS * BLOCKS)
    chain = tl.program_id(0) // (STREAMS * BLOCKS)
    stream = block // BLOCKS
    within = (block % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    if WIDTH % BLOCK == 0:
        inside = tl.full([BLOCK], True, tl.int1)
    else:
        inside = within < WIDTH
    channels = stream * WIDTH + within
    first = (chain // DILATION) * turns * STEPS * DILATION + chain % DILATION

    request = find_request(starts_ptr, starts_stride, num_requests, first, REQUESTS)
    start, end, slot, has, column = load_request(
        request, num_requests, starts_ptr, starts_stride, slots_ptr, slots_stride, has_ptr, has_stride, accepted_ptr,
        accepted_stride, SPARE,
    )  # fmt: skip
    scalars_ptr += stream.to(tl.int64) * num_tokens
    hidden_ptr += stream * WIDTH
    out_ptr += stream * WIDTH
    pool_ptr += channels.to(tl.int64) * pool_channel

    # Every load that does not wait for the scalars: the taps before `first`, from the request's earlier tokens or from
    # its history, and the first steps. Steps past the end stay undefined; nothing of them is stored.
    values = ()
    pasts = ()
    for k in tl.static_range(BEFORE):
        row = first + (k - BEFORE) * DILATION
        wanted = when(row < num_tokens, when(row >= start, inside))
        values += (tl.load(value_ptr + row.to(tl.int64) * value_row + within, mask=wanted, other=0.0),)
        source = (column + BEFORE * DILATION + row - start).to(tl.int64)
        from_pool = tl.where(row >= start, 0, has) != 0
        past = tl.load(pool_ptr + slot * pool_slot + source * pool_column, mask=when(from_pool, inside), other=0.0)
        pasts += (past,)
    value_ptr += first.to(tl.int64) * value_row + within
    hidden_ptr += first.to(tl.int64) * hidden_row + within
    value, residual = load_steps(
        value_ptr, value_row, hidden_ptr, hidden_row, first, num_tokens, inside, STEPS, DILATION, ADD_HIDDEN
    )
    norm_weight = tl.load(norm_weight_ptr + channels, mask=inside, other=0.0)
    taps = load_tap_words(conv_weight_ptr, channels, inside, KERNEL)
    if FOLLOWS:
        tl.extra.cuda.gdc_wait()

    window = ()
    for k in tl.static_range(BEFORE):
        row = first + (k - BEFORE) * DILATION
        past_gate = tl.load(scalars_ptr + row, mask=row >= start, other=0.0)
        past_scale = tl.load(scalars_ptr + num_tokens * STREAMS + row, mask=row >= start, other=0.0)
        gated, normed = gated_and_normed(cast(past_gate, GATED), past_scale, values[k], norm_weight, GATED, PLAIN)
        window += (tl.where(row >= start, to_float32(normed), to_float32(pasts[k])),)

    # STEPS tokens at a time, while the inputs of the next ones arrive. `scalars` has room for the steps past the end.
    scalars_ptr += first
    gate, scale = load_scalars(scalars_ptr, num_tokens * STREAMS, STEPS, DILATION)
    out_ptr += first.to(tl.int64) * (STREAMS * WIDTH) + within
    for _ in tl.range(0, turns):
        value_ptr += STEPS * DILATION * value_row
        hidden_ptr += STEPS * DILATION * hidden_row
        next_value, next_residual = load_steps(
            value_ptr, value_row, hidden_ptr, hidden_row, first + STEPS * DILATION, num_tokens, inside, STEPS, DILATION,
            ADD_HIDDEN,
        )  # fmt: skip
        scalars_ptr += STEPS * DILATION
        next_gate, next_scale = load_scalars(scalars_ptr, num_tokens * STREAMS, STEPS, DILATION)
        for step in tl.static_range(STEPS):
            row = first + step * DILATION
            if row >= end:
                # Another request: the token before this one in the chain was not its, so the whole window is history.
                request = find_request(starts_ptr, starts_stride, num_requests, row, REQUESTS)
                start, end, slot, has, column = load_request(
                    request, num_requests, starts_ptr, starts_stride, slots_ptr, slots_stride, has_ptr, has_stride,
                    accepted_ptr, accepted_stride, SPARE,
                )  # fmt: skip
                # A chain's last steps may lie past the last token, as far as they like.
                reads = when(tl.where(row < num_tokens, has, 0) != 0, inside)
                window = ()
                for k in tl.static_range(BEFORE):
                    source = (column + k * DILATION + row - start).to(tl.int64)
                    past = tl.load(pool_ptr + slot * pool_slot + source * pool_column, mask=reads, other=0.0)
                    window += (to_float32(past),)
            gated, normed = gated_and_normed(
                cast(gate[step], GATED), scale[step], value[step], norm_weight, GATED, PLAIN
            )
            tap = to_float32(normed)
            total = tap * taps[BEFORE]
            for k in tl.static_range(BEFORE):
                total += window[k] * taps[k]
            total = tl.where(slot != 0, total, 0.0)
            out = finish(total, gated, residual[step], GATED, GATED, OUT, ADD_HIDDEN)
            tl.store(out_ptr + step * DILATION * (STREAMS * WIDTH), out, mask=when(row < num_tokens, inside))
            window = window[1:] + (tap,)
        first += STEPS * DILATION
        out_ptr += STEPS * DILATION * STREAMS * WIDTH
        value, residual, gate, scale = next_value, next_residual, next_gate, next_scale


@triton.jit(do_not_specialize=["num_tokens", "num_requests"])
def columns_kernel(
    new_ptr,
    pool_ptr,
    scalars_ptr,
    value_ptr,
    norm_weight_ptr,
    boundaries_ptr,
    starts_ptr,
    slots_ptr,
    has_ptr,
    accepted_ptr,
    boundaries_stride,
    starts_stride,
    slots_stride,
    has_stride,
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
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPARE: tl.constexpr,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
    GATED: tl.constexpr,
    PLAIN: tl.constexpr,
):
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    within = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)[:, None]
    stream = tl.program_id(0) // BLOCKS % STREAMS
    index = tl.program_id(0) // (BLOCKS * STREAMS)
    channels = (stream * WIDTH + within).to(tl.int64)
    if boundaries_ptr is not None:
        boundary = tl.minimum(tl.load(boundaries_ptr + index * boundaries_stride).to(tl.int32), num_tokens)
        request = find_request(starts_ptr, starts_stride, num_requests, boundary - 1, REQUESTS)
    else:
        request = index
    start = tl.load(starts_ptr + request * starts_stride).to(tl.int32)
    slot, has, first_column = load_state(
        request, slots_ptr, slots_stride, has_ptr, has_stride, accepted_ptr, accepted_stride, SPARE
    )
    # (history, then the request's tokens)[first_kept + column], short of `limit`.
    if boundaries_ptr is not None:
        first_kept = boundary - start
        limit = first_kept + REACH
        place = index.to(tl.int64)
    else:
        length = tl.load(starts_ptr + (request + 1) * starts_stride).to(tl.int32) - start
        first_kept = first_column_kept(length, has, request, accepted_ptr, accepted_stride, REACH, WINDOW)
        limit = tl.where(slot != 0, tl.where(length > 0, REACH + length, 0), 0)
        place = slot
    if limit > 0:
        column = tl.arange(0, COLUMNS)[None, :]
        source = first_kept + column
        listed = (column < WINDOW) & (source < limit)
        inside = listed & (within < WIDTH)
        row = (source - REACH).to(tl.int64)
        new = listed & (row >= 0)
        scalars_ptr += stream.to(tl.int64) * num_tokens + start
        gate = tl.load(scalars_ptr + row, mask=new, other=0.0)
        scale = tl.load(scalars_ptr + num_tokens * STREAMS + row, mask=new, other=0.0)
        value = tl.load(value_ptr + (start + row) * value_row + within, mask=inside & (row >= 0), other=0.0)
        weight = tl.load(norm_weight_ptr + channels, mask=within < WIDTH, other=0.0)
        gated, normed = gated_and_normed(cast(gate, GATED), scale, value, weight, GATED, PLAIN)
        past = tl.load(
            pool_ptr + slot * pool_slot + channels * pool_channel + (first_column + source).to(tl.int64) * pool_column,
            mask=when(has != 0, inside & (row < 0)),
            other=0.0,
        )
        moved = tl.where(row < 0, past, normed.to(past.dtype))
        tl.debug_barrier()  # `new` may be the pool: every load before any store
        tl.store(new_ptr + place * new_slot + channels * new_channel + column * new_column, moved, mask=inside)


@triton.jit
def first_column_kept(
    length, has, request, accepted_ptr, accepted_stride, REACH: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """Which column of history and tokens, laid end to end, becomes the slot's first: see `store_columns`."""
    kept = length
    if accepted_ptr is not None:
        accepted = tl.load(accepted_ptr + request * accepted_stride)
        fits = tl.where(REACH - 1 + length <= WINDOW, has, 0)
        kept = tl.where(tl.where(accepted > 0, fits, 0) != 0, 1, length)
    return kept


@triton.jit
def load_token(
    value_ptr, value_row, hidden_ptr, hidden_row, history_ptr, pool_column, row, place, has, wanted,
    KERNEL: tl.constexpr, DILATION: tl.constexpr,
):  # fmt: skip
    """A token's value and residual, and the taps that lie in its request's history."""
    value = tl.load(value_ptr + row * value_row, mask=wanted, other=0.0)
    residual = tl.load(hidden_ptr + row * hidden_row, mask=wanted, other=0.0)
    pasts = ()
    for k in tl.static_range(KERNEL - 1):
        from_pool = tl.where(place < (KERNEL - 1 - k) * DILATION, has, 0) != 0
        past_ptr = history_ptr + (k * DILATION + place) * pool_column
        pasts += (tl.load(past_ptr, mask=when(from_pool, wanted), other=0.0),)
    return value, residual, pasts


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
    slots_ptr,
    has_ptr,
    accepted_ptr,
    starts_stride,
    slots_stride,
    has_stride,
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
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD_HIDDEN: tl.constexpr,
    GIVEN: tl.constexpr,
    FOLLOWS: tl.constexpr,
    PRODUCT: tl.constexpr,
    GATE: tl.constexpr,
    GATED: tl.constexpr,
    PLAIN: tl.constexpr,
):
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    REACH: tl.constexpr = (KERNEL - 1) * DILATION
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    stream = tl.program_id(0) // BLOCKS % STREAMS
    request = tl.program_id(0) // (BLOCKS * STREAMS)
    channel = stream * WIDTH
    within = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = within < WIDTH

    # As many tokens as requests: one each, in all but odd batches, whose requests of more tokens are walked through.
    start = tl.load(starts_ptr + request * starts_stride).to(tl.int32)
    length = tl.load(starts_ptr + (request + 1) * starts_stride).to(tl.int32) - start
    total_length = tl.load(starts_ptr + num_tokens * starts_stride).to(tl.int32)
    last_slot = tl.load(slots_ptr + (num_tokens - 1) * slots_stride)
    slot, has, column = load_state(
        request, slots_ptr, slots_stride, has_ptr, has_stride, accepted_ptr, accepted_stride, WINDOW - REACH
    )
    # Tokens past the last end are the last request's. If that has no slot they need nobody: one for each program.
    walked = length
    if last_slot == 0:
        walked += (request >= total_length).to(tl.int32)
    elif request == num_tokens - 1:
        walked = num_tokens - start

    # Every load that does not wait for the scalars comes first: at this size the kernel is all latency.
    key_ptr += channel
    hidden_ptr += channel
    gate_ptr = scalars_ptr + stream.to(tl.int64) * num_tokens
    scale_ptr = gate_ptr + num_tokens * STREAMS
    pool_ptr += slot * pool_slot + (channel + within).to(tl.int64) * pool_channel
    history_ptr = pool_ptr + column.to(tl.int64) * pool_column
    later = tl.arange(0, COLUMNS)[None, :]
    kept = inside[:, None] & (later < REACH - 1)
    moved = tl.load(history_ptr[:, None] + (later + 1) * pool_column, mask=when(has != 0, kept), other=0.0)
    own = (length > 0) | (last_slot != 0)
    token = tl.where(own, start, request)
    value, residual, pasts = load_token(
        value_ptr + within, value_row, hidden_ptr + within, hidden_row, history_ptr, pool_column, token.to(tl.int64),
        0, has, when(walked > 0, inside), KERNEL, DILATION,
    )  # fmt: skip
    norm_weight = tl.load(norm_weight_ptr + channel + within, mask=inside, other=0.0)
    taps = load_tap_words(conv_weight_ptr, channel + within, inside, KERNEL)
    newest = tl.zeros([BLOCK], GATED)
    if FOLLOWS:
        tl.extra.cuda.gdc_wait()

    for i in tl.range(0, walked):
        own = (i < length) | (last_slot != 0)
        place = tl.where(own, i, 0)
        row = tl.where(own, start + i, request).to(tl.int64)
        if GIVEN:
            gate = tl.load(gate_ptr + row)
            scale = tl.load(scale_ptr + row)
        else:
            rows = row + tl.arange(0, 1)
            offsets = row_offsets(0, LANES, PARTS)
            key = load_rows(key_ptr + (rows * key_row)[None, :, None], offsets, None, WIDTH)
            query = load_rows(hidden_ptr + (rows * hidden_row)[None, :, None], offsets, None, WIDTH)
            values = load_rows(value_ptr + (rows * value_row)[None, :, None], offsets, None, WIDTH)
            key_weight = load_vector(key_weight_ptr + channel, offsets, WIDTH)
            query_weight = load_vector(query_weight_ptr + channel, offsets, WIDTH)
            gates, scales = gate_scalars(
                key, query, values, key_weight, query_weight, key_eps, query_eps, conv_eps, inverse_root,
                WIDTH, PRODUCT, GATE, GATED, PLAIN,
            )  # fmt: skip
            gate = tl.sum(tl.reshape(gates.to(tl.float32), (1,)), 0)
            scale = tl.sum(tl.reshape(scales, (1,)), 0)
            tl.store(gate_ptr + row, gate)
            tl.store(scale_ptr + row, scale)
            tl.debug_barrier()  # later tokens read these
        gated, normed = gated_and_normed(cast(gate, GATED), scale, value, norm_weight, GATED, PLAIN)

        total = to_float32(normed) * taps[KERNEL - 1]
        for k in tl.static_range(KERNEL - 1):
            tap = to_float32(pasts[k])
            if place >= (KERNEL - 1 - k) * DILATION:
                earlier = row - (KERNEL - 1 - k) * DILATION
                past_value = tl.load(value_ptr + earlier * value_row + within, mask=inside, other=0.0)
                past_gate, past_scale = tl.load(gate_ptr + earlier), tl.load(scale_ptr + earlier)
                _, recent = gated_and_normed(cast(past_gate, GATED), past_scale, past_value, norm_weight, GATED, PLAIN)
                tap = to_float32(recent)
            total += tap * taps[k]
        total = tl.where(tl.where(own, slot, 0) != 0, total, 0.0)
        out = finish(total, gated, residual, GATED, GATED, OUT, ADD_HIDDEN)
        tl.store(out_ptr + row * (STREAMS * WIDTH) + channel + within, out, mask=inside)
        if i < length:
            newest = normed

        own = (i + 1 < length) | (last_slot != 0)
        token = tl.where(own, start + i + 1, request)
        value, residual, pasts = load_token(
            value_ptr + within, value_row, hidden_ptr + within, hidden_row, history_ptr, pool_column,
            token.to(tl.int64), tl.where(own, i + 1, 0), has, when(i + 1 < walked, inside), KERNEL, DILATION,
        )  # fmt: skip

    tl.debug_barrier()  # every load of the old columns before any store
    if slot != 0:
        if length == 1:
            tl.store(pool_ptr[:, None] + later * pool_column, moved, mask=kept)
            tl.store(pool_ptr + (REACH - 1) * pool_column, newest, mask=inside)
        elif length > 1:
            first_kept = first_column_kept(length, has, request, accepted_ptr, accepted_stride, REACH, WINDOW)
            for j in tl.range(0, tl.minimum(WINDOW, REACH + length - first_kept)):
                source = first_kept + j
                row = (start + source - REACH).to(tl.int64)
                old = source < REACH
                past = tl.load(
                    history_ptr + source.to(tl.int64) * pool_column,
                    mask=when(tl.where(old, has, 0) != 0, inside),
                    other=0.0,
                )
                past_value = tl.load(
                    value_ptr + row * value_row + within, mask=when(source >= REACH, inside), other=0.0
                )
                past_gate = tl.load(gate_ptr + row, mask=source >= REACH, other=0.0)
                past_scale = tl.load(scale_ptr + row, mask=source >= REACH, other=0.0)
                _, recent = gated_and_normed(cast(past_gate, GATED), past_scale, past_value, norm_weight, GATED, PLAIN)
                column_of = tl.where(old, past, recent.to(past.dtype))
                tl.debug_barrier()
                tl.store(pool_ptr + j * pool_column, column_of, mask=inside)
