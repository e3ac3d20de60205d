"""The PLE layer: hashed n-gram rows, gated by the residual streams, plus a short dilated convolution. Padded layout."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import Config
from .ngram import head_sizes, layer_multipliers, ngram_ids
from .norms import RMSNorm


class PLEState(NamedTuple):
    conv: Tensor  # [B, hc_count * hidden, (kernel - 1) * ngram_size]
    context: Tensor  # [B, ngram_size - 1] int64, oldest first, EOS before the start


class NGramEmbedding(nn.Module):
    layer_multipliers: Tensor
    ngram_heads_vocab_sizes: Tensor
    ngram_heads_offsets: Tensor

    def __init__(self, config: Config, ple_index: int) -> None:
        super().__init__()
        self.eos = config.eos_token_id
        num_heads = (config.ngram_size - 1) * config.heads_per_ngram
        sizes = head_sizes(config.ngram_vocab_size_base, num_heads, ple_index)
        multipliers = layer_multipliers(config.vocab_size, config.ngram_size, ple_index, config.seed)
        self.register_buffer("layer_multipliers", torch.tensor(multipliers))
        self.register_buffer("ngram_heads_vocab_sizes", torch.tensor(sizes))
        self.register_buffer("ngram_heads_offsets", torch.tensor([0, *itertools.accumulate(sizes)][:-1]))
        divisor = config.make_ngram_vocab_size_divisible_by
        num_rows = -(-sum(sizes) // divisor) * divisor
        self.ngram_embedding = nn.Embedding(num_rows, config.ple_embed_dim // num_heads)

    def forward(self, tokens: Tensor, older: list[Tensor]) -> Tensor:
        """[...] -> [..., ple_embed_dim]. The table may live on another device than the tokens."""
        sizes, offsets = self.ngram_heads_vocab_sizes, self.ngram_heads_offsets
        ids = ngram_ids(tokens, older, self.layer_multipliers, sizes, offsets, self.eos)
        return self.ngram_embedding(ids.to(self.ngram_embedding.weight.device)).to(ids.device).flatten(-2)


class PLE(nn.Module):
    def __init__(self, config: Config, ple_index: int) -> None:
        super().__init__()
        self.ngram_size, self.eos = config.ngram_size, config.eos_token_id
        self.num_streams, self.hidden_size = config.hc_count, config.hidden_size
        width = config.hc_count * config.hidden_size
        self.ple_embedding = NGramEmbedding(config, ple_index)
        self.key_proj = nn.Linear(config.ple_embed_dim, width, bias=False)
        self.value_proj = nn.Linear(config.ple_embed_dim, config.hidden_size, bias=False)
        self.norm_key = RMSNorm(width, config.hidden_size, config.rms_norm_eps)
        self.norm_query = RMSNorm(width, config.hidden_size, config.rms_norm_eps)
        self.norm_conv = RMSNorm(width, config.hidden_size, config.rms_norm_eps)
        kernel_size = config.ple_conv_kernel_size
        self.conv1d = nn.Conv1d(width, width, kernel_size, groups=width, dilation=config.ngram_size, bias=False)
        self.reach = (kernel_size - 1) * config.ngram_size  # how far back the oldest tap looks

    def initial_state(self, batch_size: int) -> PLEState:
        weight, device = self.conv1d.weight, self.conv1d.weight.device
        context = torch.full((batch_size, self.ngram_size - 1), self.eos, device=device)
        return PLEState(weight.new_zeros(batch_size, weight.shape[0], self.reach), context)

    def gate(self, streams: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """The token's value, let into each stream as far as key and stream agree; and its norm, for the convolution."""
        split = (self.num_streams, self.hidden_size)
        key = self.norm_key(self.key_proj(embeddings)).unflatten(-1, split)
        query = self.norm_query(streams).unflatten(-1, split)
        agreement = (key * query).sum(-1, keepdim=True) / self.hidden_size**0.5
        opening = torch.sigmoid(agreement.sign() * agreement.abs().clamp(min=1e-6).sqrt())
        gated = (opening * self.value_proj(embeddings).unsqueeze(-2)).flatten(-2)
        return gated, self.norm_conv(gated)

    def forward(
        self, streams: Tensor, input_ids: Tensor, mask: Tensor | None = None, state: PLEState | None = None
    ) -> Tensor:
        """What to add to `streams` [B, S, hc_count * hidden]; mask [B, S] is True where the token counts."""
        num_tokens = input_ids.shape[1]
        tokens = input_ids.long()
        if mask is not None:
            tokens = torch.where(mask, tokens, self.eos)
        before = self.ngram_size - 1
        history = F.pad(tokens, (before, 0), value=self.eos) if state is None else torch.cat([state.context, tokens], 1)
        older = [history[:, before - shift : before - shift + num_tokens] for shift in range(1, self.ngram_size)]

        gated, normed = self.gate(streams, self.ple_embedding(tokens, older))
        if mask is not None:
            gated, normed = (x * mask.unsqueeze(-1) for x in (gated, normed))
        columns = normed.mT
        window = F.pad(columns, (self.reach, 0)) if state is None else torch.cat([state.conv, columns], dim=-1)
        if state is not None:
            state.context.copy_(history[:, num_tokens:])
            state.conv.copy_(window[..., num_tokens:])
        return gated + F.silu(self.conv1d(window)).mT
