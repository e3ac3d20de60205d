# mypy: disable-error-code="assignment"
"""Triton kernels of `ple::gate_conv`: gate, norms, dilated causal convolution, silu and residuals.

`normed[t, s, c]` depends on `value[t, c]`, one weight and two numbers per token and stream (the gate g and the conv
norm's scale), so neither `gated` nor `normed` is written out: the convolution rebuilds its taps from `value`.

few_tokens_kernel   a program takes one token of one stream, computes the scalars of its taps itself (or, for single
                    tokens, takes them from `gate_kernel`), and for single tokens moves the state on
window_kernel       takes the scalars from `gate_kernel` and walks along tokens of equal residue modulo the dilation,
                    so that older taps stay in registers and each is computed once
state_kernel        the state that the next call reads, after window_kernel or several tokens
"""

import triton
import triton.language as tl

from ple_compile.ops._rounding import add_rounded, cast, mul_rounded, round_to, silu
from ple_compile.ops._tiles import load_rows, load_vector, row_offsets, when
from ple_compile.ops.gate import gate_scalars, gated_and_normed, load_mask
from ple_compile.ops.short_conv import load_tap_words


@triton.jit
def finish(total, gated, residual, CONV: tl.constexpr, SUM: tl.constexpr, OUT: tl.constexpr, ADD_HIDDEN: tl.constexpr):
    """gated + silu(total), plus the residual streams."""
    out = add_rounded(gated, cast(silu(round_to(total, CONV)), CONV), SUM)
    if ADD_HIDDEN:
        out = add_rounded(residual, out, OUT)
    return out


@triton.jit
def load_steps(
    value_ptr, value_row, hidden_ptr, hidden_row, first, seq, inside, STEPS: tl.constexpr, DILATION: tl.constexpr,
    ADD_HIDDEN: tl.constexpr,
):  # fmt: skip
    """What STEPS tokens, DILATION apart, need of value and hidden; undefined for those past the end."""
    values = ()
    residuals = ()
    for step in tl.static_range(STEPS):
        wanted = when(first + step * DILATION < seq, inside)
        value = tl.load(value_ptr + step * DILATION * value_row, mask=wanted)
        values += (value,)
        if ADD_HIDDEN:
            residuals += (tl.load(hidden_ptr + step * DILATION * hidden_row, mask=wanted),)
        else:
            residuals += (value,)
    return values, residuals


@triton.jit
def load_scalars(scalars_ptr, distance, STEPS: tl.constexpr, DILATION: tl.constexpr):
    """Gates and, `distance` further on, scales of STEPS tokens, DILATION apart."""
    gates = ()
    scales = ()
    for step in tl.static_range(STEPS):
        gates += (tl.load(scalars_ptr + step * DILATION),)
        scales += (tl.load(scalars_ptr + distance + step * DILATION),)
    return gates, scales


@triton.jit(do_not_specialize=["num_tokens", "seq", "segments", "turns", "state_columns"])
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
    segments,
    turns,
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
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD_HIDDEN: tl.constexpr,
    FOLLOWS: tl.constexpr,
    GATED: tl.constexpr,
    PLAIN: tl.constexpr,
    SUM: tl.constexpr,
):
    CONV: tl.constexpr = conv_weight_ptr.dtype.element_ty
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    BEFORE: tl.constexpr = KERNEL - 1
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
    batch = (chain // DILATION // segments).to(tl.int64)
    first = (chain // DILATION % segments) * turns * STEPS * DILATION + chain % DILATION

    value_ptr += batch * value_batch
    hidden_ptr += batch * hidden_batch + stream * WIDTH
    if mask_ptr is not None:
        mask_ptr += batch * mask_batch
    scalars_ptr += stream.to(tl.int64) * num_tokens + batch * seq
    out_ptr += batch * seq * (STREAMS * WIDTH) + stream * WIDTH

    # Every load that does not wait for the scalars: the taps before `first`, from earlier tokens or from the state, and
    # the first steps. Steps past the end stay undefined; nothing of them is stored.
    values = ()
    pasts = ()
    for k in tl.static_range(BEFORE):
        row = first + (k - BEFORE) * DILATION
        values += (tl.load(value_ptr + row.to(tl.int64) * value_row + within, mask=when(row >= 0, inside), other=0.0),)
        if state_ptr is not None:
            past_ptr = state_ptr + batch * state_batch + (state_columns + row).to(tl.int64) * state_column
            past_ptr += channels.to(tl.int64) * state_channel
            pasts += (tl.load(past_ptr, mask=when(row < 0, inside), other=0.0),)
    value_ptr += first.to(tl.int64) * value_row + within
    hidden_ptr += first.to(tl.int64) * hidden_row + within
    value, residual = load_steps(
        value_ptr, value_row, hidden_ptr, hidden_row, first, seq, inside, STEPS, DILATION, ADD_HIDDEN
    )
    norm_weight = tl.load(norm_weight_ptr + channels, mask=inside, other=0.0)
    taps = load_tap_words(conv_weight_ptr, channels, inside, KERNEL)
    if FOLLOWS:
        tl.extra.cuda.gdc_wait()

    window = ()
    for k in tl.static_range(BEFORE):
        row = first + (k - BEFORE) * DILATION
        past_gate = tl.load(scalars_ptr + row, mask=row >= 0, other=0.0)
        past_scale = tl.load(scalars_ptr + num_tokens * STREAMS + row, mask=row >= 0, other=0.0)
        gated, normed = gated_and_normed(cast(past_gate, GATED), past_scale, values[k], norm_weight, GATED, PLAIN)
        if mask_ptr is not None:
            mask = load_mask(mask_ptr + row.to(tl.int64) * mask_row, row >= 0, GATED)
            normed = mul_rounded(normed, mask, GATED)
        tap = round_to(normed, CONV)
        if state_ptr is not None:
            tap = tl.where(row >= 0, tap, round_to(pasts[k], CONV))
        window += (tap,)

    # STEPS tokens at a time, while the inputs of the next ones arrive. `scalars` has room for the steps past the end.
    scalars_ptr += first
    gate, scale = load_scalars(scalars_ptr, num_tokens * STREAMS, STEPS, DILATION)
    out_ptr += first.to(tl.int64) * (STREAMS * WIDTH) + within
    for _ in tl.range(0, turns):
        value_ptr += STEPS * DILATION * value_row
        hidden_ptr += STEPS * DILATION * hidden_row
        next_value, next_residual = load_steps(
            value_ptr, value_row, hidden_ptr, hidden_row, first + STEPS * DILATION, seq, inside, STEPS, DILATION,
            ADD_HIDDEN,
        )  # fmt: skip
        scalars_ptr += STEPS * DILATION
        next_gate, next_scale = load_scalars(scalars_ptr, num_tokens * STREAMS, STEPS, DILATION)
        for step in tl.static_range(STEPS):
            row = first + step * DILATION
            gated, normed = gated_and_normed(
                cast(gate[step], GATED), scale[step], value[step], norm_weight, GATED, PLAIN
            )
            if mask_ptr is not None:
                mask = load_mask(mask_ptr + row.to(tl.int64) * mask_row, row < seq, GATED)
                gated, normed = mul_rounded(gated, mask, GATED), mul_rounded(normed, mask, GATED)
            tap = round_to(normed, CONV)
            total = tap * taps[BEFORE]
            for k in tl.static_range(BEFORE):
                total += window[k] * taps[k]
            out = finish(total, gated, residual[step], CONV, SUM, OUT, ADD_HIDDEN)
            tl.store(out_ptr + step * DILATION * (STREAMS * WIDTH), out, mask=when(row < seq, inside))
            if KERNEL > 1:
                window = window[1:] + (tap,)
        first += STEPS * DILATION
        out_ptr += STEPS * DILATION * STREAMS * WIDTH
        value, residual, gate, scale = next_value, next_residual, next_gate, next_scale


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
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    PLAIN: tl.constexpr,
):
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    within = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)[:, None]
    stream = tl.program_id(0) // BLOCKS % STREAMS
    batch = (tl.program_id(0) // (BLOCKS * STREAMS)).to(tl.int64)
    channels = (stream * WIDTH + within).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (within < WIDTH) & (column < WINDOW)
    # Columns of [old state, normed], the last WINDOW of them; before the old state there are zeros.
    source = old_columns + seq - WINDOW + column
    row = (source - old_columns).to(tl.int64)
    recent = inside & (row >= 0)

    scalars_ptr += stream.to(tl.int64) * num_tokens + batch * seq
    gate = tl.load(scalars_ptr + row, mask=(row >= 0) & (column < WINDOW), other=0.0)
    scale = tl.load(scalars_ptr + num_tokens * STREAMS + row, mask=(row >= 0) & (column < WINDOW), other=0.0)
    value = tl.load(value_ptr + batch * value_batch + row * value_row + within, mask=recent, other=0.0)
    weight = tl.load(norm_weight_ptr + channels, mask=within < WIDTH, other=0.0)
    gated, normed = gated_and_normed(cast(gate, GATED), scale, value, weight, GATED, PLAIN)
    if mask_ptr is not None:
        mask = load_mask(mask_ptr + batch * mask_batch + row * mask_row, (row >= 0) & (column < WINDOW), GATED)
        normed = mul_rounded(normed, mask, GATED)
    if old_ptr is not None:
        past = tl.load(
            old_ptr + batch * old_batch + channels * old_channel + source * old_column,
            mask=inside & (row < 0) & (source >= 0),
            other=0.0,
        )
        normed = tl.where(row < 0, cast(past, GATED), normed)
    tl.debug_barrier()  # `new` may be `old`: every load before any store
    tl.store(new_ptr + batch * new_batch + channels * new_channel + column * new_column, normed, mask=inside)


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
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD_HIDDEN: tl.constexpr,
    GIVEN: tl.constexpr,
    FOLLOWS: tl.constexpr,
    PRODUCT: tl.constexpr,
    GATE: tl.constexpr,
    GATED: tl.constexpr,
    PLAIN: tl.constexpr,
    SUM: tl.constexpr,
):
    CONV: tl.constexpr = conv_weight_ptr.dtype.element_ty
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
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
    within = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = within < WIDTH
    if new_ptr is not None:
        # A lone token moves the state by one column: it keeps all but the first of its last WINDOW.
        column = tl.arange(0, COLUMNS)[None, :]
        kept = inside[:, None] & (column < WINDOW - 1)
        source = state_columns - (WINDOW - 1) + column
        if state_ptr is not None:
            moved = tl.load(
                state_ptr + within.to(tl.int64)[:, None] * state_channel + source * state_column,
                mask=kept & (source >= 0),
                other=0.0,
            )
        else:
            moved = tl.zeros([BLOCK, COLUMNS], GATED)
    norm_weight = tl.load(norm_weight_ptr + channel + within, mask=inside, other=0.0)
    taps = load_tap_words(conv_weight_ptr, channel + within, inside, KERNEL)
    residual = tl.load(hidden_ptr + position * hidden_row + within, mask=inside, other=0.0)
    values = ()
    pasts = ()
    for k in tl.static_range(KERNEL):
        source = position - (KERNEL - 1 - k) * DILATION
        values += (tl.load(value_ptr + source * value_row + within, mask=when(source >= 0, inside), other=0.0),)
        if state_ptr is not None:
            past_ptr = state_ptr + (state_columns + source) * state_column + within.to(tl.int64) * state_channel
            past = tl.load(past_ptr, mask=when(source < 0, inside), other=0.0)
            pasts += (round_to(past, CONV),)

    # Scalars of this token and of its earlier taps, one row each; a lone token's earlier taps all lie in the state.
    back = ROWS - 1 - tl.arange(0, ROWS)  # the last row is this token
    if FOLLOWS:
        tl.extra.cuda.gdc_wait()
    if GIVEN:
        gates = tl.load(scalars_ptr + stream.to(tl.int64) * num_tokens + token + back)
        scales = tl.load(scalars_ptr + (stream + STREAMS).to(tl.int64) * num_tokens + token + back)
    else:
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
            WIDTH, PRODUCT, GATE, GATED, PLAIN,
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
            gated, normed = gated_and_normed(cast(gate, GATED), scale, values[k], norm_weight, GATED, PLAIN)
            if mask_ptr is not None:
                mask = load_mask(mask_ptr + source * mask_row, source >= 0, GATED)
                gated, normed = mul_rounded(gated, mask, GATED), mul_rounded(normed, mask, GATED)
            total += tl.where(source >= 0, round_to(normed, CONV), 0.0) * taps[k]
        if state_ptr is not None:
            total += pasts[k] * taps[k]
    out = finish(total, gated, residual, CONV, SUM, OUT, ADD_HIDDEN)
    tl.store(out_ptr + token.to(tl.int64) * (STREAMS * WIDTH) + channel + within, out, mask=inside)

    # `normed`, `gate` and `scale` are now this token's.
    if new_ptr is not None:
        new_ptr += batch * new_batch + (channel + within).to(tl.int64) * new_channel
        if state_ptr is not None:
            moved = cast(moved, GATED)
        tl.debug_barrier()  # `new` may be `old`: every load before any store
        tl.store(new_ptr[:, None] + column * new_column, moved, mask=kept)
        tl.store(new_ptr + (WINDOW - 1) * new_column, normed, mask=inside)
    elif scalars_ptr is not None:
        if not GIVEN:
            place = scalars_ptr + stream.to(tl.int64) * num_tokens + token
            tl.store(place, gate)
            tl.store(place + num_tokens * STREAMS, scale)
