"""Gated delta net: linear attention whose state forgets (decay) and corrects itself (delta rule)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import Config
from .norms import GatedRMSNorm


class DeltaNetState(NamedTuple):
    conv: Tensor  # [B, channels, kernel - 1], the columns before the next token
    recurrent: Tensor  # [B, value heads, key dim, value dim], float32


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence

        state = exp(log_decay[t]) * state
        state = state + outer(key[t], beta[t] * (value[t] - state^T key[t]))
        out[t] = state^T query[t]

    for all t at once: the corrections depend on one another through a unit lower triangular system. query, key, value
    [B, heads, S, dim], log_decay and beta [B, heads, S], state [B, heads, key dim, value dim], all float32.
    Memory grows with S * S: feed a long prompt in chunks through the cache.
    """
    total = log_decay.cumsum(-1)
    since = total.unsqueeze(-1) - total.unsqueeze(-2)  # [..., i, j]: log decay from token j to token i
    later = torch.ones_like(since, dtype=torch.bool).triu(1)
    since = since.masked_fill(later, float("-inf")).exp()
    carried = total.exp().unsqueeze(-1)  # decay from the initial state to each token

    beta = beta.unsqueeze(-1)
    system = (beta * key) @ key.mT * since
    wanted = beta * (value - carried * key @ state)
    correction = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)

    out = carried * query @ state + (query @ key.mT * since) @ correction
    remaining = (total[..., -1:] - total).exp().unsqueeze(-1)
    return out, carried[..., -1:, :] * state + (remaining * key).mT @ correction


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class GatedDeltaNet(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.widths = (keys, keys, values)
        channels = sum(self.widths)
        self.in_proj_qkv = nn.Linear(config.hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, values, bias=False)
        self.in_proj_b = nn.Linear(config.hidden_size, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(config.hidden_size, self.value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, config.linear_conv_kernel_dim, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(self.value_heads))
        self.A_log = nn.Parameter(torch.empty(self.value_heads).uniform_(0.01, 16).log())
        self.norm = GatedRMSNorm(self.value_dim, config.output_gate_type, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, config.hidden_size, bias=False)

    def initial_state(self, batch_size: int) -> DeltaNetState:
        weight, rows = self.conv1d.weight, (batch_size, self.value_heads, self.key_dim, self.value_dim)
        return DeltaNetState(
            weight.new_zeros(batch_size, weight.shape[0], weight.shape[-1] - 1),
            weight.new_zeros(rows, dtype=torch.float32),
        )

    def forward(self, x: Tensor, mask: Tensor | None = None, state: DeltaNetState | None = None) -> Tensor:
        """x [B, S, hidden], mask [B, S] True where the token counts; `state` is updated in place."""
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0)
        batch_size, num_tokens, _ = x.shape
        past = self.initial_state(batch_size) if state is None else state

        window = torch.cat([past.conv, self.in_proj_qkv(x).mT], dim=-1)
        mixed = F.silu(self.conv1d(window)).mT
        query, key, value = (part.float() for part in mixed.split(self.widths, dim=-1))
        query, key = (unit(part.unflatten(-1, (self.key_heads, self.key_dim))) for part in (query, key))
        value = value.unflatten(-1, (self.value_heads, self.value_dim))
        # One key head serves several neighbouring value heads.
        query, key = (part.repeat_interleave(self.value_heads // self.key_heads, dim=2) for part in (query, key))

        log_decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        out, recurrent = gated_delta_rule(
            query.transpose(1, 2) * self.key_dim**-0.5,
            key.transpose(1, 2),
            value.transpose(1, 2),
            log_decay.mT,
            self.in_proj_b(x).sigmoid().float().mT,
            past.recurrent,
        )
        if state is not None:
            state.conv.copy_(window[..., num_tokens:])
            state.recurrent.copy_(recurrent)

        gate = self.in_proj_z(x).unflatten(-1, (self.value_heads, self.value_dim))
        return self.out_proj(self.norm(out.transpose(1, 2).to(x.dtype), gate).flatten(-2))
