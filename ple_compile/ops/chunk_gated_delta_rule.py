"""The gated delta rule over whole sequences, opaque to Dynamo, so that no graph depends on the number of chunks.

    state_t = exp(g_t) * state_{t-1};  state_t += k_t (x) beta_t * (v_t - k_t . state_t);  out_t = q_t . state_t

query and key `[B, T, Hk, Dk]`, value `[B, T, Hv, Dv]`, g (log decay, <= 0) and beta `[B, T, Hv]`, initial_state
`[B, Hv, Dk, Dv]` or none; `Hv` is a multiple of `Hk`. Returns out `[B, T, Hv, Dv]` in query's type and the last state
in float32. Everything between is float32. Queries are scaled by `Dk ** -0.5`.

Within a chunk of C tokens the rule is linear in the state at the chunk's start, so all chunks' coefficients come from
one triangular solve (the inverse of I + lower(beta * k k^T * decay)); a loop of five products per chunk carries the
state on. The loop's length is a plain integer here: the op runs eagerly inside a compiled graph.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ple_compile.ops._library import define


def _normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


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
    batch, length, num_heads, value_dim = value.shape
    key_dim, groups, out_dtype = key.shape[-1], num_heads // key.shape[2], query.dtype
    num_chunks = -(-length // chunk_size)
    num_rows, padding = batch * num_heads, num_chunks * chunk_size - length

    def chunks(x: Tensor) -> Tensor:
        """`[B, T, H, D]` as float32 `[chunks, B * Hv, chunk_size, D]`."""
        x = F.pad(x.float(), (0, 0, 0, 0, 0, padding)).view(batch, num_chunks, chunk_size, x.shape[2], x.shape[3])
        x = x.permute(1, 0, 3, 2, 4)
        if x.shape[2] != num_heads:
            x = x.repeat_interleave(groups, dim=2)
        return x.reshape(num_chunks, num_rows, chunk_size, x.shape[4])

    if normalize:
        query, key = _normalize(query.float()), _normalize(key.float())
    query, key, value = chunks(query) * key_dim**-0.5, chunks(key), chunks(value)
    beta, decay = chunks(beta.unsqueeze(-1)), chunks(g.unsqueeze(-1)).cumsum(2)

    # exp(decay_i - decay_j) for j <= i; the rest is masked before exp, where it would overflow.
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=key.device).triu(1)
    pairwise = (decay - decay.mT).masked_fill_(later, float("-inf")).exp_()
    system = ((key * beta) @ key.mT).mul_(pairwise)
    attention = (query @ key.mT).mul_(pairwise)
    solved = torch.linalg.solve_triangular(
        system, torch.cat([value * beta, key * (beta * decay.exp())], dim=-1), upper=False, unitriangular=True
    )
    written, read = solved.split([value_dim, key_dim], dim=-1)
    # What the state at the chunk's start contributes to the chunk's values and to its outputs, in one product.
    reads = torch.cat([read, query * decay.exp()], dim=2)
    key = (key * (decay[:, :, -1:] - decay).exp()).mT
    chunk_decay = decay[:, :, -1:].exp()

    if initial_state is None:
        state = value.new_zeros(num_rows, key_dim, value_dim)
    else:
        state = initial_state.float().reshape(num_rows, key_dim, value_dim).clone()
    out = torch.empty_like(value)
    for i in range(num_chunks):
        from_state = reads[i] @ state
        update = written[i] - from_state[:, :chunk_size]
        torch.baddbmm(from_state[:, chunk_size:], attention[i], update, out=out[i])
        state = torch.baddbmm(state * chunk_decay[i], key[i], update)

    out = out.view(num_chunks, batch, num_heads, chunk_size, value_dim).permute(1, 0, 3, 2, 4)
    out = out.reshape(batch, num_chunks * chunk_size, num_heads, value_dim)[:, :length]
    return out.to(out_dtype).contiguous(), state.view(batch, num_heads, key_dim, value_dim)


def _fake(query, key, value, g, beta, initial_state, chunk_size, normalize):
    batch, _, num_heads, value_dim = value.shape
    state = value.new_empty(batch, num_heads, key.shape[-1], value_dim, dtype=torch.float32)
    return torch.empty_like(value, dtype=query.dtype, memory_format=torch.contiguous_format), state


chunk_gated_delta_rule = define(
    "chunk_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor? initial_state, "
    "int chunk_size, bool normalize) -> (Tensor, Tensor)",
    cpu=reference,
    cuda=reference,
    fake=_fake,
)
