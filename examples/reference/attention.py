"""Attention over the tokens that the QSA indexer selects."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import Config
from .norms import RMSNorm


class AttentionState(NamedTuple):
    """Buffers for `max_length` tokens; which entries count is the step's to say."""

    keys: Tensor  # [B, max_length, kv heads, head_dim]
    values: Tensor
    index_keys: Tensor  # [B, max_length, indexer head_dim], neither pooled nor rotated


class Rotary(NamedTuple):
    """cos and sin, each [B, tokens, rotary dim]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, config: Config, dtype: torch.dtype) -> Rotary:
        dim = int(config.head_dim * config.partial_rotary_factor)
        exponent = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim
        angles = positions.unsqueeze(-1).float() * (1.0 / config.rope_theta**exponent)
        angles = torch.cat([angles, angles], dim=-1)
        return cls(angles.cos().to(dtype), angles.sin().to(dtype))

    def rotate(self, x: Tensor) -> Tensor:
        """x [B, tokens, heads, dim]; dims beyond the rotary ones pass through."""
        cos, sin = self.cos.unsqueeze(2), self.sin.unsqueeze(2)
        rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        first, second = rotated.chunk(2, dim=-1)
        return torch.cat([rotated * cos + torch.cat([-second, first], dim=-1) * sin, passed], dim=-1)


class Step(NamedTuple):
    """What one call means to every layer: S new tokens among `keys` keys (cached ones included)."""

    mask: Tensor | None  # [B, S], True where the new token counts; None = everywhere
    key_index: Tensor  # [B, S], where the new tokens stand among the keys
    key_counts: Tensor  # [B, keys], True where a key counts
    visible: Tensor  # [B, S, keys], True where a new token may look
    query_rotary: Rotary
    key_rotary: Rotary


def extend(buffer: Tensor | None, new: Tensor, index: Tensor) -> Tensor:
    """Write the new tokens into the buffer, in place, and return it all; without a buffer the new ones are all."""
    if buffer is None:
        return new
    rows = torch.arange(index.shape[0], device=index.device).unsqueeze(-1)
    buffer[rows, index] = new
    return buffer


class Indexer(nn.Module):
    """Selects, per query, the best blocks of `compress_ratio` consecutive visible tokens, and the incomplete last one.

    A block's members do not depend on the query: they are the visible keys in order, `compress_ratio` at a time, and a
    query sees those blocks of which all members are in its past. Blocks of equal score rank as the sort happens to.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.head_dim = config.indexer_n_heads, config.indexer_head_dim
        self.ratio = config.indexer_compress_ratio
        self.max_blocks = config.indexer_budget // config.indexer_compress_ratio
        self.index_qk_proj = nn.Linear(config.hidden_size, (self.heads + 1) * self.head_dim, bias=False)
        self.q_layernorm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_layernorm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, step: Step, state: AttentionState | None) -> Tensor:
        """[B, S, hidden] -> [B, S, keys], True where the query looks."""
        projected = self.index_qk_proj(x).unflatten(-1, (self.heads + 1, self.head_dim))
        query = step.query_rotary.rotate(self.q_layernorm(projected[:, :, :-1]))
        keys = extend(state.index_keys if state else None, projected[:, :, -1], step.key_index)

        # Block b holds the counting keys of rank b * ratio up to (b + 1) * ratio.
        num_blocks = keys.shape[1] // self.ratio
        in_order = step.key_counts.logical_not().to(torch.int8).argsort(dim=-1, stable=True)
        block_starts = torch.arange(num_blocks, device=x.device).unsqueeze(-1) * self.ratio
        members = in_order[:, block_starts + torch.arange(self.ratio, device=x.device)]  # [B, blocks, ratio]
        rows = torch.arange(x.shape[0], device=x.device).view(-1, 1, 1)
        pooled = keys[rows, members].float().mean(2).to(keys.dtype)
        rows, first = rows[:, 0], members[:, :, 0]
        rotary = Rotary(step.key_rotary.cos[rows, first], step.key_rotary.sin[rows, first])
        block_keys = rotary.rotate(self.k_layernorm(pooled).unsqueeze(2)).squeeze(2)

        scores = torch.einsum("bshd,bnd->bshn", query.float(), block_keys.float()).relu().sum(2) / self.head_dim**0.5
        num_complete = step.visible.sum(-1, keepdim=True) // self.ratio
        complete = torch.arange(num_blocks, device=x.device) < num_complete
        place = scores.masked_fill(~complete, float("-inf")).argsort(dim=-1, descending=True).argsort(dim=-1)
        chosen = complete & (place < self.max_blocks)

        rank = step.key_counts.long().cumsum(-1).unsqueeze(1) - 1
        block = (rank // self.ratio).clamp(0, num_blocks).expand(-1, x.shape[1], -1)
        chosen = F.pad(chosen, (0, 1)).gather(-1, block)  # the added block stands for "not complete for anyone"
        return step.visible & (chosen | (rank >= num_complete * self.ratio))


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim * 2, bias=bias)  # query and output gate, per head
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.indexer = Indexer(config)

    def initial_state(self, batch_size: int, max_length: int) -> AttentionState:
        weight = self.k_proj.weight
        keys = weight.new_zeros(batch_size, max_length, self.kv_heads, self.head_dim)
        index_keys = weight.new_zeros(batch_size, max_length, self.indexer.head_dim)
        return AttentionState(keys, keys.clone(), index_keys)

    def forward(self, x: Tensor, step: Step, state: AttentionState | None = None) -> Tensor:
        selected = self.indexer(x, step, state)
        query, gate = self.q_proj(x).unflatten(-1, (self.heads, 2, self.head_dim)).unbind(-2)
        query = step.query_rotary.rotate(self.q_norm(query))
        key = step.query_rotary.rotate(self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))))
        value = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        key = extend(state.keys if state else None, key, step.key_index)
        value = extend(state.values if state else None, value, step.key_index)

        group = self.heads // self.kv_heads
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.repeat_interleave(group, dim=2).transpose(1, 2),
            value.repeat_interleave(group, dim=2).transpose(1, 2),
            attn_mask=selected.unsqueeze(1),
        )
        return self.o_proj((out.transpose(1, 2) * torch.sigmoid(gate)).flatten(-2))
