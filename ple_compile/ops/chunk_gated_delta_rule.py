"""The gated delta rule over whole sequences, opaque to Dynamo, so that no graph depends on the number of chunks.

    state_t = exp(g_t) * state_{t-1};  state_t += k_t (x) beta_t * (v_t - k_t . state_t);  out_t = q_t . state_t

query and key `[B, T, Hk, Dk]`, value `[B, T, Hv, Dv]`, g (log decay, <= 0) and beta `[B, T, Hv]`, initial_state
`[B, Hv, Dk, Dv]` or none; `Hv` is a multiple of `Hk`. Returns out `[B, T, Hv, Dv]` in query's type and the last state
in float32. Everything between is float32. Queries are scaled by `Dk ** -0.5`.

Within a chunk of C tokens the rule is linear in the state at the chunk's start, so all chunks' coefficients come from
one triangular solve (the inverse of I + lower(beta * k k^T * decay)). A scan carries the state from chunk to chunk;
its length is a plain integer here, as the op runs eagerly inside a compiled graph. On CUDA the scan is one launch that
keeps the state in registers; each of its products is three in tf32, of the halves of float32 mantissas (22 bits kept).
Bytes moved by the scan per chunk and head: 4 * C * (3 * Dk + 2 * Dv + C).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ple_compile.ops._library import define


class _Chunks(NamedTuple):
    """Float32 coefficients of every chunk, `[chunks, B * Hv, ...]`, contiguous; `solved` is `[written | read]`."""

    solved: Tensor  # [C, Dv + Dk]: what the chunk writes, and what of the old state its tokens read
    query: Tensor  # [C, Dk], decayed since the chunk's start
    attention: Tensor  # [C, C]
    key: Tensor  # [C, Dk], to be decayed until the chunk's end
    decay: Tensor  # [1, 1], of the whole chunk


def _normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _prepare(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int, normalize: bool
) -> _Chunks:
    batch, length, num_heads, _ = value.shape
    key_dim, groups = key.shape[-1], num_heads // key.shape[2]
    num_chunks = -(-length // chunk_size)

    def chunks(x: Tensor) -> Tensor:
        """`[B, T, H, D]` as float32 `[chunks, B * Hv, chunk_size, D]`."""
        x = F.pad(x.float(), (0, 0, 0, 0, 0, num_chunks * chunk_size - length))
        x = x.view(batch, num_chunks, chunk_size, x.shape[2], x.shape[3]).permute(1, 0, 3, 2, 4)
        if x.shape[2] != num_heads:
            x = x.repeat_interleave(groups, dim=2)
        return x.reshape(num_chunks, batch * num_heads, chunk_size, x.shape[4])

    if normalize:
        query, key = _normalize(query.float()), _normalize(key.float())
    query, key, value = chunks(query) * key_dim**-0.5, chunks(key), chunks(value)
    beta, decay = chunks(beta.unsqueeze(-1)), chunks(g.unsqueeze(-1)).cumsum(2)

    # exp(decay_i - decay_j) for j <= i; the rest is masked before exp, where it would overflow.
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=key.device).triu(1)
    pairwise = (decay - decay.mT).masked_fill_(later, float("-inf")).exp_()
    system = ((key * beta) @ key.mT).mul_(pairwise)
    writes = torch.cat([value * beta, key * (beta * decay.exp())], dim=-1)
    last = decay[:, :, -1:]
    return _Chunks(
        solved=torch.linalg.solve_triangular(system, writes, upper=False, unitriangular=True).contiguous(),
        query=query * decay.exp(),
        attention=(query @ key.mT).mul_(pairwise),
        key=key * (last - decay).exp(),
        decay=last.exp(),
    )


def scan_reference(chunks: _Chunks, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs `[chunks, B * Hv, C, Dv]` and the state `[B * Hv, Dk, Dv]` after the last chunk."""
    num_chunks, num_rows, chunk_size, _ = chunks.query.shape
    value_dim = state.shape[-1]
    out = state.new_empty(num_chunks, num_rows, chunk_size, value_dim)
    for i in range(num_chunks):
        update = torch.baddbmm(chunks.solved[i, ..., :value_dim], chunks.solved[i, ..., value_dim:], state, alpha=-1)
        torch.baddbmm(chunks.query[i] @ state, chunks.attention[i], update, out=out[i])
        state = torch.baddbmm(state * chunks.decay[i], chunks.key[i].mT, update)
    return out, state


@triton.jit(do_not_specialize=["num_chunks", "num_rows"])
def delta_scan_kernel(
    out_ptr,
    final_ptr,
    solved_ptr,
    query_ptr,
    attention_ptr,
    key_ptr,
    decay_ptr,
    state_ptr,
    num_chunks,
    num_rows,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    value = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    token, source, feature = tl.arange(0, CHUNK), tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)

    # This program's columns of the state stay in registers, in two halves: whole operands would spill.
    state_offset = row * (KEY_DIM * VALUE_DIM) + feature[:, None] * VALUE_DIM + value[None, :]
    low = tl.load(state_ptr + state_offset)
    high = tl.load(state_ptr + state_offset + BLOCK_K * VALUE_DIM)

    block = row
    for _ in range(num_chunks):
        # What the chunk writes, less what the old state predicts.
        solved = solved_ptr + block * (CHUNK * (VALUE_DIM + KEY_DIM)) + token[:, None] * (VALUE_DIM + KEY_DIM)
        read = solved + VALUE_DIM + feature[None, :]
        update = tl.load(solved + value[None, :])
        update -= tl.dot(tl.load(read), low, input_precision="tf32x3")
        update -= tl.dot(tl.load(read + BLOCK_K), high, input_precision="tf32x3")
        # Outputs: from the old state, then from the chunk itself.
        token_key = block * (CHUNK * KEY_DIM) + token[:, None] * KEY_DIM + feature[None, :]
        out = tl.dot(tl.load(query_ptr + token_key), low, input_precision="tf32x3")
        out += tl.dot(tl.load(query_ptr + token_key + BLOCK_K), high, input_precision="tf32x3")
        pair = block * (CHUNK * CHUNK) + token[:, None] * CHUNK + source[None, :]
        out += tl.dot(tl.load(attention_ptr + pair), update, input_precision="tf32x3")
        tl.store(out_ptr + block * (CHUNK * VALUE_DIM) + token[:, None] * VALUE_DIM + value[None, :], out)
        # The state at the chunk's end.
        decay = tl.load(decay_ptr + block)
        low = low * decay + tl.dot(tl.trans(tl.load(key_ptr + token_key)), update, input_precision="tf32x3")
        high_key = tl.trans(tl.load(key_ptr + token_key + BLOCK_K))
        high = high * decay + tl.dot(high_key, update, input_precision="tf32x3")
        block += num_rows

    tl.store(final_ptr + state_offset, low)
    tl.store(final_ptr + state_offset + BLOCK_K * VALUE_DIM, high)


def _scan_applies(chunk_size: int, key_dim: int, value_dim: int) -> bool:
    """Powers of two: two halves of a key wide enough for a matrix unit, and no more than the registers hold."""
    return chunk_size in (16, 32, 64) and key_dim in (32, 64, 128) and value_dim in (16, 32, 64, 128)


def scan_launch(chunks: _Chunks, state: Tensor) -> tuple[Tensor, Tensor]:
    """`scan_reference` in one launch."""
    num_chunks, num_rows, chunk_size, key_dim = chunks.query.shape
    value_dim = state.shape[-1]
    out, final = state.new_empty(num_chunks, num_rows, chunk_size, value_dim), torch.empty_like(state)
    block_v = min(32, value_dim)
    delta_scan_kernel[(num_rows, value_dim // block_v)](
        out,
        final,
        *chunks,
        state,
        num_chunks,
        num_rows,
        CHUNK=chunk_size,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=key_dim // 2,
        BLOCK_V=block_v,
        num_warps=4,
        num_stages=1,
    )
    return out, final


def _run(scan, query, key, value, g, beta, initial_state, chunk_size, normalize) -> tuple[Tensor, Tensor]:
    batch, length, num_heads, value_dim = value.shape
    key_dim = key.shape[-1]
    chunks = _prepare(query, key, value, g, beta, chunk_size, normalize)
    if initial_state is None:
        state = chunks.query.new_zeros(batch * num_heads, key_dim, value_dim)
    else:
        state = initial_state.float().reshape(batch * num_heads, key_dim, value_dim).contiguous()
    out, state = scan(chunks, state)
    out = out.view(-1, batch, num_heads, chunk_size, value_dim).permute(1, 0, 3, 2, 4)
    out = out.reshape(batch, -1, num_heads, value_dim)[:, :length]
    return out.to(query.dtype).contiguous(), state.view(batch, num_heads, key_dim, value_dim)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    chunk_size: int,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """The op, in plain torch."""
    return _run(scan_reference, query, key, value, g, beta, initial_state, chunk_size, normalize)


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    chunk_size: int,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """The op with its scan as one kernel, where its sizes allow it."""
    scan = scan_launch if _scan_applies(chunk_size, key.shape[-1], value.shape[-1]) else scan_reference
    return _run(scan, query, key, value, g, beta, initial_state, chunk_size, normalize)


def fake(query, key, value, g, beta, initial_state, chunk_size, normalize):
    batch, _, num_heads, value_dim = value.shape
    state = value.new_empty(batch, num_heads, key.shape[-1], value_dim, dtype=torch.float32)
    return value.new_empty(value.shape, dtype=query.dtype), state


chunk_gated_delta_rule = define(
    "chunk_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor? initial_state, "
    "int chunk_size, bool normalize) -> (Tensor, Tensor)",
    cpu=reference,
    cuda=launch,
    fake=fake,
)
